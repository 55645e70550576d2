#include "core/completion.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <utility>

namespace hvdtorch {
namespace {

long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

Completion::WaitResult Completion::wait(std::optional<Clock::time_point> deadline) noexcept {
  // Told before the last look at the state, so that whoever changes it knows whom to wake.
  struct Counted {
    explicit Counted(std::atomic<int>& count) noexcept : waiters(count) { ++waiters; }
    ~Counted() { --waiters; }
    std::atomic<int>& waiters;
  };
  const Counted counted(waiters_);
  while (state_.load() == kRunning) {
    timespec span{};
    if (deadline) {
      const auto left = *deadline - Clock::now();
      if (left <= Clock::duration::zero()) return WaitResult::kTimedOut;
      const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      span.tv_sec = ns / 1'000'000'000;
      span.tv_nsec = ns % 1'000'000'000;
    }
    if (futex(&state_, FUTEX_WAIT_PRIVATE, kRunning, deadline ? &span : nullptr) == -1 &&
        errno == EINTR) {
      return done() ? WaitResult::kDone : WaitResult::kInterrupted;
    }
  }
  return WaitResult::kDone;
}

void Completion::member_done(const std::string& error) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
    if (--remaining_ > 0) return;
    callbacks.swap(callbacks_);
    state_.store(kDone);
    if (waiters_ > 0) futex(&state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
    if (rouse_) rouse_();
  }
  for (auto& callback : callbacks) callback();
}

void Completion::set_rouse(std::function<void()> rouse) {
  std::lock_guard lock(mutex_);
  rouse_ = std::move(rouse);
}

void Completion::add_callback(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace hvdtorch
