// Process sets and joins of whole jobs, one situation at a time: sets that do not wait for each
// other, ranks that die, leave or stall while others have joined, sets that come and go.
#include <algorithm>
#include <optional>
#include <thread>

#include "check.h"
#include "core/log.h"
#include "core/runtime.h"
#include "samples.h"
#include "simulated_ranks.h"
#include "thread_watch.h"

namespace hvdtorch::test {
namespace {

using std::chrono::milliseconds;

Submission submit(SimulatedRanks& job, int rank, const Ready& change) {
  return job.submit(rank, *change.desc, change.payload.value_or(""));
}

// All ranks change the sets; the number they are told, or 0.
uint32_t change(SimulatedRanks& job, const Ready& change) {
  std::vector<Submission> all;
  for (int rank = 0; rank < job.size(); ++rank) all.push_back(submit(job, rank, change));
  for (const auto& each : all) {
    check_eq(each.wait(), "");
    check_eq(each.operation()->numbers, all[0].operation()->numbers);
  }
  const auto& numbers = all[0].operation()->numbers;
  return numbers.empty() ? 0 : static_cast<uint32_t>(numbers[0]);
}

Submission submit_x(SimulatedRanks& job, int rank, uint32_t set = 0) {
  return job.submit(rank, in_set(set, allreduce_of("x", {1000})), std::string(4000, '\0'));
}

std::string gone(int rank) {
  return "rank " + std::to_string(rank) + " (host host" + std::to_string(rank) + ")" +
         (rank == 0 ? ", the coordinator," : "") + " is gone without a goodbye";
}

const Case membership("set_size() and who may submit follow the sets", [] {
  SimulatedRanks job(3, {});
  const uint32_t set = change(job, addition_of({0, 2}));
  for (int rank : {0, 1, 2}) {
    check_eq(job[rank].set_size(0), 3);
    check_eq(job[rank].set_size(set), 2);
    check_throws<std::invalid_argument>([&] { job[rank].set_size(set + 1); });
  }
  const std::string not_one = "x: this rank is not a member of process set ";
  check_contains(check_throws<std::invalid_argument>([&] { submit_x(job, 1, set); }), not_one);
  check_contains(check_throws<std::invalid_argument>([&] { submit_x(job, 0, set + 1); }), not_one);
  change(job, removal_of(set));
  for (int rank : {0, 1, 2}) {
    check_throws<std::invalid_argument>([&] { job[rank].set_size(set); });
    check_contains(check_throws<std::invalid_argument>([&] { submit_x(job, rank, set); }), not_one);
  }
});

const Case alone("a set of one rank, which need not be rank 0", [] {
  for (int rank : {0, 1}) {
    SimulatedRanks job(2, {.options = quick()});
    const uint32_t set = change(job, addition_of({rank}));
    OpDesc d = in_set(set, allreduce_of("x", {3}));
    d.op = ReduceOp::kAverage;
    d.prescale = 3;
    for (int round = 0; round < 20; ++round) {
      const auto x = job.submit(rank, d, floats({1, 2, 3}));
      check_eq(x.wait(), "");
      check(x.output() == floats({3, 6, 9}));
    }
  }
});

const Case stuck("a transfer that hangs in one set does not stop another", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(3, {.wire = wire, .options = quick(), .mortal = {2}});
    const uint32_t set = change(job, addition_of({0, 1})), other = change(job, addition_of({0, 1}));
    std::vector<Submission> hanging;
    for (int rank : {0, 1, 2}) hanging.push_back(submit_x(job, rank));
    job.wait_until_in_transfer(2);
    run_ranks(2, [&](int rank) {
      for (int round = 0; round < rounds(100); ++round) {
        check_eq(submit_x(job, rank, round % 2 == 0 ? set : other).wait(), "");
      }
    });
    for (int rank : {0, 1}) check(!hanging[rank].operation()->completion->done());
    job.die(2);
    for (int rank : {0, 1}) check_contains(hanging[rank].wait(), gone(2));
  }
});

