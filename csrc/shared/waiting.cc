#include "shared/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace hvdtorch {
namespace {

// Not the private kind: the word is shared between processes.
long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::ring_if_awaited(int number) noexcept {
  if (awaited.load(std::memory_order_seq_cst) == static_cast<uint32_t>(number) + 1) ring();
}

void Bell::ring() noexcept {
  rings.fetch_add(1, std::memory_order_seq_cst);
  futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void Waiter::relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Waiter::sleep(Bell& bell, uint32_t rings, std::optional<Clock::time_point> deadline) noexcept {
  timespec span{};
  if (deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::max(*deadline - Clock::now(), Clock::duration::zero()));
    span.tv_sec = left.count() / 1'000'000'000;
    span.tv_nsec = left.count() % 1'000'000'000;
  }
  futex(&bell.rings, FUTEX_WAIT, rings, deadline ? &span : nullptr);
}

}  // namespace hvdtorch
