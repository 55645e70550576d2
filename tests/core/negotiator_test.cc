// The negotiator with simulated ranks: agreement in any order of statements, errors that say who
// said what, groups, and statements that no rank of good manners makes.
#include "core/negotiator.h"

#include <algorithm>
#include <limits>

#include "check.h"
#include "negotiations.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

std::string error_text(Negotiator& negotiator) {
  for (const auto& decision : negotiator.take_decisions()) {
    if (decision.error) return decision.error->text;
  }
  fail("no error was decided");
}

const Case rank_lists("lists of ranks are compact", [] {
  check_eq(rank_list({3}), "rank 3");
  check_eq(rank_list({0, 1}), "ranks 0, 1");
  check_eq(rank_list({0, 2, 3, 4, 5, 6, 7}), "ranks 0, 2-7");
  check_eq(rank_list({1, 2, 5, 8, 9, 10}), "ranks 1, 2, 5, 8-10");
});

const Case alone("one rank agrees with itself", [] {
  Negotiator negotiator(1);
  say(negotiator, 0, allreduce_of("x"));
  check_eq(outcome(negotiator), "x");
});

const Case late("nothing is decided before the last rank is ready", [] {
  Negotiator negotiator(3);
  for (int rank : {2, 0}) {
    say(negotiator, rank, allreduce_of("x"));
    check_eq(outcome(negotiator), "");
  }
  say(negotiator, 1, allreduce_of("x"));
  check_eq(outcome(negotiator), "x");
  check_eq(outcome(negotiator), "", "a decision is taken once");
});

const Case random_orders("any order on any rank: each tensor is agreed on once, every round", [] {
  for (int size : {1, 2, 3, 8}) {
    Random random(100 + size);
    Negotiator negotiator(size);
    for (int round = 0; round < rounds(1000); ++round) {
      // The same names every round: they are free again once decided.
      std::vector<std::pair<int, int>> statements;
      const int tensors = 1 + random.below(8);
      for (int t = 0; t < tensors; ++t) {
        for (int rank = 0; rank < size; ++rank) statements.emplace_back(rank, t);
      }
      std::shuffle(statements.begin(), statements.end(), random.engine());
      std::vector<int> times(tensors, 0), last(tensors, -1), expected;
      for (size_t i = 0; i < statements.size(); ++i)
        last[statements[i].second] = static_cast<int>(i);
      std::string order;
      for (size_t i = 0; i < statements.size(); ++i) {
        const auto [rank, t] = statements[i];
        const std::string name = "t" + std::to_string(t);
        say(negotiator, rank, allreduce_of(name, {t + 1}));
        if (last[t] == static_cast<int>(i)) order += (order.empty() ? "" : " | ") + name;
      }
      check_eq(outcome(negotiator), order, "seed " + std::to_string(100 + size));
      check(negotiator.waiting().empty());
    }
  }
});

const Case rows("an allgather's rows are each rank's first dimension", [] {
  Negotiator negotiator(3);
  say(negotiator, 1, desc_of(OpKind::kAllgather, "x", {0, 2}));
  say(negotiator, 2, desc_of(OpKind::kAllgather, "x", {5, 2}));
  say(negotiator, 0, desc_of(OpKind::kAllgather, "x", {3, 2}));
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "x");
  check_eq(decisions[0].agreed[0].numbers, std::vector<int64_t>{3, 0, 5});
  for (int rank : {0, 1, 2}) say(negotiator, rank, desc_of(OpKind::kAllgather, "scalar", {}));
  check_eq(negotiator.take_decisions()[0].agreed[0].numbers, std::vector<int64_t>{1, 1, 1});
});

const Case payloads("payloads are kept by rank, and dropped if one is missing", [] {
  Negotiator negotiator(2);
  say(negotiator, 1, allreduce_of("x", {1}), "1111");
  say(negotiator, 0, allreduce_of("x", {1}), "0000");
  check_eq(negotiator.take_decisions()[0].agreed[0].payloads,
           std::vector<std::string>{"0000", "1111"});
  say(negotiator, 1, allreduce_of("x", {1}), "1111");
  say(negotiator, 0, allreduce_of("x", {1}));
  check(negotiator.take_decisions()[0].agreed[0].payloads.empty());

  OpDesc d = desc_of(OpKind::kBroadcast, "b", {1});
  d.root = 1;
  say(negotiator, 0, d, "");
  say(negotiator, 1, d, "root");
  check_eq(negotiator.take_decisions()[0].agreed[0].payloads, std::vector<std::string>{"", "root"});
  say(negotiator, 0, d, "");
  say(negotiator, 1, d);
  check(negotiator.take_decisions()[0].agreed[0].payloads.empty());
});

