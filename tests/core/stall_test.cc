// The stall inspector with a clock of our own: what is reported, once, when, about whom; and that
// nothing is ever due in the past.
#include "core/stall.h"

#include <algorithm>
#include <limits>

#include "check.h"
#include "core/negotiator.h"
#include "negotiations.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr double kForever = std::numeric_limits<double>::infinity();

// A job that warns after a minute.
class Watch {
 public:
  explicit Watch(int size, milliseconds stop_after = milliseconds(0),
                 milliseconds warn_after = seconds(60))
      : negotiator(size),
        stalls_(size,
                {warn_after, stop_after, [](int rank) { return "R" + std::to_string(rank); }}) {}

  void ready(int rank, OpDesc d) { ready(rank, Ready{share(std::move(d)), std::nullopt}); }
  void ready(int rank, Ready ready) {
    stalls_.on_ready(rank, ready.desc, now_);
    negotiator.on_ready(rank, std::move(ready), now_);
  }
  void ready(const std::vector<int>& ranks, const OpDesc& d) {
    for (int rank : ranks) ready(rank, d);
  }
  void excuse(int rank, double span) {
    stalls_.excuse(rank, std::chrono::duration<double>(span), now_);
  }
  void pass(milliseconds span) { now_ += span; }

  StallInspector::Report inspect() {
    auto report = stalls_.inspect(negotiator, now_);
    const auto due = stalls_.deadline(negotiator);
    check(!due || *due > now_, "it is due again at once");
    return report;
  }
  // "warning | resolved: ... | fatal: ..."
  std::string report() {
    const auto report = inspect();
    std::string text = report.warning;
    if (!report.resolved.empty()) text += " | resolved: " + report.resolved;
    if (!report.fatal.empty()) text += " | fatal: " + report.fatal;
    return text;
  }
  std::optional<milliseconds> due() const {
    const auto deadline = stalls_.deadline(negotiator);
    if (!deadline) return std::nullopt;
    return std::chrono::duration_cast<milliseconds>(*deadline - now_);
  }

  Negotiator negotiator;

 private:
  StallInspector stalls_;
  StallInspector::Clock::time_point now_{std::chrono::hours(1)};
};

OpDesc at(OpDesc d, const std::string& site) {
  d.site = site;
  return d;
}

const Case off("nothing is reported where it is turned off, nor where nothing waits", [] {
  Watch off(2, seconds(0), seconds(0));
  off.ready(0, allreduce_of("x"));
  off.pass(std::chrono::hours(24));
  check_eq(off.report(), "");
  check(!off.due());
  Watch idle(2);
  idle.pass(std::chrono::hours(24));
  check_eq(idle.report(), "");
  check(!idle.due());
});

const Case once("a stall is reported once, with who is missing and what they did last", [] {
  Watch watch(4);
  for (int rank : {0, 1, 2, 3}) watch.ready(rank, at(allreduce_of("before"), "train.py:3"));
  watch.negotiator.take_decisions();
  watch.pass(seconds(5));
  watch.ready({0, 3}, at(allreduce_of("allreduce.x"), "train.py:7"));
  watch.ready(1, at(desc_of(OpKind::kBroadcast, "broadcast.y"), "other.py:1"));
  check(watch.due() == seconds(60));
  watch.pass(milliseconds(59'999));
  check_eq(watch.report(), "");
  check(watch.due() == milliseconds(1));
  watch.pass(milliseconds(1));
  check_eq(watch.report(),
           "\n  ranks 0, 2, 3 have not submitted broadcast.y (other.py:1), for which rank 1 has "
           "waited for 60 s"
           "\n  ranks 1, 2 have not submitted allreduce.x (train.py:7), for which ranks 0, 3 have "
           "waited for 60 s"
           "\n  R0 waits for allreduce.x (train.py:7)"
           "\n  R1 waits for broadcast.y (other.py:1)"
           "\n  R2 last submitted before (train.py:3), 65 s ago"
           "\n  R3 waits for allreduce.x (train.py:7)");
  for (int minute = 0; minute < 100; ++minute) {
    watch.pass(seconds(60));
    check_eq(watch.report(), "", "it was said");
  }
});

const Case never_spoke("a rank that never submitted anything is said to be so", [] {
  Watch watch(2);
  watch.ready(1, allreduce_of("allreduce.x"));
  watch.pass(seconds(60));
  check_eq(watch.report(),
           "\n  rank 0 has not submitted allreduce.x, for which rank 1 has waited for 60 s"
           "\n  R0 has submitted nothing yet");
});

const Case coalesced("tensors of about one moment make one report, with the first six names", [] {
  Watch watch(2);
  for (int i = 0; i < 9; ++i) {
    watch.ready(0, allreduce_of("t" + std::to_string(i)));
    watch.pass(milliseconds(600));
  }
  watch.pass(seconds(60) - milliseconds(9 * 600));
  check_eq(watch.report(),
           "\n  rank 1 has not submitted t0, t1, t2, t3, t4, t5 and 3 more, for which rank 0 has "
           "waited for 60 s\n  R1 has submitted nothing yet");
  // One of a later moment has a report of its own, when it is due.
  watch.ready(0, allreduce_of("late"));
  watch.pass(seconds(50));
  check_eq(watch.report(), "");
  watch.pass(seconds(10));
  check_contains(watch.report(), "has not submitted late, for which rank 0 has waited for 60 s");
});

const Case younger("a younger stall is reported when it is due itself", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("old"));
  watch.pass(seconds(20));
  watch.ready(0, allreduce_of("young"));
  watch.pass(seconds(40));
  check_contains(watch.report(), "old");
  check(watch.due() == seconds(20));
  watch.pass(seconds(20));
  check_contains(watch.report(), "has not submitted young, for which rank 0 has waited for 60 s");
});