const Case removed_while_running("what runs in a removed set runs on, until aborted", [] {
  SimulatedRanks job(3, {.options = quick(), .mortal = {2}});
  const uint32_t set = change(job, addition_of({1, 2}));
  std::vector<Submission> hanging;
  for (int rank : {1, 2}) {
    hanging.push_back(submit_x(job, rank, set));
  }
  job.wait_until_in_transfer(2);
  change(job, removal_of(set));
  check(!hanging[0].operation()->completion->done());
  job.die(2);
  check_contains(hanging[0].wait(), gone(2));
});

const Case come_and_go("sets that come and go leave nothing behind", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(2, {.wire = wire, .options = quick()});
    uint32_t last = 0;
    const long threads = live_threads();
    for (int round = 0; round < rounds(100); ++round) {
      const uint32_t set = change(job, addition_of({0, 1}));
      check_eq(set, last + 1);
      last = set;
      std::vector<Submission> all;
      for (int i = 0; i < 3; ++i) {
        for (int rank : {0, 1}) {
          all.push_back(job.submit(rank, in_set(set, allreduce_of(std::to_string(i), {300})),
                                   std::string(1200, '\0')));
        }
      }
      change(job, removal_of(set));
      for (const auto& each : all) check_eq(each.wait(), "");
      check_eq(job[0].thread_ids().size(), 2u);
    }
    const auto hang = std::chrono::steady_clock::now() + kHang;
    while (live_threads() > threads) {
      check(std::chrono::steady_clock::now() < hang, "threads of removed sets live on");
      std::this_thread::yield();
    }
  }
  check_eq(Submission::alive(), 0);
});

const Case crossing("what crosses the removal of its set is told so, on every rank", [] {
  for (int round = 0; round < rounds(100); ++round) {
    SimulatedRanks job(2, {.options = quick(round % 2 == 0 ? 0 : 4096)});
    const uint32_t set = change(job, addition_of({0, 1}));
    // One thread of a rank submits, the other removes.
    run_ranks(4, [&](int thread) {
      const int rank = thread % 2;
      if (thread >= 2) {
        for (int i = 0; i < round % 5; ++i) std::this_thread::yield();
        check_eq(submit(job, rank, removal_of(set)).wait(), "");
        return;
      }
      std::vector<Submission> all;
      try {
        for (int i = 0; i < 1000; ++i) {
          all.push_back(job.submit(rank, in_set(set, allreduce_of("x")), floats({1, 2, 3, 4})));
          all.back().wait();
        }
      } catch (const std::invalid_argument& error) {
        check_contains(error.what(), "or the set was removed");
      }
      for (const auto& each : all) {
        const std::string error = each.wait();
        if (error.empty()) {
          check(each.output() == floats({2, 4, 6, 8}));
        } else {
          check_contains(error, "process set 1 was removed");
        }
      }
    });
    check_eq(job[0].down_text() + job[1].down_text(), "");
  }
});

// --- join -----------------------------------------------------------------------------------

const Case uneven("the last to join is the same on all ranks, and names start anew", [] {
  for (Wire wire : kWires) {
    for (int64_t limit : {0, 4096}) {
      SimulatedRanks job(4, {.wire = wire, .options = quick(limit)});
      for (int epoch = 0; epoch < rounds(50); ++epoch) {
        const int longest = epoch % 4;
        run_ranks(4, [&](int rank) {
          const int steps = rank == longest ? 5 : (rank + epoch) % 3;
          for (int step = 0; step < steps; ++step) {
            check_eq(submit_x(job, rank).wait(), "");
          }
          const auto join = submit(job, rank, join_of());
          check_eq(join.wait(), "");
          check_eq(join.operation()->numbers, std::vector<int64_t>{longest});
        });
      }
    }
  }
});

const Case reporter("without rank 0 too, the end of a launch lets the next one go", [] {
  RuntimeOptions options = quick();
  options.cycle_time = std::chrono::seconds(3600);
  SimulatedRanks job(3, {.options = options});
  const auto join = submit(job, 0, join_of());
  run_ranks(2, [&](int thread) {
    std::vector<Submission> all;
    for (int i = 0; i < 40; ++i) {
      all.push_back(
          job.submit(1 + thread, allreduce_of(std::to_string(i), {300}), std::string(1200, '\0')));
    }
    for (const auto& each : all) check_eq(each.wait(), "");
  });
});

