// A coordinator with simulated ranks and a clock of its own: what its tests share.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "core/coordinator.h"
#include "samples.h"

namespace hvdtorch::test {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A coordinator, its time, and the tables of each rank.
class CoordinatedJob {
 public:
  explicit CoordinatedJob(int size, int64_t threshold = 1000, microseconds cycle = milliseconds(5),
                          milliseconds warn_after = {}, milliseconds stop_after = {})
      : size_(size), coordinator_(options(size, threshold, cycle, warn_after, stop_after)) {
    for (int rank = 0; rank < size; ++rank) {
      writers_.emplace_back(16);
      logs_.emplace_back(16);
    }
  }

  void say(int rank, const Statement& statement) {
    if (rank == 0) {
      coordinator_.on_statement(0, statement, now_);
      return;
    }
    std::string frame;
    encode(frame, statement, writers_[rank]);
    coordinator_.on_frame(rank, frame, now_);
  }
  void ready(int rank, const OpDesc& d) { say(rank, Ready{share(d), std::nullopt}); }
  void all_ready(const OpDesc& d) {
    for (int rank = 0; rank < size_; ++rank) ready(rank, d);
  }
  void all_ready(const std::string& name) { all_ready(allreduce_of(name)); }
  // Names of allreduces of a process set: all its members are ready.
  void all_ready(uint32_t set, const std::vector<int>& ranks, const std::string& name) {
    for (int rank : ranks) ready(rank, in_set(set, allreduce_of(name)));
  }
  // All ranks of the job say so; the entry is taken, the set's id is given back.
  uint32_t add_set(const std::vector<int>& ranks) {
    for (int rank = 0; rank < size_; ++rank) say(rank, addition_of(ranks));
    const auto taken = coordinator_.take_entries(now_);
    check_eq(taken.size(), 1u);
    return static_cast<uint32_t>(std::get<Launch>(taken.front()).items.front().numbers.at(0));
  }
  // The entry is not taken.
  void remove_set(uint32_t id) {
    for (int rank = 0; rank < size_; ++rank) say(rank, removal_of(id));
  }
  // What ranks 1, 2, ... read: "1: launch a | 2: launch a, launch b".
  std::string read(const std::vector<Entry>& entries) {
    std::map<int, std::string> by_rank;
    coordinator_.distribute(entries, [&](int rank, std::string_view frame) {
      check(!frame.empty(), "an empty frame");
      check(by_rank.count(rank) == 0, "two frames for one rank");
      by_rank[rank] = outline(decode_entries(frame, logs_[static_cast<size_t>(rank)]), ", ");
    });
    std::string text;
    for (const auto& [rank, read] : by_rank) {
      text += (text.empty() ? "" : " | ") + std::to_string(rank) + ": " + read;
    }
    return text;
  }
  std::vector<Entry> take() { return coordinator_.take_entries(now_); }

  void pass(microseconds span) { now_ += span; }
  Coordinator& operator*() { return coordinator_; }
  Coordinator* operator->() { return &coordinator_; }

  // "launch a b | error c | down: text | abort: text"
  std::string entries() { return outline(take(), " | "); }

  static std::string outline(const std::vector<Entry>& entries, const std::string& separator) {
    std::string text;
    for (const auto& entry : entries) {
      text += text.empty() ? "" : separator;
      if (const auto* launch = std::get_if<Launch>(&entry)) {
        text += launch->inlined ? "inline" : "launch";
        for (const auto& item : launch->items) text += " " + item.desc->name;
      } else if (const auto* error = std::get_if<Error>(&entry)) {
        text += "error";
        for (const auto& name : error->names) text += " " + name;
      } else {
        const auto& down = std::get<Down>(entry);
        check(!down.last, "only a leaving coordinator says so");
        text += (down.abort ? "abort: " : "down: ") + down.text;
      }
    }
    return text;
  }

  // Time from now to the deadline.
  std::optional<microseconds> due() const {
    const auto deadline = coordinator_.deadline();
    if (!deadline) return std::nullopt;
    return std::chrono::duration_cast<microseconds>(*deadline - now_);
  }

 private:
  static Coordinator::Options options(int size, int64_t threshold, microseconds cycle,
                                      milliseconds warn_after, milliseconds stop_after) {
    Coordinator::Options o;
    o.size = size;
    for (int rank = 0; rank < size; ++rank) o.hosts.push_back("host" + std::to_string(rank / 2));
    o.planner.fusion_threshold = threshold;
    o.cycle_time = cycle;
    o.cache_capacity = 16;
    o.cause_grace = milliseconds(1500);
    o.stall_warn_after = warn_after;
    o.stall_stop_after = stop_after;
    return o;
  }
  int size_;
  Coordinator coordinator_;
  std::vector<SlotWriter> writers_;
  std::vector<LogSlots> logs_;
  Coordinator::Clock::time_point now_{std::chrono::hours(1)};
};

}  // namespace hvdtorch::test
