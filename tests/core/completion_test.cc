// Waiting for an operation: done, late, interrupted; callbacks; many members and many waiters.
#include "core/completion.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <thread>

#include "check.h"

namespace hvdtorch::test {
namespace {

using WaitResult = Completion::WaitResult;
using std::chrono::hours;
using std::chrono::milliseconds;

Completion::Clock::time_point in(std::chrono::nanoseconds span) {
  return Completion::Clock::now() + span;
}

const Case done("a wait for what is done returns at once", [] {
  Completion completion(1);
  check(!completion.done());
  completion.member_done("");
  check(completion.done());
  check_eq(completion.error(), "");
  check(completion.wait(std::nullopt) == WaitResult::kDone);
  check(completion.wait(in(-hours(1))) == WaitResult::kDone, "even after the deadline");
});

const Case timeouts("a wait ends at its deadline", [] {
  Completion completion(1);
  check(completion.wait(in(-hours(1))) == WaitResult::kTimedOut);
  const auto deadline = in(milliseconds(20));
  check(completion.wait(deadline) == WaitResult::kTimedOut);
  check(Completion::Clock::now() >= deadline, "and not before");
  completion.member_done("");
  check(completion.wait(deadline) == WaitResult::kDone);
});

const Case members("the last member completes the whole, the first error is kept", [] {
  Completion completion(3);
  completion.member_done("");
  completion.member_done("first");
  check(!completion.done());
  check(completion.wait(in(milliseconds(1))) == WaitResult::kTimedOut);
  completion.member_done("second");
  check(completion.done());
  check_eq(completion.error(), "first");
});

const Case far_deadline("a deadline beyond the end of time is none", [] {
  Completion completion(1);
  std::thread other([&] { completion.member_done(""); });
  check(completion.wait(Completion::Clock::time_point::max()) == WaitResult::kDone);
  other.join();
});

const Case callbacks("callbacks run once: at completion, or at once if it has been", [] {
  Completion completion(2);
  std::string order;
  completion.add_callback([&] { order += "a"; });
  completion.add_callback([&] { order += completion.done() ? "b" : "not done"; });
  completion.member_done("");
  check_eq(order, "");
  completion.member_done("");
  check_eq(order, "ab");
  completion.add_callback([&] { order += "c"; });
  check_eq(order, "abc");
});

const Case reentrant("a callback may wait, and may add another", [] {
  Completion completion(1);
  bool inner = false;
  completion.add_callback([&] {
    check(completion.wait(std::nullopt) == WaitResult::kDone);
    completion.add_callback([&] { inner = true; });
  });
  completion.member_done("");
  check(inner);
});

const Case concurrent("many waiters and late callbacks, members done on several threads", [] {
  for (int round = 0; round < 50; ++round) {
    auto completion = std::make_shared<Completion>(4);
    int plain = 0;  // written before, read after: TSan checks the order
    std::atomic<int> called{0};
    run_ranks(10, [&, completion](int rank) {
      if (rank == 0) plain = 1;
      if (rank < 4) {
        completion->member_done(rank == 3 ? "failed" : "");
        return;
      }
      if (rank % 2 == 0) completion->add_callback([&called] { ++called; });
      const auto deadline = rank == 9 ? std::optional(in(hours(1))) : std::nullopt;
      check(completion->wait(deadline) == WaitResult::kDone);
      check_eq(completion->error(), "failed");
      check_eq(plain, 1);
    });
    check_eq(called.load(), 3);
  }
});

std::atomic<int> signals{0};

const Case interrupted("a signal on the waiting thread ends its wait, and waiting can go on", [] {
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { ++signals; };
  sigaction(SIGUSR1, &action, &before);
  Completion completion(1);
  std::atomic<int> interruptions{0};
  std::thread waiter([&] {
    for (const bool limited : {false, true}) {
      const auto deadline = limited ? std::optional(in(hours(1))) : std::nullopt;
      if (completion.wait(deadline) == WaitResult::kInterrupted) ++interruptions;
    }
    if (completion.wait(std::nullopt) == WaitResult::kDone) ++interruptions;
  });
  // A signal that comes before the thread sleeps is not an interruption: send until it is.
  while (interruptions < 2) {
    pthread_kill(waiter.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(milliseconds(1));
  }
  // The third wait may meet a signal that was sent for the second.
  completion.member_done("");
  waiter.join();
  sigaction(SIGUSR1, &before, nullptr);
  check(signals > 0);
});

}  // namespace
}  // namespace hvdtorch::test