const Case pending_join("what a rank has pending when it joins still completes with its part", [] {
  SimulatedRanks job(2, {.options = quick()});
  const auto early = job.submit(1, allreduce_of("x", {3}), floats({1, 2, 3}));
  const auto join = submit(job, 1, join_of());
  check_throws<DuplicateName>([&] { submit(job, 1, join_of()); });
  const auto x = job.submit(0, allreduce_of("x", {3}), floats({10, 20, 30}));
  check_eq(x.wait() + early.wait(), "");
  check(x.output() == floats({11, 22, 33}) && early.output() == x.output());
  const auto y = job.submit(0, allreduce_of("x", {3}), floats({10, 20, 30}));
  check_eq(y.wait(), "");
  check(y.output() == floats({10, 20, 30}));
  check_eq(submit(job, 0, join_of()).wait(), "");
  check_eq(join.wait(), "");
});

const Case not_its_error("an error among the active is not a joined rank's", [] {
  SimulatedRanks job(3, {.options = quick()});
  const uint32_t solo = change(job, addition_of({1}));
  const auto join = submit(job, 1, join_of());
  check_eq(submit_x(job, 1, solo).wait(), "");  // the join was heard of
  for (int round = 0; round < rounds(200); ++round) {
    std::optional<Submission> own;
    std::string errors[3];
    run_ranks(3, [&](int rank) {
      const OpDesc y = allreduce_of("y", {rank == 2 ? 2 : 3});
      const auto submission = job.submit(rank, y, std::string(static_cast<size_t>(y.bytes()), 0));
      if (rank == 1) {  // another thread of the joined rank
        own = submission;
        check_eq(submit_x(job, 1, solo).wait(), "");  // it was heard of
      } else {
        errors[rank] = submission.wait();
      }
    });
    check_eq(errors[0], errors[2]);
    check_contains(errors[0], "y: the ranks disagree on shape: rank");
    if (errors[0].find("ranks 0, 1: [3]") != std::string::npos) {
      check_eq(own->wait(), errors[0]);  // it came in time to take part
      continue;
    }
    // It waits for the others' next one, and takes part in that.
    std::vector<Submission> again;
    for (int rank : {0, 2}) {
      again.push_back(job.submit(rank, allreduce_of("y", {3}), floats({1, 2, 3})));
    }
    for (const auto& each : again) check_eq(each.wait(), "");
    check_eq(own->wait(), "");
    check(own->output() == floats({2, 4, 6}));
  }
});

const Case die_joined("a rank that dies while others have joined is named to all", [] {
  for (Wire wire : kWires) {
    for (int dead : {0, 3}) {
      SimulatedRanks job(4, {.wire = wire, .options = quick(), .mortal = {dead}});
      const auto join = submit(job, 1, join_of());
      std::vector<Submission> running;
      for (int rank : {0, 2, 3}) running.push_back(submit_x(job, rank));
      job.wait_until_in_transfer(dead);
      job.die(dead);
      check_contains(join.wait(), gone(dead));
      check_contains(running[1].wait(), gone(dead));
      check_contains(running[dead == 0 ? 2 : 0].wait(), gone(dead));
    }
  }
});

const Case joined_dies("a joined rank that dies is named to those that go on without it", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(3, {.wire = wire, .options = quick(), .mortal = {2}});
    submit(job, 2, join_of());
    run_ranks(2, [&](int rank) { check_eq(submit_x(job, rank).wait(), ""); });
    const auto join = submit(job, 0, join_of());
    job.die(2);
    check_contains(join.wait(), gone(2));
  }
});

const Case leave_joined("a rank that leaves while others have joined is named to all", [] {
  for (int leaver : {0, 2}) {
    SimulatedRanks job(3, {.options = quick()});
    const auto join = submit(job, 1, join_of());
    run_ranks(3, [&](int rank) {
      if (rank != 1) check_eq(submit_x(job, rank).wait(), "");
    });
    job[leaver].stop("KeyError: 'a'");
    check_contains(join.wait(), "rank " + std::to_string(leaver) + " (host host" +
                                    std::to_string(leaver) + ") has left the job after KeyError");
  }
});

