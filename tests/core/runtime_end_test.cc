// How jobs of simulated ranks end: ranks that leave with work pending or running, die in
// negotiation or in a transfer, or talk nonsense. The others must be told who and why, and nobody
// may hang; and a job that does nothing must cost nothing.
#include <optional>
#include <thread>

#include "check.h"
#include "core/runtime.h"
#include "samples.h"
#include "simulated_ranks.h"
#include "thread_watch.h"

namespace hvdtorch::test {
namespace {

using std::chrono::milliseconds;

Submission submit_x(SimulatedRanks& job, int rank) {
  return job.submit(rank, allreduce_of("x", {1000}), std::string(4000, '\0'));
}

void check_refuses(Runtime& rank, const std::string& why) {
  const Submission late(allreduce_of("late"), std::string(16, '\0'));
  check_contains(check_throws<InternalError>([&] { rank.submit({late.operation()}); }), why);
}

// --- leaving --------------------------------------------------------------------------------

const Case leave_pending("a rank that leaves fails what others wait for, with its reason", [] {
  for (Wire wire : kWires) {
    for (int leaver : {0, 1}) {
      SimulatedRanks job(3, {.wire = wire, .options = quick()});
      const std::string name = "rank " + std::to_string(leaver) + " (host host" +
                               std::to_string(leaver) +
                               ") has left the job after ValueError: bad batch";
      const auto other = submit_x(job, 1 - leaver);
      const auto own = job.submit(leaver, allreduce_of("own"), std::string(16, '\0'));
      job[leaver].stop("ValueError: bad batch");
      check_eq(own.wait(), "own cannot complete: hvd.shutdown() was called on this rank first");
      check_eq(other.wait(), "x cannot complete: " + name);
      check_refuses(job[1 - leaver], "this job cannot run collectives any more: " + name);
      check_refuses(job[leaver], "hvd.shutdown() was called");
      check_eq(job[1 - leaver].down_text(), name);
      job[leaver].stop("again");
      job[leaver].stop("");
    }
  }
});

const Case clean("a plain leave says so", [] {
  SimulatedRanks job(2, {.options = quick()});
  const auto x = submit_x(job, 0);
  job[1].stop("");
  check_contains(x.wait(),
                 "rank 1 (host host1) has left the job (hvd.shutdown() or end of its "
                 "script)");
});

const Case finish_first("results that all ranks agreed on arrive although a rank leaves at once",
                        [] {
                          for (Wire wire : kWires) {
                            for (int round = 0; round < rounds(100); ++round) {
                              SimulatedRanks job(
                                  3, {.wire = wire, .options = quick(round % 2 == 0 ? 0 : 4096)});
                              run_ranks(3, [&](int rank) {
                                check_eq(submit_x(job, rank).wait(), "");
                                job[rank].stop("");
                              });
                            }
                          }
                        });

const Case leave_launched("nobody hangs when a rank leaves while its operation is on its way", [] {
  for (Wire wire : kWires) {
    for (int round = 0; round < rounds(200); ++round) {
      const int leaver = round % 3;
      SimulatedRanks job(3, {.wire = wire, .options = quick()});
      run_ranks(3, [&](int rank) {
        std::optional<Submission> x;
        try {
          x = submit_x(job, rank);
        } catch (const InternalError& error) {  // the leaver was gone first
          check_contains(error.what(), "rank " + std::to_string(leaver) + " (host");
          return;
        }
        if (rank == leaver) {
          for (int i = 0; i < round % 7; ++i) std::this_thread::yield();
          job[rank].stop("KeyError: 'a'");
        }
        const std::string error = x->wait();
        if (error.empty()) return;
        check_contains(error, rank == leaver ? std::string("was called on this rank first")
                                             : "rank " + std::to_string(leaver) + " (host");
      });
    }
  }
});

const Case stop_while_submitting("stop() beside threads that submit: all operations complete", [] {
  for (int round = 0; round < rounds(60); ++round) {
    SimulatedRanks job(2, {.options = quick(round % 2 == 0 ? 0 : 1024)});
    run_ranks(6, [&](int thread) {
      const int rank = thread % 2;
      if (thread >= 4) {
        for (int i = 0; i < round; ++i) std::this_thread::yield();
        job[rank].stop("");
        return;
      }
      std::vector<Submission> submissions;
      const std::string prefix = thread < 2 ? "a" : "b";
      try {
        for (int i = 0;; ++i) {
          submissions.push_back(job.submit(rank, allreduce_of(prefix + std::to_string(i), {8}),
                                           floats({1, 2, 3, 4, 5, 6, 7, 8})));
          if (i % 16 == 15) submissions[static_cast<size_t>(i)].wait();
        }
      } catch (const InternalError&) {
      }
      for (const auto& submission : submissions) {
        if (submission.wait().empty()) {
          check(submission.output() == floats({2, 4, 6, 8, 10, 12, 14, 16}));
        }
      }
    });
    job.stop();
  }
  check_eq(Submission::alive(), 0);
});

const Case cycles("starting and stopping leaves no thread and no descriptor behind", [] {
  const long fds = open_fds(), threads = live_threads();
  for (int cycle = 0; cycle < rounds(50); ++cycle) {
    for (Wire wire : kWires) {
      SimulatedRanks job(2, {.wire = wire, .options = quick()});
      run_ranks(2, [&](int rank) { check_eq(submit_x(job, rank).wait(), ""); });
    }
  }
  check_eq(open_fds(), fds, "open descriptors");
  check_eq(live_threads(), threads, "threads");
  check_eq(Submission::alive(), 0);
});

// --- dying ----------------------------------------------------------------------------------

// "rank 1 (host host1)[, the coordinator,] is gone without a goodbye".
std::string gone(int rank) {
  return "rank " + std::to_string(rank) + " (host host" + std::to_string(rank) + ")" +
         (rank == 0 ? ", the coordinator," : "") + " is gone without a goodbye";
}

const Case die_negotiating("a rank that dies in negotiation is named to all others", [] {
  for (Wire wire : kWires) {
    for (int dead : {0, 2}) {
      SimulatedRanks job(4, {.wire = wire, .options = quick(), .mortal = {dead}});
      std::vector<Submission> pending;
      for (int rank = 0; rank < 4; ++rank) {
        if (rank != dead) pending.push_back(submit_x(job, rank));
      }
      job.die(dead);
      for (const auto& x : pending) check_contains(x.wait(), "x cannot complete: " + gone(dead));
      for (int rank = 0; rank < 4; ++rank) {
        if (rank != dead) check_refuses(job[rank], gone(dead));
      }
    }
  }
});

const Case die_in_transfer("a rank that dies in a transfer is named to all others", [] {
  for (Wire wire : kWires) {
    for (int dead : {0, 2}) {
      SimulatedRanks job(4, {.wire = wire, .options = quick(), .mortal = {dead}});
      std::vector<Submission> running;
      for (int rank = 0; rank < 4; ++rank) running.push_back(submit_x(job, rank));
      const auto pending = job.submit(1, allreduce_of("pending"), std::string(16, '\0'));
      job.wait_until_in_transfer(dead);
      job.die(dead);
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == dead) continue;
        check_contains(running[static_cast<size_t>(rank)].wait(),
                       "x cannot complete: " + gone(dead));
      }
      check_contains(pending.wait(), gone(dead));
    }
  }
});

