// One process set's executor over transports that only pretend: which it opens, for whom, until
// when; whom an abort reaches; and what is left of it when its set is removed.
#include "core/executor.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"
#include "samples.h"
#include "simulated_ranks.h"

namespace hvdtorch::test {
namespace {

// Of rank 0 among `members`: notes what it is asked for, and blocks if told to.
class PretendTransport final : public Transport {
 public:
  PretendTransport(std::vector<int> members, bool stuck)
      : members(std::move(members)), stuck_(stuck) {}

  const char* name() const noexcept override { return "pretend"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return static_cast<int>(members.size()); }

  void allreduce(const Reduction& reduction, void*, int64_t) override {
    std::unique_lock lock(mutex_);
    divisors_.push_back(reduction.divisor);
    changed_.notify_all();
    changed_.wait(lock, [this] { return !stuck_ || aborted_; });
    if (aborted_) throw TransportError(*aborted_);
  }
  void adasum(const Reduction&, void*, const std::vector<Span>&) override { fail("adasum"); }
  void allgather(const void*, void*, const std::vector<int64_t>&) override { fail("allgather"); }
  void broadcast(void*, int64_t, int) override { fail("broadcast"); }
  void alltoall(const void*, const std::vector<int64_t>&, void*,
                const std::vector<int64_t>&) override {
    fail("alltoall");
  }
  void reduce_scatter(const Reduction&, const void*, void*, const std::vector<int64_t>&) override {
    fail("reduce_scatter");
  }
  void barrier() override { fail("barrier"); }
  void abort(const std::string& why) noexcept override {
    std::lock_guard lock(mutex_);
    if (!aborted_) aborted_ = why;
    changed_.notify_all();
  }

  std::vector<int64_t> divisors() {
    std::lock_guard lock(mutex_);
    return divisors_;
  }
  std::string aborted() {
    std::lock_guard lock(mutex_);
    return aborted_.value_or("");
  }
  void wait_until_entered() {
    std::unique_lock lock(mutex_);
    check(changed_.wait_for(lock, kHang, [this] { return !divisors_.empty(); }), "not entered");
  }

  const std::vector<int> members;

 private:
  const bool stuck_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> divisors_;
  std::optional<std::string> aborted_;
};

// An executor of a set of three and what it opened.
class Bench {
 public:
  explicit Bench(bool average_over_active = false)
      : executor(hooks(), {.size = 3, .average_over_active = average_over_active}) {}

  // A launch of one allreduce without these ranks.
  Submission launch(const std::vector<int>& absent, bool reported = false) {
    Submission x(allreduce_of("x"), floats({1, 2, 3, 4}));
    Work work{Launch{false, absent, {{x.operation()->desc, {}, ""}}}, {x.operation()}, reported};
    executor.submit(std::move(work));
    return x;
  }
  // The members of all that was opened, in order.
  std::string opened() {
    std::lock_guard lock(mutex_);
    std::string text;
    for (const auto& members : members_) text += show(members);
    return text;
  }
  std::shared_ptr<PretendTransport> transport(size_t i) {
    std::lock_guard lock(mutex_);
    return transports_.at(i).lock();
  }
  std::atomic<int> told{0};        // launches that launch_finished() was called for
  std::atomic<bool> stuck{false};  // what is opened from now on
  std::atomic<bool> cannot_open{false};

 private:
  Executor::Hooks hooks() {
    Executor::Hooks h;
    h.complete = [](const auto& op, const std::string& error) {
      op->completion->member_done(error);
    };
    h.await_cause = [](const std::string& text) { return "cause of: " + text; };
    h.launch_finished = [this] { ++told; };
    h.open_transport = [this](const std::vector<int>& members) -> std::shared_ptr<Transport> {
      if (cannot_open) throw std::runtime_error("no more descriptors");
      auto transport = std::make_shared<PretendTransport>(members, stuck);
      std::lock_guard lock(mutex_);
      members_.push_back(members);
      transports_.push_back(transport);
      return transport;
    };
    return h;
  }

  std::mutex mutex_;
  std::vector<std::vector<int>> members_;
  std::vector<std::weak_ptr<PretendTransport>> transports_;

