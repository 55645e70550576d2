// Completion: how a waiting thread learns that an operation, or all members of a group, finished.
// One futex word, no polling; a wait ends early when a signal arrives, so that Python's signal
// handlers can run (a condition variable would swallow the interruption).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace hvdtorch {

class Completion {
 public:
  using Clock = std::chrono::steady_clock;
  enum class WaitResult { kDone, kTimedOut, kInterrupted };

  explicit Completion(int members) : remaining_(members) {}
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  bool done() const noexcept { return state_.load(std::memory_order_acquire) != kRunning; }

  // Waits until done, the deadline, or the arrival of a signal on this thread.
  WaitResult wait(std::optional<Clock::time_point> deadline) noexcept;

  // One member is complete; `error` is empty on success. The first error is kept. The last
  // member's call completes the whole and runs the callbacks on the calling thread.
  void member_done(const std::string& error);

  // Empty on success. Valid once done().
  const std::string& error() const noexcept { return error_; }

  // Until the next call, completion also calls this (any thread, quick): for a waiter that sleeps
  // elsewhere than in wait(). Null: nothing.
  void set_rouse(std::function<void()> rouse);

  // Runs when complete, on the completing thread; at once, on this one, if it already is.
  void add_callback(std::function<void()> callback);

 private:
  static constexpr uint32_t kRunning = 0, kDone = 1;
  std::atomic<uint32_t> state_{kRunning};
  std::atomic<int> waiters_{0};  // in wait()
  std::mutex mutex_;             // guards the rest until done
  int remaining_;
  std::string error_;
  std::function<void()> rouse_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace hvdtorch
