// Runtime::wait(): a thread that waits for an operation does the control thread's work meanwhile.
//
// Note [Leader]
// A small allreduce is a message to rank 0 and one back. If the thread that submits it and waits
// for it left both to the control thread, it would pay for two hand-overs between threads beside,
// each as dear as the message itself. So whoever waits takes the control role: it sends what it has
// submitted itself, and looks after the channel until its operation is complete. The control thread
// sleeps on; it is there for operations that nobody waits for yet, for sockets and for timers.
//
// A step of the control role never blocks and holds `control_mutex_`. Nobody asks for that mutex
// with the interpreter's lock in hand, since a step may run callbacks that need it.
#include <algorithm>
#include <utility>

#include "core/runtime.h"
#include "core/thread.h"

namespace hvdtorch {
namespace {

// How long a leader looks before it sleeps: longer than ranks that run alike are apart, and than a
// peer needs to answer; short beside what a sleep and a wake-up cost. First a peer is given a
// moment to look by itself, then its control thread is woken.
constexpr std::chrono::microseconds kPatience{20}, kSpin{60};
// Where that was in vain (the ranks do not run alike, or share a core with something else), so many
// leaders in a row, twice as many each time, do not try.
constexpr int kMostSpinsSkipped = 63;

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Completion::WaitResult Runtime::wait(Completion& completion, Clock::time_point deadline) {
  // A callback's thread is inside a step already.
  if (!completion.done() && !on_runtime_thread() && lead(completion, deadline)) {
    return Completion::WaitResult::kInterrupted;
  }
  return completion.wait(deadline);
}

// True if a signal ended it.
bool Runtime::lead(Completion& completion, Clock::time_point deadline) {
  const AsRuntimeThread as_runtime_thread;
  const auto done = [&completion] { return completion.done(); };
  auto dozed = Channel::Doze::kWoken;
  bool roused = false, bells_held = false;
  const auto ring_bells = [&] {
    if (!std::exchange(bells_held, false)) return;
    std::lock_guard role(control_mutex_);
    if (!left_) channel_->ring_bells();
  };
  channel_->look();
  while (!done() && Clock::now() < deadline && dozed == Channel::Doze::kWoken) {
    auto due = deadline;
    const bool spins = options_.may_spin && spins_to_skip_ == 0;
    {
      std::lock_guard role(control_mutex_);
      if (left_) break;
      bells_held |= spins;
      channel_->hold_bells(spins);
      control_step();
      channel_->hold_bells(false);
      due = std::min(due, this->deadline().value_or(due));
    }
    if (done() || (spins && spin(completion, kPatience))) continue;
    ring_bells();
    if (spins) {
      if (spin(completion, kSpin)) continue;
      spins_to_skip_ = spins_skipped_ = std::min(2 * spins_skipped_ + 1, kMostSpinsSkipped);
    } else if (spins_to_skip_ > 0) {
      --spins_to_skip_;
    }
    if (!std::exchange(roused, true)) completion.set_rouse([this] { channel_->rouse(); });
    dozed = channel_->doze(done, due);
  }
  ring_bells();
  if (roused) completion.set_rouse(nullptr);
  stop_looking();
  return dozed == Channel::Doze::kInterrupted && !done();
}

// Leaves the rest to the control thread.
void Runtime::stop_looking() noexcept {
  bool wake = !channel_->look_away();
  {
    std::lock_guard role(control_mutex_);
    const auto due = left_ ? std::nullopt : deadline();
    wake |= due && (!sleeping_until_ || *due < *sleeping_until_);
  }
  if (wake) channel_->wake();
}

// True if there is something to do. Does not stay where an executor needs the core.
bool Runtime::spin(const Completion& completion, std::chrono::microseconds limit) {
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < 20; ++i) {
      if (completion.done() || channel_->news()) {
        spins_skipped_ = 0;
        return true;
      }
      relax();
    }
  } while (running_ == 0 && Clock::now() < end);
  return false;
}

}  // namespace hvdtorch
