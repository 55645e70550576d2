// What every thread of the runtime does first: take a name, leave signals to Python's threads, and
// stay on a core if asked to.
#pragma once

namespace hvdtorch {

// Returns the kernel's id of the calling thread. core < 0: any core.
int enter_runtime_thread(const char* name, int core) noexcept;

// Whether the calling thread is one of the runtime's: it must not wait for what such threads
// complete.
bool on_runtime_thread() noexcept;

// The calling thread counts as one of the runtime's while it lives.
class AsRuntimeThread {
 public:
  AsRuntimeThread() noexcept;
  ~AsRuntimeThread();
  AsRuntimeThread(const AsRuntimeThread&) = delete;

 private:
  bool before_;
};

// Signals blocked while it lives, so that a thread started meanwhile inherits the blocked mask and
// no signal can hit it before enter_runtime_thread().
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  alignas(16) unsigned char saved_[128];
};

}  // namespace hvdtorch