 public:
  Executor executor;  // last: its thread ends first
};

void wait_until(const std::function<bool()>& done, const std::string& what) {
  const auto hang = std::chrono::steady_clock::now() + kHang;
  while (!done()) {
    check(std::chrono::steady_clock::now() < hang, what);
    std::this_thread::yield();
  }
}

const Case parties("each set of absent ranks has a transport, opened when first needed", [] {
  Bench bench;
  for (const std::vector<int>& absent :
       std::vector<std::vector<int>>{{}, {1}, {1, 2}, {}, {1}, {2}, {1, 2}}) {
    check_eq(bench.launch(absent).wait(), "");
  }
  check_eq(bench.opened(), "[0, 1, 2][0, 2][0][0, 1]");
  check_eq(bench.transport(0)->divisors(), std::vector<int64_t>{3, 3});
  check_eq(bench.transport(2)->divisors(), std::vector<int64_t>{3, 3}, "by the set's size");
});

const Case over_active("an average over the active divides by as many as take part", [] {
  Bench bench(true);
  for (const std::vector<int>& absent : std::vector<std::vector<int>>{{}, {1}, {1, 2}}) {
    check_eq(bench.launch(absent).wait(), "");
  }
  check_eq(bench.transport(0)->divisors(), std::vector<int64_t>{3});
  check_eq(bench.transport(1)->divisors(), std::vector<int64_t>{2});
  check_eq(bench.transport(2)->divisors(), std::vector<int64_t>{1});
});

const Case back("when all ranks are back, the transports without some are closed", [] {
  Bench bench;
  for (const std::vector<int>& absent : std::vector<std::vector<int>>{{}, {1}, {2}}) {
    check_eq(bench.launch(absent).wait(), "");
  }
  bench.executor.close_partial_transports();
  check_eq(bench.launch({}).wait(), "");
  check(bench.transport(0) != nullptr);
  check(bench.transport(1) == nullptr && bench.transport(2) == nullptr, "they are kept");
  check_eq(bench.launch({1}).wait(), "");
  check_eq(bench.opened(), "[0, 1, 2][0, 2][0, 1][0, 2]");
});

const Case abort_all("an abort reaches every transport, and those that are opened later", [] {
  Bench bench;
  check_eq(bench.launch({}).wait(), "");
  bench.stuck = true;
  const auto running = bench.launch({1}), queued = bench.launch({2}), again = bench.launch({});
  wait_until([&] { return bench.opened() == "[0, 1, 2][0, 2]"; }, "not opened");
  bench.transport(1)->wait_until_entered();
  check(!queued.operation()->completion->done());
  bench.executor.abort("rank 2 is gone");
  bench.executor.abort("another reason");
  for (const auto& x : {running, queued, again}) {
    check_eq(x.wait(), "cause of: rank 2 is gone");
    check_eq(x.finished(), 0);
  }
  for (size_t i : {0, 1, 2}) check_eq(bench.transport(i)->aborted(), "rank 2 is gone");
  check_eq(bench.opened(), "[0, 1, 2][0, 2][0, 1]");
});

const Case abort_first("an abort before any launch counts for the first", [] {
  Bench bench;
  bench.stuck = true;
  bench.executor.abort("it is over");
  check_eq(bench.launch({}).wait(), "cause of: it is over");
});

const Case cannot_open("a transport that cannot be opened fails its launch", [] {
  Bench bench;
  bench.cannot_open = true;
  check_eq(bench.launch({1}).wait(), "cause of: the executor failed: no more descriptors");
  bench.cannot_open = false;
  check_eq(bench.launch({1}).wait(), "");
});

const Case finished("launches that this rank reports are counted, and told of", [] {
  Bench bench;
  for (const bool reported : {true, false, true}) bench.launch({}, reported);
  check(bench.executor.drain(kHang));
  wait_until([&] { return bench.told == 2; }, "not told");
  check(bench.executor.any_finished());
  check_eq(bench.executor.take_finished(), 2);
  check_eq(bench.executor.take_finished(), 0);
  check(!bench.executor.any_finished());
  bench.executor.close_partial_transports();
  check(bench.executor.drain(kHang));
  check(!bench.executor.any_finished(), "that was no launch");
});

const Case retired("a retired executor carries out what is queued, and keeps nothing", [] {
  Bench bench;
  std::vector<Submission> launched;
  for (int i = 0; i < 20; ++i)
    launched.push_back(bench.launch(i % 2 == 0 ? std::vector<int>{} : std::vector<int>{1}));
  bench.executor.retire();
  for (const auto& x : launched) check_eq(x.wait(), "");
  wait_until([&] { return bench.executor.ended(); }, "it does not end");
  check(bench.transport(0) == nullptr && bench.transport(1) == nullptr, "transports are kept");
  check(bench.executor.drain(std::chrono::milliseconds(0)));
  bench.executor.abort("too late to matter");
  bench.executor.stop();
});

}  // namespace
}  // namespace hvdtorch::test
