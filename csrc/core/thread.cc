#include "core/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <utility>

namespace hvdtorch {
namespace {

thread_local bool of_runtime = false;

}  // namespace

bool on_runtime_thread() noexcept { return of_runtime; }

int enter_runtime_thread(const char* name, int core) noexcept {
  of_runtime = true;
  pthread_setname_np(pthread_self(), name);
  if (core >= 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
  }
  return static_cast<int>(syscall(SYS_gettid));
}

AsRuntimeThread::AsRuntimeThread() noexcept : before_(std::exchange(of_runtime, true)) {}
AsRuntimeThread::~AsRuntimeThread() { of_runtime = before_; }

static_assert(sizeof(sigset_t) <= 128);

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::memcpy(saved_, &before, sizeof before);
}

SignalsBlocked::~SignalsBlocked() {
  sigset_t before;
  std::memcpy(&before, saved_, sizeof before);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace hvdtorch
