// The coordinator's process sets and joined ranks: lanes that do not wait for each other, entries
// that only members see, and the counts by which it knows what a leaver has left undone.
#include "check.h"
#include "coordinated_job.h"
#include "core/coordinator.h"
#include "core/log.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

using Job = CoordinatedJob;

const Case lanes("a full pipeline of one process set does not delay another", [] {
  Job job(3);
  const uint32_t set = job.add_set({0, 2});
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(name);
    job.entries();
  }
  check(job->gathering());
  job.all_ready(set, {0, 2}, "c");
  check_eq(job.entries(), "launch c");
  job.all_ready(set, {0, 2}, "d");
  check_eq(job.entries(), "launch d");
  job.all_ready(set, {0, 2}, "e");
  check_eq(job.entries(), "");
  // The end of a launch in the set is news for the set only.
  job->on_launches_finished(set, 1);
  check_eq(job.entries(), "launch e");
  job->on_launches_finished(0, 1);
  check_eq(job.entries(), "launch c");
});

const Case cycles("each lane waits for company for a cycle of its own", [] {
  Job job(2);
  const uint32_t set = job.add_set({1});
  for (const char* name : {"a", "b"}) {
    job.all_ready(name);
    job.all_ready(set, {1}, name);
    job.entries();
  }
  job.all_ready("c");
  check_eq(job.entries(), "");
  job.pass(milliseconds(2));
  job.all_ready(set, {1}, "d");
  check_eq(job.entries(), "");
  check(job.due() == milliseconds(3));
  job.pass(milliseconds(3));
  check_eq(job.entries(), "launch c");
  check(job.due() == milliseconds(2));
  job.pass(milliseconds(2));
  check_eq(job.entries(), "launch d");
  check(!job.due());
});

const Case members("entries go to the members of their set, in the order of the log", [] {
  Job job(4);
  const uint32_t left = job.add_set({0, 1}), right = job.add_set({2, 3}), first = job.add_set({0});
  for (int round = 0; round < 3; ++round) {
    job.all_ready("w");
    auto entries = job.take();
    job.all_ready(left, {0, 1}, "l");
    job.all_ready(right, {2, 3}, "r");
    job.all_ready(first, {0}, "f");
    for (Entry& entry : job.take()) entries.push_back(std::move(entry));
    job.all_ready("v");
    for (Entry& entry : job.take()) entries.push_back(std::move(entry));
    check_eq(job.read(entries),
             "1: launch w, launch l, launch v | 2: launch w, launch r, launch v | "
             "3: launch w, launch r, launch v");
    for (uint32_t set : {left, right, first}) job->on_launches_finished(set, 1);
    job->on_launches_finished(0, 2);
  }
  // Errors too; and the end of the job is for everyone.
  job.ready(2, in_set(right, allreduce_of("x")));
  job.ready(3, in_set(right, allreduce_of("x", {9})));
  check_eq(job.read(job.take()), "2: error x | 3: error x");
  job->on_lost(3, "closed");
  const std::string read = job.read(job.take());
  check_contains(read, "1: abort: rank 3");
  check_contains(read, " | 2: abort: rank 3");
  check(read.find("3: abort") == std::string::npos, "the lost rank cannot be told");
});

const Case removal("a removal launches what was agreed, then fails the rest", [] {
  Job job(3);
  const uint32_t set = job.add_set({1, 2});
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(set, {1, 2}, name);
    if (*name != 'c') job.entries();
  }
  check_eq(job.entries(), "");
  job.ready(2, in_set(set, allreduce_of("half")));
  job.remove_set(set);
  const auto entries = job.take();
  check_eq(Job::outline(entries, " | "), "launch c | inline process_sets | error half");
  check_eq(job.read(entries),
           "1: launch c, inline process_sets, error half | "
           "2: launch c, inline process_sets, error half");
  check(!job->gathering() && !job.due());
  // Late news of it, and a tensor that crossed its end.
  job.say(1, Finished{set, 3});
  check_eq(job.entries(), "");
  job.ready(1, in_set(set, allreduce_of("late")));
  check_eq(job.read(job.take()), "1: error late | 2: error late");
  check(job.add_set({1, 2}) > set, "ids are not used again");
});

const Case finished("a worker tells the end of launches that rank 0 has no part in", [] {
  Job job(3);
  const uint32_t set = job.add_set({1, 2});
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(set, {1, 2}, name);
    check_eq(job.entries(), *name == 'c' ? "" : std::string("launch ") + name);
  }
  job.say(1, Finished{set, 1});
  check_eq(job.entries(), "launch c");
  job.say(1, Finished{set, 2});
  check_eq(job.entries(), "");
  job.say(1, Finished{99, 5});
  check_eq(job.entries(), "", "of a set that is not there (any more)");
  job.say(1, Finished{set, 1});
  check_contains(job.entries(),
                 "abort: rank 1 (host host0) sent a control message that makes no "
                 "sense (it finished launches that were not made)");
});

