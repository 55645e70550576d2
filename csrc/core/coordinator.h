// Coordinator: rank 0's half of the control plane. Statements of all ranks and the passage of
// launches go in; the log's entries come out, to be sent to every rank and executed in order.
//
// It decides when a ready tensor is launched: at once while fewer than kPipeline launches of its
// process set are unfinished, else it gathers company until one finishes, the cycle time has
// passed, or the fusion threshold is full. Every process set has a queue and a pipeline of its own
// (a lane), so that no set waits for another.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/message.h"
#include "core/negotiator.h"
#include "core/planner.h"
#include "core/stall.h"

namespace hvdtorch {

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    int size = 1;
    std::vector<std::string> hosts;
    Planner::Options planner;  // hosts: of all ranks of the job
    std::chrono::microseconds cycle_time{1000};
    uint32_t cache_capacity = 1024;
    std::chrono::milliseconds cause_grace{1500};
    std::chrono::milliseconds stall_warn_after{0};  // 0: never
    std::chrono::milliseconds stall_stop_after{0};  // 0: never
  };
  explicit Coordinator(Options options);

  // What rank `rank` says. Malformed statements end the job, with the rank named.
  void on_frame(int rank, const std::string& frame, Clock::time_point now);
  void on_statement(int rank, Statement statement, Clock::time_point now);
  void on_lost(int rank, const std::string& why);

  // Launches of a process set were finished on the rank that reports them (see Finished).
  void on_launches_finished(uint32_t process_set, int count);

  // Entries due now, in log order.
  std::vector<Entry> take_entries(Clock::time_point now);
  // When take_entries() has to be called again even if nothing happens.
  std::optional<Clock::time_point> deadline() const;
  // True while tensors wait for company, so that the end of a launch matters.
  bool gathering() const noexcept;

  // Calls send(rank, frame) for every rank but 0 that these entries concern and that is here.
  void distribute(const std::vector<Entry>& entries,
                  const std::function<void(int, std::string_view)>& send);
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

  // What one process set has queued, and how far its launches are.
  struct Lane {
    Planner planner;
    SlotWriter slots;
    int unfinished = 0;  // launches
    std::optional<Clock::time_point> oldest_queued;
  };

  Lane& lane_of(uint32_t process_set);
  void decide(Decision decision, std::vector<Entry>& entries);
  void launch_all(uint32_t process_set, Lane& lane, std::vector<Entry>& entries);
  void inspect_stalls(Clock::time_point now);
  void end(std::string text, bool abort);
  // The process set whose members an entry concerns; null: everyone.
  static std::optional<uint32_t> set_of(const Entry& entry);

  Options options_;
  Negotiator negotiator_;
  StallInspector stalls_;
  std::map<uint32_t, Lane> lanes_;
  std::vector<SlotReader> statement_slots_;
  std::vector<Presence> presence_;  // by rank
  std::vector<Entry> urgent_;       // Down entries
  bool ended_ = false;              // a Down entry was made: nothing is launched after it
  bool aborted_ = false;            // one that aborts
  std::vector<uint64_t> launches_;  // by rank: in the log, through a transport, with it taking part
  std::optional<std::string> failure_;  // a transfer failed and no dead peer is known yet
  std::optional<Clock::time_point> failure_due_;
};

}  // namespace hvdtorch
