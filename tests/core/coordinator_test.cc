// The coordinator with simulated ranks and a clock of our own: when launches are made, and what is
// said when ranks leave, vanish, fail or talk nonsense.
#include "core/coordinator.h"

#include "check.h"
#include "coordinated_job.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

using Job = CoordinatedJob;

bool due_in(const Job& job, microseconds span) { return job.due() == span; }

// --- pacing ---------------------------------------------------------------------------------

const Case pipeline("two launches run at once, the next gathers company until one finishes", [] {
  Job job(2);
  for (const char* name : {"a", "b"}) {
    job.all_ready(name);
    check_eq(job.entries(), std::string("launch ") + name);
    check(!job.due() && !job->gathering());
  }
  job.all_ready("c");
  check_eq(job.entries(), "");
  check(job->gathering());
  job.all_ready("d");
  check_eq(job.entries(), "");
  job->on_launches_finished(0, 1);
  check_eq(job.entries(), "launch c d");
  check(!job->gathering() && !job.due());
});

const Case together("what is agreed on at once is fused at once", [] {
  Job job(2);
  for (const char* name : {"a", "b", "c"}) job.all_ready(name);
  check_eq(job.entries(), "launch a b c");
});

const Case cycle("the cycle time bounds the wait for company", [] {
  Job job(2);
  for (const char* name : {"a", "b"}) {
    job.all_ready(name);
    job.entries();
  }
  job.all_ready("c");
  check_eq(job.entries(), "");
  check(due_in(job, milliseconds(5)));
  job.pass(milliseconds(3));
  job.all_ready("d");
  check_eq(job.entries(), "");
  check(due_in(job, milliseconds(2)), "counted from the oldest");
  job.pass(microseconds(1999));
  check_eq(job.entries(), "");
  job.pass(microseconds(1));
  check_eq(job.entries(), "launch c d");
  check(!job.due());
  // The next tensor has a whole cycle of its own.
  job.all_ready("e");
  check_eq(job.entries(), "");
  check(due_in(job, milliseconds(5)));
});

const Case full("a full fusion threshold is launched at once", [] {
  Job job(2, 32);
  for (const char* name : {"a", "b"}) {
    job.all_ready(name);
    job.entries();
  }
  job.all_ready("c");
  check_eq(job.entries(), "");
  job.all_ready("d");
  check_eq(job.entries(), "launch c d");
});

const Case immediate("errors, barriers and inline results do not queue", [] {
  Job job(2);
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(name);
    job.entries();
  }
  job.ready(0, allreduce_of("x"));
  job.ready(1, allreduce_of("x", {9}));
  job.all_ready(desc_of(OpKind::kBarrier, "wall", {0}));
  for (int rank : {1, 0})
    job.say(rank, Ready{share(allreduce_of("loss", {1})), std::string(4, '\0')});
  check_eq(job.entries(), "error x | inline wall | inline loss");
  check(job->gathering());
});

// --- leaving, dying, failing ----------------------------------------------------------------

const Case clean_bye("a clean leave ends the job without an abort", [] {
  Job job(4);
  job.all_ready("a");
  check_eq(job.entries(), "launch a");
  job.say(3, Bye{"", true, 1});
  check_eq(job.entries(),
           "down: rank 3 (host host1) has left the job (hvd.shutdown() or end of its "
           "script)");
  check(job->departed(3) && !job->departed(2));
  job->on_lost(3, "connection closed");
  check_eq(job.entries(), "", "the end of a leaver's connection is no loss");
});

const Case unclean_bye("a leave with a reason names it; an unclean one aborts", [] {
  Job job(2);
  job.say(1, Bye{"ValueError: bad batch", false, 0});
  check_eq(job.entries(),
           "abort: rank 1 (host host0) has left the job after ValueError: bad batch");
});

const Case unread_launch("a leaver that has not taken every launch aborts the others'", [] {
  Job job(3);
  job.all_ready("a");
  check_eq(job.entries(), "launch a");
  job.say(1, Bye{"", true, 0});
  check_eq(job.entries(),
           "abort: rank 1 (host host0) has left the job (hvd.shutdown() or end of its "
           "script)");
});