// --- what leavers leave undone --------------------------------------------------------------

// True if rank `leaver`, having taken that many launches, leaves without harm to the others.
bool leaves_cleanly(Job& job, int leaver, uint64_t launches) {
  job.say(leaver, Bye{"", true, launches});
  return job.entries().starts_with("down: ");
}

const Case counts("launches are counted for the ranks that take part in them", [] {
  for (const auto& [leaver, launches] : {std::pair{1, 1}, {2, 2}, {3, 3}}) {
    for (const int missed : {0, 1}) {
      Job job(4);
      const uint32_t set = job.add_set({0, 2, 3}), pair = job.add_set({2, 3});
      job.all_ready("a");
      job.all_ready(set, {0, 2, 3}, "a");
      check_eq(job.entries(), "launch a | launch a");
      job.say(2, join_of());
      job.ready(3, in_set(pair, allreduce_of("a")));
      check_eq(job.entries(), "launch a");
      job.say(2, Finished{});  // nothing
      check_eq(leaves_cleanly(job, leaver, static_cast<uint64_t>(launches - missed)), missed == 0);
    }
  }
});

const Case after_end("launches that a removal would flush after the end count for nobody", [] {
  Job job(3);
  const uint32_t set = job.add_set({1, 2});
  for (const char* name : {"a", "b", "c"}) {
    job.all_ready(set, {1, 2}, name);
    job.entries();
  }
  job.remove_set(set);  // agreed on, but the end comes before the entry is taken
  check(leaves_cleanly(job, 0, 0), "rank 0 has no part in the set");
  check(leaves_cleanly(job, 1, 2));
});

// --- joined ranks ---------------------------------------------------------------------------

const Case joined("a join completes what waited for that rank, without it", [] {
  Job job(3);
  job.ready(0, allreduce_of("a"));
  job.ready(2, allreduce_of("a"));
  check_eq(job.entries(), "");
  job.say(1, join_of());
  const auto entries = job.take();
  check_eq(texts_of(entries),
           std::vector<std::string>{"Launch without [1] {" + text_of(allreduce_of("a")) +
                                    " numbers [] result ''}"});
  check_eq(job.read(entries), "1: launch a | 2: launch a", "the absent need it for their tables");
  job.ready(2, allreduce_of("a"));
  job.ready(0, allreduce_of("a"));
  check_eq(job.entries(), "launch a", "the same name again");
  for (int rank : {2, 0}) job.say(rank, join_of());
  const auto end = job.take();
  check_eq(Job::outline(end, " | "), "inline join");
  check_eq(std::get<Launch>(end[0]).items[0].numbers, std::vector<int64_t>{0});
  check_eq(std::get<Launch>(end[0]).absent, std::vector<int>{});
  // Everyone is back.
  job.ready(0, allreduce_of("a"));
  job.ready(2, allreduce_of("a"));
  check_eq(job.entries(), "");
});

const Case absent_error("an error is none of the absent ranks' business", [] {
  Job job(3);
  job.say(1, join_of());
  job.ready(0, allreduce_of("a"));
  job.ready(2, allreduce_of("a", {9}));
  const auto entries = job.take();
  check_eq(entries.size(), 1u);
  check_eq(std::get<Error>(entries[0]).absent, std::vector<int>{1});
});

// --- stalls ---------------------------------------------------------------------------------

const Case stalls("a stall has deadlines, and ends the job in the end", [] {
  configure_log(LogLevel::kFatal, false);
  Job job(3, 1000, milliseconds(5), milliseconds(60'000), milliseconds(90'000));
  job.ready(0, allreduce_of("a"));
  check_eq(job.entries(), "");
  check(job.due() == milliseconds(60'000));
  job.say(2, Excuse{3600});
  job.ready(2, allreduce_of("a"));
  job.pass(milliseconds(89'999));
  check_eq(job.entries(), "");
  check(job.due() == milliseconds(1));
  job.pass(milliseconds(1));
  const std::string end = job.entries();
  check_contains(end, "abort: the job was stopped: it stalled for 90 s");
  check_contains(end, "rank 1 has not submitted a, for which ranks 0, 2 have waited for 90 s");
  check_contains(end, "rank 1 (host host0) has submitted nothing yet");
  check(!job.due(), "after the end nothing is due");
});

}  // namespace
}  // namespace hvdtorch::test