// Rank 1 of 3 differs by `change`; the text must name the field and say rank -> value, site.
void check_mismatch(OpDesc d, const std::function<void(OpDesc&)>& change, const std::string& what,
                    const std::string& usual, const std::string& odd) {
  Negotiator negotiator(3);
  d.site = "train.py:7";
  OpDesc other = d;
  change(other);
  other.site = "train.py:9";
  say(negotiator, 2, d);
  say(negotiator, 1, other);
  say(negotiator, 0, d);
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "error x");
  check_eq(decisions[0].error->process_set, 0u);
  check_contains(decisions[0].error->text,
                 "x: the ranks disagree on " + what + ": ranks 0, 2: " + usual +
                     " (train.py:7), rank 1: " + odd + " (train.py:9). All ranks must ");
  // The job goes on, and the name is free.
  for (int rank : {1, 0, 2}) say(negotiator, rank, d);
  check_eq(outcome(negotiator), "x");
}

const Case mismatches("a mismatch of any field is an error that says who said what, where", [] {
  const OpDesc sum = allreduce_of("x", {2, 3});
  check_mismatch(
      sum, [](OpDesc& d) { d.dtype = DataType::kFloat64; }, "dtype", "float32", "float64");
  check_mismatch(sum, [](OpDesc& d) { d.shape = {3, 2}; }, "shape", "[2, 3]", "[3, 2]");
  check_mismatch(sum, [](OpDesc& d) { d.shape = {}; }, "shape", "[2, 3]", "[]");
  check_mismatch(sum, [](OpDesc& d) { d.op = ReduceOp::kAverage; }, "reduce op", "Sum", "Average");
  check_mismatch(sum, [](OpDesc& d) { d.prescale = 0.5; }, "prescale_factor", "1", "0.5");
  check_mismatch(sum, [](OpDesc& d) { d.postscale = 0.25; }, "postscale_factor", "1", "0.25");
  check_mismatch(sum, [](OpDesc& d) { d.device = {DeviceKind::kCuda, 1}; }, "device", "CPU", "GPU");
  check_mismatch(sum, [](OpDesc& d) { d = member_of("g", 1, d); }, "group", "none", "g of 1");
  check_mismatch(
      desc_of(OpKind::kBroadcast, "x"), [](OpDesc& d) { d.root = 2; }, "root rank", "0", "2");
  for (OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    check_mismatch(
        desc_of(kind, "x", {2, 3}), [](OpDesc& d) { d.shape = {2, 4}; }, "shape", "[*, 3]",
        "[*, 4]");
    check_mismatch(
        desc_of(kind, "x", {2}), [](OpDesc& d) { d.shape = {2, 1}; }, "shape", "[*]", "[*, 1]");
  }
  check_mismatch(
      desc_of(OpKind::kAllgather, "x", {2}), [](OpDesc& d) { d.shape = {}; }, "shape", "[*]", "[]");
  check_mismatch(
      desc_of(OpKind::kReducescatter, "x", {4}), [](OpDesc& d) { d.shape = {5}; }, "shape", "[4]",
      "[5]");
});

const Case many_ranks("ranks are grouped by what they say, and two fields may differ", [] {
  Negotiator negotiator(8);
  for (int rank = 0; rank < 8; ++rank) {
    OpDesc d = allreduce_of("x");
    if (rank == 1) {
      d.dtype = DataType::kInt32;
      d.op = ReduceOp::kMax;
    }
    say(negotiator, rank, d);
  }
  const std::string text = error_text(negotiator);
  check_contains(text,
                 "dtype: ranks 0, 2-7: float32, rank 1: int32; and on reduce op: "
                 "ranks 0, 2-7: Sum, rank 1: Max. All ranks");
});

const Case no_meaning("what has no meaning for a kind is not compared", [] {
  Negotiator negotiator(2);
  OpDesc d = desc_of(OpKind::kAllgather, "x", {1});
  say(negotiator, 0, d);
  d.op = ReduceOp::kMax;
  d.prescale = 2;
  d.root = 1;
  d.shape = {9};
  say(negotiator, 1, d);
  check_eq(outcome(negotiator), "x");
  // GPU 0 and GPU 1 are one kind of device.
  d = allreduce_of("y");
  d.device = {DeviceKind::kCuda, 0};
  say(negotiator, 0, d);
  d.device.index = 1;
  say(negotiator, 1, d);
  check_eq(outcome(negotiator), "y");
});

const Case not_a_number("a factor of NaN on all ranks is no disagreement", [] {
  Negotiator negotiator(2);
  OpDesc d = allreduce_of("x");
  d.prescale = std::numeric_limits<double>::quiet_NaN();
  for (int rank : {0, 1}) say(negotiator, rank, d);
  check_eq(outcome(negotiator), "x");
});

