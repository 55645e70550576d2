// Runtime: one rank's part of the job. Owns the control thread, the channel, an executor for each
// of its process sets and, on rank 0, the coordinator. It routes what they say to each other and
// holds no algorithm of its own.
//
// Threads: any thread submits; the control thread, or a thread that waits (Note [Leader] in
// leader.cc), talks to the other ranks; the executors' threads move data. `mutex_` guards what they
// share: process sets, operations in flight, the job's state.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "channel/channel.h"
#include "core/coordinator.h"
#include "core/executor.h"
#include "core/message.h"
#include "core/operation.h"
#include "transport/choice.h"

namespace hvdtorch {

// The caller alone is at fault: ValueError in Python.
struct DuplicateName : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct RuntimeOptions {
  int rank = 0;
  int size = 1;
  std::vector<std::string> hosts;  // by rank; for error texts
  Planner::Options planner{.fusion_threshold = 128 << 20};
  std::chrono::microseconds cycle_time{1000};
  uint32_t cache_capacity = 1024;
  int64_t inline_limit = 1024;
  int64_t lone_inline_limit = 0;  // where it is larger: for an operation with nothing beside it
  int core = -1;                  // for both threads; -1: any
  bool may_spin = false;          // there is a core for every rank of this host
  // Where the memory that collectives work in is taken from.
  std::shared_ptr<SharedArena> arena = std::make_shared<SharedArena>(nullptr);
  // How long a failed transfer waits for its cause to be known before it is reported as it is.
  std::chrono::milliseconds cause_grace{3000};
  // Of the stall report; 0: never.
  std::chrono::milliseconds stall_warn_after{0};
  std::chrono::milliseconds stall_stop_after{0};
  // How long stop() lets launched operations finish, and then peers take their leave.
  std::chrono::milliseconds leave_grace{2000};
};

struct RuntimeStats {
  std::atomic<uint64_t> operations{0};        // submitted by this rank
  std::atomic<uint64_t> launches{0};          // executed here through a transport
  std::atomic<uint64_t> launched_tensors{0};  // in those; more than launches: fusion worked
  std::atomic<uint64_t> inlined_tensors{0};   // travelled inside the log
  std::atomic<uint64_t> frames_sent{0};
  std::atomic<uint64_t> frame_bytes_sent{0};
};

class Runtime {
 public:
  Runtime(RuntimeOptions options, std::unique_ptr<Channel> channel,
          TransportFactory open_transport);
  ~Runtime();

  // Submits one operation, or all members of a group at once. Throws DuplicateName if a name is in
  // flight on this rank, std::invalid_argument if this rank is not in the process set or there is
  // none, InternalError if the job is down; then nothing was submitted.
  // `waits`: the caller calls wait() for one of them at once, come what may, which tells the
  // others.
  void submit(std::vector<std::shared_ptr<Operation>> operations, bool waits = false);

  // Waits for operations of this runtime: as Completion::wait(), and this thread does the control
  // thread's work meanwhile.
  Completion::WaitResult wait(Completion& completion, Completion::Clock::time_point deadline);

  // How many ranks a process set has. std::invalid_argument if there is no such set.
  int set_size(uint32_t process_set) const;

  // For so many seconds this rank may submit nothing without being reported; 0: it is back.
  void excuse(double seconds);

  // Leaves the job and joins the threads. What is pending here fails; the other ranks are told
  // `reason` ("" is a plain shutdown). Idempotent.
  void stop(const std::string& reason) noexcept;

  // Why the job is down, "" while it runs.
  std::string down_text() const;

  std::vector<int> thread_ids() const;
  const RuntimeStats& stats() const noexcept { return stats_; }

  // In a forked child: closes this process's copies of the sockets. Nothing else may be called.
  void abandon_in_child() noexcept { channel_->abandon_in_child(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct InFlight {
    std::shared_ptr<Operation> operation;
    bool launched = false;
  };

  // A process set, as this rank knows it.
  struct Set {
    std::vector<int> ranks;              // global, ascending
    int index = -1;                      // of this rank among them; -1: not a member
    std::unique_ptr<Executor> executor;  // members only
  };

  void control_loop();
  bool lead(Completion& completion, Clock::time_point deadline);
  void stop_looking() noexcept;
  bool spin(const Completion& completion, std::chrono::microseconds limit);
  void take_submissions();
  void handle(const Channel::Event& event);
  void on_coordinator_lost(const std::string& why);
  void run_coordinator();
  void control_step() noexcept;
  void append(const std::vector<Entry>& entries);
  void apply(Entry entry);
  void apply_launch(Launch launch);
  void apply_inlined(const LaunchItem& item, Operation& op);
  void apply_down(const Down& down);
  void open_set(uint32_t id, std::vector<int> ranks);
  void close_set(uint32_t id);
  bool drain(std::chrono::milliseconds limit);
  void send(int rank, std::string_view frame);
  void leave();
  std::optional<Clock::time_point> deadline() const;

  void complete(const std::shared_ptr<Operation>& operation, const std::string& error);
  std::string await_cause(const std::string& text);

  const RuntimeOptions options_;
  const TransportFactory open_transport_;
  std::unique_ptr<Channel> channel_;
  RuntimeStats stats_;

  mutable std::mutex mutex_;
  std::condition_variable cause_known_;
  std::map<uint32_t, Set> sets_;                         // changed in the control role only
  std::unordered_map<std::string, InFlight> in_flight_;  // by process set and full name
  std::vector<std::shared_ptr<Operation>> submitted_;    // not yet seen by the control thread
  std::optional<double> excuse_;                         // not yet seen by it
  std::optional<std::string> down_;
  std::optional<std::string> transfer_failure_;  // set by the executor, told by the control thread
  bool stopping_ = false;
  bool stopped_ = false;
  std::string stop_reason_;

  // The control role: whoever holds it steps, and owns what follows.
  std::mutex control_mutex_;
  bool left_ = false;                                // the control thread has it for good
  std::optional<Clock::time_point> sleeping_until_;  // the control thread
  SlotWriter statement_slots_;
  LogSlots log_slots_;
  std::optional<Coordinator> coordinator_;          // rank 0
  std::vector<std::unique_ptr<Executor>> retired_;  // of removed sets
  bool aborted_ = false;
  bool log_ended_ = false;  // the coordinator took its leave
  uint64_t launches_ = 0;   // taken from the log, through the transport

  std::atomic<int> running_{0};                           // operations with an executor
  std::atomic<int> spins_to_skip_{0}, spins_skipped_{0};  // see leader.cc
  std::atomic<bool> report_finished_{false};              // somebody waits for launches to finish
  std::atomic<int> control_thread_id_{0};
  std::thread control_thread_;
  std::mutex stop_mutex_;
};

}  // namespace hvdtorch