const Case lost("a lost rank is named with its host and the reason", [] {
  Job job(4);
  job->on_lost(2, "connection closed");
  check_eq(job.entries(),
           "abort: rank 2 (host host1) is gone without a goodbye: it was killed or "
           "crashed (connection closed)");
  check(job->departed(2));
  job->on_lost(2, "again");
  check_eq(job.entries(), "");
});

const Case failed_then_lost("a failed transfer waits for its cause", [] {
  Job job(3);
  job.say(1, Failed{"connection reset"});
  check_eq(job.entries(), "");
  check(due_in(job, milliseconds(1500)));
  job.pass(milliseconds(1499));
  check_eq(job.entries(), "");
  job->on_lost(2, "closed");
  check_contains(job.entries(), "abort: rank 2 (host host1) is gone");
  check(!job.due());
  job.pass(milliseconds(10'000));
  check_eq(job.entries(), "");
});

const Case failed_alone("a failed transfer without a cause is reported as it is, once", [] {
  Job job(3);
  job.say(1, Failed{"connection reset"});
  job.say(0, Failed{"another text"});
  job.pass(milliseconds(1500));
  check_eq(job.entries(), "abort: rank 1 (host host0) reports a failed transfer: connection reset");
  check(!job.due());
  job.say(2, Failed{"late"});
  check(!job.due(), "the job is aborted already");
  check_eq(job.entries(), "");
});

const Case failed_after_lost("transfers that fail through an abort explain nothing", [] {
  Job job(3);
  job->on_lost(2, "closed");
  check_contains(job.entries(), "abort: rank 2");
  job.say(1, Failed{"aborted"});
  check(!job.due());
  job.pass(milliseconds(1500));
  check_eq(job.entries(), "");
});

const Case after_down("nothing is launched after the end", [] {
  Job job(3);
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(name);
    job.entries();
  }
  check(job->gathering());
  job.all_ready("d");
  job.say(2, Bye{"", true, 2});
  check_contains(job.entries(), "down: rank 2");
  check(!job.due(), "what gathered will not be launched");
  job.ready(0, allreduce_of("e"));
  job.ready(1, allreduce_of("e"));
  job->on_launches_finished(0, 1);
  job.pass(milliseconds(100));
  check_eq(job.entries(), "");
  job->on_lost(1, "closed");
  check_contains(job.entries(), "abort: rank 1");
});

const Case nonsense("a rank that talks nonsense ends the job by name, and is told so itself", [] {
  Job job(3);
  job->on_frame(2, "\x7f", {});
  check_contains(job.entries(),
                 "abort: rank 2 (host host1) sent a control message that makes no "
                 "sense (unknown record from a rank)");
  check(!job->departed(2));
  job.say(2, Bye{"", true, 0});
  check_eq(job.entries(), "", "it is not listened to any more");
  job->on_lost(2, "closed");
  check_eq(job.entries(), "");
  check(job->departed(2));
});

const Case violation("so does one whose statements no rank may make", [] {
  Job job(3);
  job.ready(1, allreduce_of("x"));
  job.ready(1, allreduce_of("x"));
  check_contains(job.entries(),
                 "rank 1 (host host0) sent a control message that makes no sense "
                 "(rank 1 submitted x twice)");
});

const Case names("ranks are described with their host where it is known", [] {
  Job job(2);
  check_eq(job->describe(1), "rank 1 (host host0)");
  check_eq(job->describe(7), "rank 7");
});

const Case log("entries are one frame for each rank, which it decodes as they were", [] {
  Job job(3);
  std::vector<LogSlots> readers(3, LogSlots(16));
  for (int round = 0; round < 3; ++round) {
    for (int rank : {0, 1, 2}) {
      job.ready(rank, allreduce_of("x"));
      job.ready(rank, desc_of(OpKind::kAllgather, "y", {rank}));
    }
    const auto entries = job.take();
    check_eq(entries.size(), 2u);
    std::vector<int> told;
    job->distribute(entries, [&](int rank, std::string_view frame) {
      told.push_back(rank);
      check_eq(texts_of(decode_entries(frame, readers[static_cast<size_t>(rank)])),
               texts_of(entries));
    });
    check_eq(told, std::vector<int>{1, 2});
    job->on_launches_finished(0, 2);
  }
});

}  // namespace
}  // namespace hvdtorch::test
