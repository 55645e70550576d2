// Coordinator: rank 0's half of the control plane. Statements of all ranks and the passage of
// launches go in; the log's entries come out, to be sent to every rank and executed in order.
//
// It decides when a ready tensor is launched: at once while fewer than kPipeline launches are
// unfinished here, else it gathers company until one finishes, the cycle time has passed, or the
// fusion threshold is full.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/message.h"
#include "core/negotiator.h"
#include "core/planner.h"

namespace hvdtorch {

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    int size = 1;
    std::vector<std::string> hosts;
    int64_t fusion_threshold = 0;
    std::chrono::microseconds cycle_time{1000};
    uint32_t cache_capacity = 1024;
    std::chrono::milliseconds cause_grace{1500};
    std::function<int64_t(uint32_t process_set)> divisor;
  };
  explicit Coordinator(Options options);

  // What rank `rank` says. Malformed statements end the job, with the rank named.
  void on_frame(int rank, const std::string& frame, Clock::time_point now);
  void on_statement(int rank, Statement statement, Clock::time_point now);
  void on_lost(int rank, const std::string& why);

  // A launch was finished on this rank.
  void on_launch_finished() noexcept { --unfinished_; }

  // Entries due now, in log order.
  std::vector<Entry> take_entries(Clock::time_point now);
  // When take_entries() has to be called again even if nothing happens.
  std::optional<Clock::time_point> deadline() const;
  // True while tensors wait for company, so that the end of a launch matters.
  bool gathering() const noexcept { return !planner_.idle(); }

  // Encodes entries as one frame of the log.
  std::string encode(const std::vector<Entry>& entries);
  // Said goodbye, or lost: nothing more can be sent to it.
  bool departed(int rank) const { return presence_[rank] == Presence::kGone; }

  // "rank 2 (host b)"
  std::string describe(int rank) const;
  // What the others are told when that rank leaves; `reason` is "" for a plain shutdown.
  std::string farewell(int rank, const std::string& reason) const;

 private:
  static constexpr int kPipeline = 2;
  // kIgnored: spoke nonsense. It is not listened to, but still told why the job ends.
  enum class Presence : char { kHere, kIgnored, kGone };

  void end(std::string text, bool abort);

  Options options_;
  Negotiator negotiator_;
  Planner planner_;
  SlotWriter log_slots_;
  std::vector<SlotReader> statement_slots_;
  std::vector<Presence> presence_;  // by rank
  std::vector<Entry> urgent_;       // Down entries
  bool ended_ = false;              // a Down entry was made: nothing is launched after it
  bool aborted_ = false;            // one that aborts
  uint64_t launches_ = 0;           // in the log, through a transport
  int unfinished_ = 0;              // of those, on this rank
  std::optional<Clock::time_point> oldest_queued_;
  std::optional<std::string> failure_;  // a transfer failed and no dead peer is known yet
  std::optional<Clock::time_point> failure_due_;
};

}  // namespace hvdtorch