const Case clean_leave("a rank that missed launches by having joined still leaves cleanly", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(3, {.wire = wire, .options = quick()});
    const uint32_t set = change(job, addition_of({0, 2}));
    run_ranks(3, [&](int rank) {
      if (rank == 0) check_eq(submit_x(job, 0).wait(), "");  // alone, once the others have joined
      check_eq(submit(job, rank, join_of()).wait(), "");
    });
    // Rank 1 leaves while the others are in the middle of something that it has no part in.
    run_ranks(3, [&](int rank) {
      if (rank == 1) return job[1].stop("");
      try {
        for (int round = 0; round < 50; ++round) {
          const std::string error = submit_x(job, rank, set).wait();
          if (error.empty()) continue;
          check_contains(error, "rank 1 (host host1) has left the job (hvd.shutdown()");
          break;
        }
      } catch (const InternalError& error) {
        check_contains(error.what(), "rank 1 (host host1) has left the job (hvd.shutdown()");
      }
    });
  }
});

// --- stalls and idling ----------------------------------------------------------------------

const Case stalled("a stall ends the job after the shutdown time, with the same text for all", [] {
  configure_log(LogLevel::kFatal, false);
  for (Wire wire : kWires) {
    RuntimeOptions options = quick();
    options.stall_warn_after = options.stall_stop_after = milliseconds(20);
    SimulatedRanks job(3, {.wire = wire, .options = options});
    std::string errors[3];
    run_ranks(3, [&](int rank) {
      std::string text;
      try {
        text =
            job.submit(rank, allreduce_of("t" + std::to_string(rank)), floats({1, 2, 3, 4})).wait();
      } catch (const InternalError& error) {  // the job was down already
        text = error.what();
      }
      const size_t why = text.find("the job was stopped: it stalled for 0.02 s");
      check(why != std::string::npos, text);
      errors[rank] = text.substr(why);
      check_contains(errors[rank], " not submitted t");
    });
    check_eq(errors[1], errors[0]);
    check_eq(errors[2], errors[0]);
  }
});

const Case excused("a rank that excused itself may keep the others waiting", [] {
  configure_log(LogLevel::kFatal, false);
  RuntimeOptions options = quick();
  options.stall_warn_after = options.stall_stop_after = milliseconds(1000);
  SimulatedRanks job(3, {.options = options});
  const uint32_t pair = change(job, addition_of({0, 1}));
  job[1].excuse(3600);
  check_eq(submit_x(job, 1, change(job, addition_of({1}))).wait(), "");  // it was heard of
  const auto x = submit_x(job, 0, pair);
  for (int round = 0; round < 24; ++round) {
    std::this_thread::sleep_for(milliseconds(50));
    check(!x.operation()->completion->done());
  }
  check_eq(submit_x(job, 1, pair).wait(), "");
  check_eq(x.wait(), "");
  // It is back, and stalls like any other.
  job[1].excuse(0);
  check_contains(submit_x(job, 0, pair).wait(), "rank 1 (host host1)");
});

const Case idle("idle runtimes with process sets and joined ranks are not woken", [] {
  for (Wire wire : kWires) {
    RuntimeOptions options = quick();
    options.stall_warn_after = std::chrono::hours(1);
    SimulatedRanks job(2, {.wire = wire, .options = options});
    const uint32_t set = change(job, addition_of({1})), pair = change(job, addition_of({0, 1}));
    check_eq(submit_x(job, 1, set).wait(), "");
    run_ranks(2, [&](int rank) { check_eq(submit_x(job, rank, pair).wait(), ""); });
    const auto join = submit(job, 1, join_of());
    check_eq(submit_x(job, 0).wait(), "");
    const auto waiting = submit_x(job, 1);
    // A thread that had nothing to do yet may only just be starting, and has no id before.
    std::vector<int> tids = {0};
    while (std::count(tids.begin(), tids.end(), 0) > 0) {
      tids.clear();
      for (int rank : {0, 1}) {
        for (int tid : job[rank].thread_ids()) tids.push_back(tid);
      }
      std::this_thread::yield();
    }
    check_eq(tids.size(), 7u);
    check_asleep(tids);
  }
});

}  // namespace
}  // namespace hvdtorch::test
