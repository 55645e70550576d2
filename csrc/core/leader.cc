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

// Longer than ranks that run alike are apart, and than a peer needs to answer; short beside what a
// sleep and a wake-up cost when they are not.
constexpr std::chrono::microseconds kSpin{60};
// Before that, how long a peer is given to look by itself before its control thread is woken.
constexpr std::chrono::microseconds kPatience{20};

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
    {
      std::lock_guard role(control_mutex_);
      if (left_) break;
      channel_->hold_bells(bells_held = options_.may_spin);
      control_step();
      channel_->hold_bells(false);
      due = std::min(due, this->deadline().value_or(due));
    }
    if (done() || (options_.may_spin && spin(completion, kPatience))) continue;
    ring_bells();
    if (options_.may_spin && spin(completion, kSpin)) continue;
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

// True if there is something to do. Does not stay where a core is needed for something else.
bool Runtime::spin(const Completion& completion, std::chrono::microseconds limit) const {
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < 20; ++i) {
      if (completion.done() || channel_->news()) return true;
      relax();
    }
  } while (running_ == 0 && Clock::now() < end);
  return false;
}

}  // namespace hvdtorch
