// Waiting for another process, in shared memory: a short spin where that costs nobody anything,
// then sleep on a futex. No polling; every wait can be aborted from another thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace hvdtorch {

// A rank's bell: the word it sleeps on, and for whom. In shared memory.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> awaited;  // 1 + the number of the rank it waits for; 0: it is awake

  // By the rank of that number, after it has changed what the owner may be waiting for.
  void ring_if_awaited(int number) noexcept;
  void ring() noexcept;
};

// Threads of the user's that wait for a result, in this process.
inline std::atomic<int> waiting_threads{0};

struct CountedAsWaiting {
  CountedAsWaiting() noexcept { waiting_threads.fetch_add(1, std::memory_order_relaxed); }
  ~CountedAsWaiting() { waiting_threads.fetch_sub(1, std::memory_order_relaxed); }
  CountedAsWaiting(const CountedAsWaiting&) = delete;
};

// Whether a wait may begin with spinning: only if every rank of the host has a core of its own, and
// while a thread of the user's waits for a result, so that the core has nothing else to do.
struct SpinPolicy {
  bool cores_suffice = false;

  bool may_spin() const noexcept {
    return cores_suffice && waiting_threads.load(std::memory_order_relaxed) > 0;
  }
};

// One rank's way to wait, by one thread at a time.
class Waiter {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Result { kReady, kTimedOut, kAborted };

  Waiter(SpinPolicy policy, std::optional<std::chrono::milliseconds> limit)
      : policy_(policy), limit_(limit) {}

  // Until ready() is true, which rank `number` brings about and then calls bell.ring_if_awaited().
  template <typename Ready>
  Result wait(Bell& bell, int number, Ready&& ready) {
    if (ready()) return Result::kReady;
    if (policy_.may_spin()) {
      const auto until = Clock::now() + kSpin;
      do {
        for (int i = 0; i < 64; ++i) {
          if (ready()) return Result::kReady;
          relax();
        }
      } while (Clock::now() < until && !aborted_.load(std::memory_order_relaxed));
    }
    std::optional<Clock::time_point> deadline;
    if (limit_) deadline = Clock::now() + *limit_;
    Result result = Result::kReady;
    for (;;) {
      const uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
      bell.awaited.store(static_cast<uint32_t>(number) + 1, std::memory_order_seq_cst);
      if (ready()) break;
      if (aborted_.load(std::memory_order_seq_cst)) {
        result = Result::kAborted;
        break;
      }
      if (deadline && Clock::now() >= *deadline) {
        result = Result::kTimedOut;
        break;
      }
      sleep(bell, rings, deadline);
    }
    bell.awaited.store(0, std::memory_order_relaxed);
    return result;
  }

  // Any thread: the running wait on `bell` and all later ones end with kAborted.
  void abort(Bell* bell) noexcept {
    aborted_.store(true, std::memory_order_seq_cst);
    if (bell != nullptr) bell->ring();
  }
  bool aborted() const noexcept { return aborted_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::chrono::microseconds kSpin{50};
  static void relax() noexcept;
  static void sleep(Bell& bell, uint32_t rings, std::optional<Clock::time_point> deadline) noexcept;

  const SpinPolicy policy_;
  const std::optional<std::chrono::milliseconds> limit_;
  std::atomic<bool> aborted_{false};
};

}  // namespace hvdtorch