const Case resolved("what was reported and is over is said to be so, at once", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("x"));
  watch.ready(0, allreduce_of("y"));
  watch.pass(seconds(60));
  check_contains(watch.report(), "x, y");
  watch.pass(seconds(10));
  check_eq(watch.report(), "");
  watch.ready(1, allreduce_of("x"));
  check_eq(watch.report(), " | resolved: x");
  check_eq(watch.report(), "");
  watch.ready(1, allreduce_of("y"));
  check_eq(watch.report(), " | resolved: y");
  check(!watch.due());
  // The name's next use has a stall of its own.
  watch.ready(1, allreduce_of("x"));
  watch.pass(seconds(50));
  check_eq(watch.report(), "");
  watch.pass(seconds(10));
  check_contains(watch.report(), "rank 0 has not submitted x, for which rank 1");
});

const Case unreported("what ends before it is reported is never spoken of", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("x"));
  watch.pass(seconds(59));
  watch.ready(1, allreduce_of("x"));
  watch.pass(seconds(1));
  check_eq(watch.report(), "");
});

// --- excuses --------------------------------------------------------------------------------

const Case excused("the usual time starts after the excuse", [] {
  Watch watch(3);
  watch.excuse(1, 300);
  watch.ready(0, allreduce_of("x"));
  watch.ready(2, allreduce_of("x"));
  milliseconds passed{0};
  std::string report;
  int looks = 0;
  while (report.empty()) {
    const auto span = watch.due();
    check(span && *span > seconds(0));
    watch.pass(*span);
    passed += *span;
    ++looks;
    report = watch.report();
  }
  check_contains(report, "rank 1 has not submitted x, for which ranks 0, 2");
  check(passed == seconds(360));
  check(looks <= 6, "it looked oftener than once a minute");
});

const Case excuse_ends("an excuse that is taken back counts until then", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("x"));
  watch.excuse(1, kForever);
  watch.pass(seconds(1000));
  check_eq(watch.report(), "");
  watch.excuse(1, 0);
  check_eq(watch.report(), "");
  check(watch.due() == seconds(60));
  watch.pass(seconds(50));
  check_eq(watch.report(), "");
  watch.pass(seconds(10));
  check_contains(watch.report(), "rank 0 has waited for 1060 s");
});

const Case one_of_two("an excused rank excuses no other", [] {
  Watch watch(3);
  watch.excuse(1, kForever);
  watch.ready(0, allreduce_of("x"));
  watch.pass(seconds(60));
  check_contains(watch.report(), "ranks 1, 2 have not submitted x");
});