const Case data_first("a death that breaks the transfer first is still named as the cause", [] {
  SimulatedRanks job(3, {.options = quick(), .mortal = {2}});
  std::vector<Submission> running;
  for (int rank = 0; rank < 3; ++rank) running.push_back(submit_x(job, rank));
  job.wait_until_in_transfer(2);
  job.cut_link(2);
  job.die(2);
  for (int rank : {0, 1}) check_contains(running[static_cast<size_t>(rank)].wait(), gone(2));
});

const Case transfer_fails("a transfer that fails while all live is reported by who saw it", [] {
  SimulatedRanks job(3, {.options = quick(), .mortal = {2}});
  std::vector<Submission> running;
  for (int rank = 0; rank < 3; ++rank) running.push_back(submit_x(job, rank));
  job.wait_until_in_transfer(2);
  job.cut_link(2);
  std::vector<std::string> errors;
  for (int rank = 0; rank < 3; ++rank) {
    errors.push_back(running[static_cast<size_t>(rank)].wait());
    check_contains(errors.back(), " reports a failed transfer: rank 2 is gone");
  }
  check_eq(errors, std::vector<std::string>(3, errors[0]));
});

// --- nonsense -------------------------------------------------------------------------------

const Case bad_rank("a rank that talks nonsense is named, and told", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(3, {.wire = wire, .options = quick(), .raw = {2}});
    const auto x = submit_x(job, 1), own = submit_x(job, 0);
    job.channel(2).send(0, "\x7f nonsense");
    check_contains(x.wait(), "rank 2 (host host2) sent a control message that makes no sense");
    check_eq(own.wait(), x.wait());
    LogSlots reader(1024);
    const auto hang = Channel::Clock::now() + kHang;
    std::vector<Channel::Event> events;
    while (events.empty()) {
      check(Channel::Clock::now() < hang, "the culprit was not told");
      events = job.channel(2).wait(hang);
    }
    check(events[0].kind == Channel::Event::Kind::kFrame, "lost: " + events[0].data);
    const auto entries = decode_entries(events[0].data, reader);
    check_contains(std::get<Down>(entries.back()).text, "rank 2 (host host2) sent a control");
  }
});

const Case bad_coordinator("a log that makes no sense ends the job on the rank that reads it", [] {
  SimulatedRanks job(2, {.options = quick(), .raw = {0}});
  const auto x = submit_x(job, 1);
  job.channel(0).send(1, "\x7f nonsense");
  check_contains(x.wait(), "the coordinator (rank 0) sent a log that makes no sense");
});

// --- idling ---------------------------------------------------------------------------------

const Case idle("idle runtimes are not woken", [] {
  for (Wire wire : kWires) {
    SimulatedRanks job(2, {.wire = wire, .options = quick()});
    run_ranks(2, [&](int rank) { check_eq(submit_x(job, rank).wait(), ""); });
    std::vector<int> tids;
    for (int rank : {0, 1}) {
      for (int tid : job[rank].thread_ids()) tids.push_back(tid);
    }
    check_eq(tids.size(), 4u);
    check_asleep(tids);
  }
});

}  // namespace
}  // namespace hvdtorch::test