// --- groups ---------------------------------------------------------------------------------

OpDesc member(const std::string& name, int size = 2, const std::string& group = "g") {
  return member_of(group, size, allreduce_of(name));
}

const Case groups("a group is agreed on as a whole, in the order its members were completed", [] {
  Negotiator negotiator(2);
  for (const char* name : {"g1", "g2", "g3"}) say(negotiator, 0, member(name, 3));
  say(negotiator, 1, member("g3", 3));
  say(negotiator, 1, allreduce_of("alone"));
  say(negotiator, 0, allreduce_of("alone"));
  say(negotiator, 1, member("g1", 3));
  check_eq(outcome(negotiator), "alone");
  say(negotiator, 1, member("g2", 3));
  check_eq(outcome(negotiator), "g3 g1 g2");
});

const Case group_mismatch("one mismatching member fails its whole group", [] {
  for (const char* odd : {"g1", "g2"}) {
    Negotiator negotiator(2);
    for (int rank : {0, 1}) {
      for (const char* name : {"g1", "g2"}) {
        OpDesc d = member(name);
        if (rank == 1 && std::string(name) == odd) d.dtype = DataType::kInt8;
        say(negotiator, rank, d);
      }
    }
    const auto decisions = negotiator.take_decisions();
    check_eq(outcome(decisions), "error g1 g2");
    check_contains(decisions[0].error->text, std::string(odd) + ": the ranks disagree on dtype");
    for (int rank : {0, 1}) {
      for (const char* name : {"g1", "g2"}) say(negotiator, rank, member(name));
    }
    check_eq(outcome(negotiator), "g1 g2", "the group's names are free again");
  }
});

// Every name is decided (as an error) once: nobody is left waiting.
void check_all_fail(const std::vector<std::vector<OpDesc>>& by_rank, std::vector<std::string> names,
                    const std::string& text) {
  Negotiator negotiator(static_cast<int>(by_rank.size()));
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& d : by_rank[rank]) say(negotiator, static_cast<int>(rank), d);
  }
  std::vector<std::string> failed;
  for (const auto& decision : negotiator.take_decisions()) {
    check(decision.error.has_value(), "something was agreed on");
    check_contains(decision.error->text, text);
    failed.insert(failed.end(), decision.error->names.begin(), decision.error->names.end());
  }
  std::sort(failed.begin(), failed.end());
  check_eq(failed, names);
  check(negotiator.waiting().empty());
}

const Case group_of_some("ranks that group differently are told, whatever they meant", [] {
  const OpDesc a = allreduce_of("a"), b = allreduce_of("b");
  check_all_fail({{member("a"), member("b")}, {a, member("b")}}, {"a", "b"},
                 "a: the ranks disagree on group: rank 0: g of 2, rank 1: none");
  check_all_fail({{a, member("b", 1)}, {member("a"), member("b")}}, {"a", "b"},
                 "the ranks disagree on group");
  check_all_fail({{member("a"), member("b")}, {member("a", 2, "h"), member("b", 2, "h")}},
                 {"a", "b"}, "the ranks disagree on group: rank 0: g of 2, rank 1: h of 2");
  // The counts differ: whoever comes first.
  check_all_fail({{member("a", 2), member("b", 2)}, {member("a", 3), member("b", 3)}}, {"a", "b"},
                 "a: the ranks disagree on group: rank 0: g of 2, rank 1: g of 3");
  check_all_fail({{member("a", 3), member("b", 3)}, {member("a", 2), member("b", 2)}}, {"a", "b"},
                 "a: the ranks disagree on group: rank 0: g of 3, rank 1: g of 2");
});