const Case odd_excuses("excuses that are no time, or more than there is", [] {
  for (const double odd : {-1.0, -kForever, std::numeric_limits<double>::quiet_NaN(), 0.0}) {
    Watch watch(2);
    watch.ready(0, allreduce_of("x"));
    watch.excuse(1, odd);
    watch.pass(seconds(60));
    check_contains(watch.report(), "rank 1 has not submitted x");
  }
  for (const double odd : {1e300, kForever, std::numeric_limits<double>::max()}) {
    Watch watch(2);
    watch.excuse(1, odd);
    watch.ready(0, allreduce_of("x"));
    for (int day = 0; day < 300; ++day) {
      watch.pass(std::chrono::hours(24));
      check_eq(watch.report(), "");
    }
  }
});

// --- the end --------------------------------------------------------------------------------

const Case fatal("after the shutdown time the job ends, and says of what", [] {
  Watch watch(2, seconds(90));
  watch.ready(0, at(allreduce_of("allreduce.x"), "train.py:7"));
  watch.pass(seconds(60));
  check_contains(watch.report(), "rank 1 has not submitted allreduce.x");
  check(watch.due() == seconds(30));
  watch.ready(0, allreduce_of("young"));
  watch.pass(milliseconds(29'999));
  check_eq(watch.report(), "");
  check(watch.due() == milliseconds(1));
  watch.pass(milliseconds(1));
  const std::string end = watch.report();
  check_contains(end,
                 " | fatal: the job was stopped: it stalled for 90 s "
                 "(HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS)\n  rank 1 has not submitted allreduce.x "
                 "(train.py:7), for which rank 0 has waited for 90 s");
  check(end.find("young") == std::string::npos, "that is not to blame");
});

const Case fatal_excused("the shutdown time does not run while a rank is excused", [] {
  Watch watch(2, seconds(90));
  watch.ready(0, allreduce_of("x"));
  watch.excuse(1, 1000);
  watch.pass(seconds(1060));
  check_contains(watch.report(), "rank 1 has not submitted x");
  watch.pass(seconds(29));
  check_eq(watch.report(), "");
  watch.pass(seconds(1));
  check_contains(watch.report(), " | fatal: ");
});

const Case together("warning and end may be due at once", [] {
  Watch watch(2, seconds(60));
  watch.ready(0, allreduce_of("x"));
  watch.pass(seconds(61));
  const auto report = watch.inspect();
  check_contains(report.warning, "x");
  check_contains(report.fatal, "x");
});

// --- hints ----------------------------------------------------------------------------------

const Case other_kind("a tensor that is waited for by another kind is hinted at", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("allreduce.w"));
  watch.ready(1, desc_of(OpKind::kAllgather, "allgather.w"));
  watch.pass(seconds(60));
  const std::string text = watch.report();
  check_contains(text,
                 "R1 waits for allgather.w; is its allgather 'w' meant to be the allreduce 'w' of "
                 "the others? All ranks must call the same collective");
  check_contains(text, "R0 waits for allreduce.w; is its allreduce 'w' meant to be the allgather");
});

const Case other_length("so is a group of another length", [] {
  Watch watch(2);
  for (int i : {1, 2}) {
    const std::string name = "allreduce.g_" + std::to_string(i) + "of2";
    watch.ready(0, member_of("allreduce.g", 2, allreduce_of(name)));
  }
  for (int i : {1, 2, 3}) {
    const std::string name = "allreduce.g_" + std::to_string(i) + "of3";
    watch.ready(1, member_of("allreduce.g", 3, allreduce_of(name)));
  }
  watch.pass(seconds(60));
  check_contains(watch.report(),
                 "R1 waits for allreduce.g_1of3, allreduce.g_2of3, allreduce.g_3of3; is its "
                 "allreduce of 3 tensors 'g' meant to be the allreduce of 2 tensors 'g' of the "
                 "others? All ranks must call the same collective, with lists of the same length");
});

const Case no_hint("ranks that wait for other names get no hint", [] {
  Watch watch(2);
  watch.ready(0, allreduce_of("allreduce.a"));
  watch.ready(1, allreduce_of("allreduce.b"));
  watch.pass(seconds(60));
  check(watch.report().find("meant to be") == std::string::npos);
});

// --- sets, joined ranks, many ranks ---------------------------------------------------------

