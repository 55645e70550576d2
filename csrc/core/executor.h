// Executor: runs launches in the order of the log, on a thread of its own: pack, collective,
// unpack. The control thread stays free meanwhile, so a dead peer is noticed and a running transfer
// can be aborted while this thread is blocked in one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/message.h"
#include "core/operation.h"
#include "transport/transport.h"

namespace hvdtorch {

// A launch and this rank's operations for it, item by item.
struct Work {
  Launch launch;
  std::vector<std::shared_ptr<Operation>> operations;
};

// Persistent, grown on demand, 64-byte aligned: the fusion buffer of one process set.
class Arena {
 public:
  std::byte* reserve(int64_t bytes);

 private:
  struct Free {
    void operator()(void* p) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  int64_t capacity_ = 0;
};

class Executor {
 public:
  struct Hooks {
    // An operation's result is in place, or it failed (`error` not empty). Executor's thread.
    std::function<void(const std::shared_ptr<Operation>&, const std::string& error)> complete;
    // The transport failed with this text; returns the cause to report, once it is known.
    std::function<std::string(const std::string& text)> await_cause;
    // A launch was finished, with or without success.
    std::function<void()> launch_finished;
  };

  Executor(Hooks hooks, int core);
  ~Executor();

  void add_transport(uint32_t process_set, std::shared_ptr<Transport> transport);
  int64_t divisor(uint32_t process_set) const;

  void submit(Work work);

  // How many launches were finished since the last call.
  int take_finished() noexcept { return finished_.exchange(0); }
  bool any_finished() const noexcept { return finished_.load() != 0; }

  // True once everything submitted is finished; false if `limit` passes first.
  bool drain(std::chrono::milliseconds limit);

  // Running and later collectives fail with `why`. Any thread.
  void abort(const std::string& why) noexcept;

  // Finishes what is queued (after abort(): by failing it) and joins the thread.
  void stop() noexcept;

  int thread_id() const noexcept { return thread_id_; }

 private:
  void loop(int core);
  void run(Work& work);
  void run_allreduce(Work& work, Transport& transport);
  void run_broadcast(Work& work, Transport& transport);
  void run_allgather(const LaunchItem& item, Operation& op, Transport& transport);
  void run_alltoall(Operation& op, Transport& transport);
  void run_reducescatter(Operation& op, Transport& transport);

  Hooks hooks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::map<uint32_t, std::shared_ptr<Transport>> transports_;
  Arena arena_;  // executor thread only
  std::atomic<int> finished_{0};
  std::atomic<int> thread_id_{0};
  std::thread thread_;
};

// Writes the result that a log entry carries to where `op` wants it.
void place_inline_result(const LaunchItem& item, Operation& op);

// Rows that rank r of P receives of d rows: d / P, and one more if r < d % P.
std::vector<int64_t> split_rows(int64_t rows, int parts);

}  // namespace hvdtorch