const Case group_soak("groups and single tensors in random orders, some of them wrong", [] {
  for (int seed = 1; seed <= rounds(200); ++seed) {
    Random random(seed);
    const int size = 2 + random.below(3);
    Negotiator negotiator(size);
    for (int round = 0; round < 5; ++round) {
      const int tensors = 1 + random.below(6);
      const int grouped = random.below(tensors + 1);
      const int odd_rank = random.one_in(2) ? random.below(size) : -1;
      const int odd_tensor = random.below(tensors);
      std::vector<std::pair<int, int>> statements;
      for (int t = 0; t < tensors; ++t) {
        for (int rank = 0; rank < size; ++rank) statements.emplace_back(rank, t);
      }
      std::shuffle(statements.begin(), statements.end(), random.engine());
      for (const auto& [rank, t] : statements) {
        OpDesc d = allreduce_of("t" + std::to_string(t));
        if (t < grouped) d = member_of("group", grouped, d);
        if (rank == odd_rank && t == odd_tensor) d.shape = {99};
        say(negotiator, rank, d);
      }
      const bool group_fails = odd_rank >= 0 && odd_tensor < grouped;
      std::vector<int> times(tensors, 0);
      for (const auto& decision : negotiator.take_decisions()) {
        for (const auto& agreement : decision.agreed) {
          const int t = std::stoi(agreement.desc->name.substr(1));
          ++times[t];
          check(!(odd_rank >= 0 && (t == odd_tensor || (t < grouped && group_fails))));
          if (t < grouped) check_eq(static_cast<int>(decision.agreed.size()), grouped);
        }
        for (const auto& name :
             decision.error ? decision.error->names : std::vector<std::string>{}) {
          const int t = std::stoi(name.substr(1));
          ++times[t];
          check(odd_rank >= 0 && (t == odd_tensor || (t < grouped && group_fails)));
        }
      }
      check_eq(times, std::vector<int>(tensors, 1), "seed " + std::to_string(seed));
    }
  }
});

// --- statements no rank makes, and reports --------------------------------------------------

void check_refused(int rank, const OpDesc& d, std::optional<std::string> payload,
                   const std::string& text) {
  Negotiator negotiator(2);
  check_contains(check_throws<DecodeError>([&] { say(negotiator, rank, d, payload); }), text);
  check(negotiator.waiting().empty());
  check_eq(outcome(negotiator), "");
}

const Case violations("statements that make no sense are refused", [] {
  OpDesc d = allreduce_of("x");
  d.process_set = 7;
  check_refused(0, d, std::nullopt, "rank 0 named process set 7, which does not exist");
  check_refused(2, allreduce_of("x"), std::nullopt, "rank 2 is not a member");
  check_refused(-1, allreduce_of("x"), std::nullopt, "rank -1 is not a member");
  for (int root : {2, -1}) {
    d = desc_of(OpKind::kBroadcast, "x");
    d.root = root;
    check_refused(1, d, std::nullopt, "rank 1 named a root outside");
  }
  check_refused(1, allreduce_of("x", {1}), "12345", "rank 1 sent a payload of the wrong length");
  for (OpKind kind : {OpKind::kAlltoall, OpKind::kReducescatter}) {
    check_refused(1, desc_of(kind, "x", {1}), "1234", "rank 1 sent a payload");
  }
  d = allreduce_of("x", {1}, DataType::kBool);
  d.op = ReduceOp::kAverage;
  check_refused(1, d, "1", "rank 1 wants to reduce what cannot be reduced: Average of bool");
  Negotiator negotiator(2);
  say(negotiator, 1, allreduce_of("x"));
  check_contains(check_throws<DecodeError>([&] { say(negotiator, 1, allreduce_of("x")); }),
                 "rank 1 submitted x twice");
});

const Case reports("waiting() says who is ready and who is missing", [] {
  Negotiator negotiator(4);
  for (int rank : {3, 1}) say(negotiator, rank, allreduce_of("w"));
  const auto waiting = negotiator.waiting();
  check_eq(waiting.size(), 1u);
  check_eq(waiting[0].ready.size(), 2u);
  for (size_t i : {0, 1}) {
    check_eq(waiting[0].ready[i].first, i == 0 ? 1 : 3);
    check_eq(waiting[0].ready[i].second->name, "w");
  }
  check_eq(waiting[0].missing, std::vector<int>{0, 2});
  check(negotiator.is_waiting(waiting[0].id) && !negotiator.is_waiting(waiting[0].id + 1));
});

const Case ages("waiting() is oldest first and says since when, for each use of a name", [] {
  Negotiator negotiator(2);
  const Negotiator::Clock::time_point start{std::chrono::hours(1)};
  const auto at = [&](int seconds) { return start + std::chrono::seconds(seconds); };
  const auto ready = [&](int rank, const char* name, int seconds) {
    negotiator.on_ready(rank, {share(allreduce_of(name)), std::nullopt}, at(seconds));
  };
  check(!negotiator.waiting_since());
  ready(1, "b", 1);
  ready(0, "a", 2);
  ready(1, "c", 3);
  check(negotiator.waiting_since() == at(1));
  const auto first = negotiator.waiting();
  check_eq(first.size(), 3u);
  check(first[0].since == at(1) && first[1].since == at(2) && first[2].since == at(3));
  ready(0, "b", 4);
  check(negotiator.waiting_since() == at(2));
  ready(0, "b", 5);
  check(negotiator.waiting().back().since == at(5));
  check(negotiator.waiting().back().id != first[0].id, "another use of the name");
});

}  // namespace
}  // namespace hvdtorch::test