const Case of_joined("a joined rank is not missing, the others are", [] {
  Watch watch(3);
  watch.ready(1, join_of());
  watch.ready(0, allreduce_of("x"));
  watch.pass(seconds(60));
  const std::string text = watch.report();
  check_contains(text, "\n  rank 2 has not submitted x, for which rank 0 has waited");
  check(text.find("R1") == std::string::npos, text);
  check(text.find("R0") == std::string::npos, text);  // it waits itself
});

const Case of_a_join("a join waits for ranks that submit something, but not for idle ones", [] {
  Watch watch(3);
  watch.ready(1, join_of());
  for (int step = 0; step < 5; ++step) {  // ranks with more data
    watch.pass(seconds(50));
    watch.ready({0, 2}, allreduce_of("x"));
    check_eq(watch.report(), "");
  }
  watch.ready(2, join_of());
  watch.pass(seconds(50));
  check_eq(watch.report(), "");
  watch.pass(seconds(10));
  check_contains(watch.report(),
                 "\n  rank 0 has not submitted join, for which ranks 1, 2 have "
                 "waited for 310 s\n  R0 last submitted x, 60 s ago");
  watch.ready(0, join_of());
  check_eq(watch.report(), " | resolved: join");
  check(!watch.due());
});

const Case of_sets("a set's tensors miss its members only", [] {
  Watch watch(4);
  for (int rank : {0, 1, 2, 3}) watch.ready(rank, addition_of({1, 3}));
  watch.ready(3, in_set(1, allreduce_of("x")));
  watch.pass(seconds(60));
  const std::string text = watch.report();
  check_contains(
      text,
      "\n  rank 1 has not submitted x in process set 1, for which rank 3 has waited for 60 s");
  check(text.find("R0") == std::string::npos && text.find("R2") == std::string::npos, text);
});

const Case removed("a removed set's stall is over", [] {
  Watch watch(2);
  for (int rank : {0, 1}) watch.ready(rank, addition_of({0, 1}));
  watch.ready(0, in_set(1, allreduce_of("x")));
  watch.pass(seconds(60));
  watch.report();
  for (int rank : {0, 1}) watch.ready(rank, removal_of(1));
  check_eq(watch.report(), " | resolved: x");
  check(!watch.due());
});

const Case many("of many missing ranks, six are described", [] {
  Watch watch(12);
  watch.ready(3, allreduce_of("x"));
  watch.pass(seconds(60));
  const std::string text = watch.report();
  check_contains(text, "ranks 0-2, 4-11 have not submitted x");
  check_contains(text, "R6 has submitted nothing yet\n  and 5 more ranks");
});

const Case soak("random programs: deadlines lie ahead, stalls are told once", [] {
  for (int seed = 1; seed <= rounds(100); ++seed) {
    Random random(seed);
    const int size = 2 + random.below(3);
    Watch watch(size, random.one_in(2) ? seconds(0) : seconds(1'000'000));
    std::vector<std::string> told;
    for (int step = 0; step < 300; ++step) {
      // What all ranks will have submitted once is free again.
      const std::string name = "n" + std::to_string(random.below(4)) + ".";
      const int rank = random.below(size);
      bool again = false;
      for (const auto& waiting : watch.negotiator.waiting()) {
        for (const auto& [who, desc] : waiting.ready) {
          again |= who == rank && desc->name == name;
        }
      }
      if (!again) watch.ready(rank, allreduce_of(name));
      watch.negotiator.take_decisions();
      if (random.one_in(10)) watch.excuse(rank, random.below(200));
      watch.pass(milliseconds(random.below(30'000)));
      const auto report = watch.inspect();
      check_eq(report.fatal, "");
      for (size_t at = 0; at < told.size();) {
        const bool over = report.resolved.find(told[at]) != std::string::npos;
        at = over ? (told.erase(told.begin() + static_cast<long>(at)), at) : at + 1;
      }
      for (int i = 0; i < 4; ++i) {
        const std::string tensor = "n" + std::to_string(i) + ".";
        const auto first_lines =
            report.warning.substr(0, std::min(report.warning.size(), report.warning.find("\n  R")));
        if (first_lines.find(tensor) == std::string::npos) continue;
        check(std::find(told.begin(), told.end(), tensor) == told.end(),
              tensor + " was told twice, seed " + std::to_string(seed));
        told.push_back(tensor);
      }
    }
  }
});

}  // namespace
}  // namespace hvdtorch::test
