// Executor: runs the launches of one process set in the order of the log, on a thread of its own:
// pack, collective, unpack. The control thread stays free meanwhile, so a dead peer is noticed and
// a running transfer can be aborted while this thread is blocked in one. Executors of different
// sets never wait for each other.
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
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/message.h"
#include "core/operation.h"
#include "shared/arena.h"
#include "transport/transport.h"

namespace hvdtorch {

// A launch and this rank's operations for it, item by item.
struct Work {
  Launch launch;  // without items: close_partial_transports()
  std::vector<std::shared_ptr<Operation>> operations;
  bool reported = false;  // this rank tells the coordinator when it is finished
};

// Persistent, grown on demand: the fusion buffer of one process set. It lies in the arena, so that
// what is fused is reduced where it is.
class FusionBuffer {
 public:
  explicit FusionBuffer(std::shared_ptr<SharedArena> arena) : arena_(std::move(arena)) {}
  std::byte* reserve(int64_t bytes);
  void release() noexcept;

 private:
  std::shared_ptr<SharedArena> arena_;
  std::shared_ptr<std::byte> data_;
  int64_t capacity_ = 0;
};

class Executor {
 public:
  struct Hooks {
    // An operation's result is in place, or it failed (`error` not empty). Executor's thread.
    std::function<void(const std::shared_ptr<Operation>&, const std::string& error)> complete;
    // The transport failed with this text; returns the cause to report, once it is known.
    std::function<std::string(const std::string& text)> await_cause;
    // A launch that this rank reports was finished, with or without success.
    std::function<void()> launch_finished;
    // A transport among the members of the set (their ranks in it, ascending), this one included.
    std::function<std::shared_ptr<Transport>(const std::vector<int>& members)> open_transport;
  };
  struct Options {
    int size = 1;                      // of the process set
    bool average_over_active = false;  // see average_divisor()
    int core = -1;                     // to run on; -1: any
    std::shared_ptr<SharedArena> arena = nullptr;
  };

  Executor(Hooks hooks, Options options);
  ~Executor();

  void submit(Work work);
  // In the order of the log, like a launch: ranks that had joined are back, so that the transports
  // without them, of which there may be many, are closed. (All ranks do so at the same place, since
  // both ends of a transport must be new.)
  void close_partial_transports();

  // How many launches that this rank reports were finished since the last call.
  int take_finished() noexcept { return finished_.exchange(0); }
  bool any_finished() const noexcept { return finished_.load() != 0; }

  // True once everything submitted is finished; false if `limit` passes first.
  bool drain(std::chrono::milliseconds limit);

  // Running and later collectives fail with `why`. Any thread.
  void abort(const std::string& why) noexcept;

  // The thread ends when what is queued is finished (after abort(): by failing it).
  void retire() noexcept;
  // Waits for that.
  void stop() noexcept;
  // It has happened: stop() and the destructor will not wait.
  bool ended() const noexcept { return ended_; }

  int thread_id() const noexcept { return thread_id_; }

 private:
  // The members of the set that take part in a launch, and the transport among them.
  struct Party {
    std::vector<int> members;  // ranks in the set, ascending
    std::shared_ptr<Transport> transport;
    int64_t average_divisor = 1;
  };

  void loop();
  void carry_out(Work work);
  void drop_parties(bool (*dropped)(const std::vector<int>& absent));
  Party& party_without(const std::vector<int>& absent);
  void run(Work& work);
  void run_allreduce(Work& work, const Party& party);
  void run_broadcast(Work& work, const Party& party);
  void run_allgather(const LaunchItem& item, Operation& op, const Party& party);
  void run_alltoall(Operation& op, const Party& party);
  void run_reducescatter(Operation& op, const Party& party);
  const void* pack_rows(const void* input, const std::vector<int64_t>& bytes, const Party& party);

  Hooks hooks_;
  Options options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::map<std::vector<int>, Party> parties_;  // by the absent ranks; changed by the thread only
  std::optional<std::string> aborted_;         // why
  FusionBuffer buffer_;                        // executor thread only
  std::atomic<int> finished_{0};
  std::atomic<int> thread_id_{0};
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

// Writes the result that a log entry carries to where `op` wants it.
void place_inline_result(const LaunchItem& item, Operation& op);

// Rows that rank r of P receives of d rows: d / P, and one more if r < d % P.
std::vector<int64_t> split_rows(int64_t rows, int parts);

}  // namespace hvdtorch
