// Which way an operation takes: fused with others, inside the log, when a launch ends; and names
// that are in flight already.
#include <memory>

#include "check.h"
#include "core/runtime.h"
#include "samples.h"
#include "simulated_ranks.h"

namespace hvdtorch::test {
namespace {

const Case fused("tensors that are ready together share launches", [] {
  RuntimeOptions options;
  options.inline_limit = 0;
  options.cycle_time = std::chrono::seconds(3600);
  SimulatedRanks job(2, {.options = options});
  run_ranks(2, [&](int rank) {
    // Submitted at once, so that they arrive at once.
    auto whole = std::make_shared<Completion>(40);
    std::vector<Submission> submissions;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int i = 0; i < 40; ++i) {
      const float value = static_cast<float>(i + 100 * rank);
      submissions.emplace_back(allreduce_of("t" + std::to_string(i), {3}),
                               floats({value, 1, value}), whole);
      operations.push_back(submissions.back().operation());
    }
    job[rank].submit(std::move(operations));
    check_eq(submissions.front().wait(), "");
    for (int i = 0; i < 40; ++i) {
      const float sum = static_cast<float>(2 * i + 100);
      check(submissions[static_cast<size_t>(i)].output() == floats({sum, 2, sum}));
    }
  });
  job.stop();
  check_eq(job[1].stats().launched_tensors.load(), 40u);
  check(job[1].stats().launches.load() < 40, "nothing was fused");
  check_eq(job[1].stats().inlined_tensors.load(), 0u);
});

const Case without_clock("what gathers is launched when a launch ends, however long the cycle", [] {
  RuntimeOptions options;
  options.inline_limit = 0;
  options.cycle_time = std::chrono::seconds(3600);
  SimulatedRanks job(2, {.options = options});
  run_ranks(2, [&](int rank) {
    for (int round = 0; round < rounds(30); ++round) {
      std::vector<Submission> submissions;
      for (int i = 0; i < 20; ++i) {
        submissions.push_back(job.submit(rank, allreduce_of("t" + std::to_string(i), {3000}),
                                         std::string(12'000, '\0')));
      }
      for (const auto& submission : submissions) check_eq(submission.wait(), "");
    }
  });
});

const Case inlined("small tensors travel inside the log, in two frames per rank", [] {
  RuntimeOptions options;
  options.inline_limit = 4;
  SimulatedRanks job(3, {.options = options});
  run_ranks(3, [&](int rank) {
    for (int i = 0; i < 10; ++i) {
      const auto loss = job.submit(rank, allreduce_of("loss", {1}), floats({1.0f + rank}));
      check_eq(loss.wait(), "");
      check(loss.output() == floats({6}));
    }
  });
  job.stop();
  for (int rank = 0; rank < 3; ++rank) {
    check_eq(job[rank].stats().inlined_tensors.load(), 10u);
    check_eq(job[rank].stats().launches.load(), 0u);
    check_eq(job[rank].stats().operations.load(), 10u);
  }
  check_eq(job[1].stats().frames_sent.load(), 11u, "one per operation, and the goodbye");
});

const Case lone(
    "an operation with nothing beside it may be larger and still travel in the log", [] {
      RuntimeOptions options;
      options.inline_limit = 0;
      options.lone_inline_limit = 4000;
      SimulatedRanks job(2, {.options = options});
      run_ranks(2, [&](int rank) {
        const OpDesc x = allreduce_of("x", {1000}), y = allreduce_of("y", {1000});
        check_eq(job.submit(rank, x, std::string(4000, '\0')).wait(), "");
        check_eq(job.submit(rank, allreduce_of("z", {1001}), std::string(4004, '\0')).wait(), "");
        const Submission a(x, std::string(4000, '\0')), b(y, std::string(4000, '\0'));
        job[rank].submit({a.operation(), b.operation()});
        check_eq(a.wait() + b.wait(), "");
      });
      job.stop();
      check_eq(job[1].stats().inlined_tensors.load(), 1u);
      check_eq(job[1].stats().launched_tensors.load(), 3u);
    });

const Case settings_differ("ranks with other inline limits use the transport", [] {
  // Rank 0 sends no payload, rank 1 does.
  auto channels = make_channels(Wire::kLocal, 2);
  auto links = make_memory_links(2);
  std::vector<std::unique_ptr<Runtime>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    RuntimeOptions options;
    options.rank = rank;
    options.size = 2;
    options.inline_limit = rank == 0 ? 0 : 1024;
    ranks.push_back(std::make_unique<Runtime>(options, std::move(channels[rank]),
                                              [link = links[rank]](uint32_t, const auto&) {
                                                return std::make_shared<HostCollectives>(link);
                                              }));
  }
  run_ranks(2, [&](int rank) {
    const Submission x(allreduce_of("x", {1}), floats({2}));
    ranks[rank]->submit({x.operation()});
    check_eq(x.wait(), "");
    check(x.output() == floats({4}));
    check_eq(ranks[rank]->stats().launches.load(), 1u);
    ranks[rank]->stop("");
  });
});

// --- names ----------------------------------------------------------------------------------

const Case duplicates("a name in flight is refused, with all that was submitted along", [] {
  SimulatedRanks job(2, {});
  const auto first = job.submit(0, allreduce_of("x", {1}), floats({1}));
  check_contains(
      check_throws<DuplicateName>([&] { job.submit(0, allreduce_of("x", {1}), floats({1})); }),
      "an operation named x is still in flight on this rank");
  const Submission y(allreduce_of("y", {1}), floats({1})), x(allreduce_of("x", {1}), floats({1}));
  check_throws<DuplicateName>([&] { job[0].submit({y.operation(), x.operation()}); });
  const Submission z(allreduce_of("z", {1}), floats({1})), again(allreduce_of("z", {1}), "");
  check_throws<DuplicateName>([&] { job[0].submit({z.operation(), again.operation()}); });
  // Neither y nor z is in flight.
  run_ranks(2, [&](int rank) {
    for (const char* name : {"y", "z"}) {
      check_eq(job.submit(rank, allreduce_of(name, {1}), floats({1})).wait(), "");
    }
    if (rank == 1) check_eq(job.submit(1, allreduce_of("x", {1}), floats({1})).wait(), "");
  });
  check_eq(first.wait(), "");
  check(first.output() == floats({2}));
});

}  // namespace
}  // namespace hvdtorch::test
