// The negotiator's process sets and joined ranks: whom a tensor waits for, what becomes of it when
// its set is removed or a rank has no more data, in any order of statements.
#include <algorithm>

#include "check.h"
#include "core/negotiator.h"
#include "negotiations.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

// All `size` ranks say so; the new set's id.
uint32_t add_set(Negotiator& negotiator, int size, const std::vector<int>& ranks) {
  for (int rank = 0; rank < size; ++rank) say(negotiator, rank, addition_of(ranks));
  const auto decisions = negotiator.take_decisions();
  check_eq(decisions.size(), 1u);
  check(!decisions[0].error);
  return static_cast<uint32_t>(decisions[0].agreed.at(0).numbers.at(0));
}

std::string only_error(Negotiator& negotiator) {
  const auto decisions = negotiator.take_decisions();
  check_eq(decisions.size(), 1u);
  check(decisions[0].error.has_value());
  return decisions[0].error->text;
}

// --- process sets ---------------------------------------------------------------------------

const Case sets("a set's tensors wait for its members only, and names are the set's own", [] {
  Negotiator negotiator(4);
  const uint32_t left = add_set(negotiator, 4, {0, 2}), right = add_set(negotiator, 4, {1, 2, 3});
  check_eq(left, 1u);
  check_eq(right, 2u);
  check_eq(negotiator.members(right), std::vector<int>{1, 2, 3});
  for (uint32_t set : {0u, left, right}) say(negotiator, 2, in_set(set, allreduce_of("x")));
  check_eq(outcome(negotiator), "");
  say(negotiator, 0, in_set(left, allreduce_of("x")));
  auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "x");
  check_eq(decisions[0].agreed[0].desc->process_set, left);
  check_eq(decisions[0].agreed[0].absent, std::vector<int>{});
  for (int rank : {3, 1}) say(negotiator, rank, in_set(right, allreduce_of("x")));
  decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "x");
  check_eq(decisions[0].agreed[0].desc->process_set, right);
  check_eq(negotiator.waiting().size(), 1u);
  check_eq(negotiator.waiting()[0].missing, std::vector<int>{0, 1, 3});
});

const Case errors_in_sets("an error in a set is for its members, and names global ranks", [] {
  Negotiator negotiator(4);
  const uint32_t set = add_set(negotiator, 4, {1, 3});
  say(negotiator, 1, in_set(set, allreduce_of("x")));
  say(negotiator, 3, in_set(set, allreduce_of("x", {9})));
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "error x");
  check_eq(decisions[0].error->process_set, set);
  check_contains(decisions[0].error->text, "shape: rank 1: [4], rank 3: [9]");
});

const Case disagreement_on_sets("ranks that change sets differently are told", [] {
  Negotiator negotiator(3);
  for (int rank : {0, 2}) say(negotiator, rank, addition_of({0, 1}));
  say(negotiator, 1, addition_of({0, 1, 2}));
  check_contains(only_error(negotiator),
                 "process_sets: the ranks disagree on process set: "
                 "ranks 0, 2: ranks [0, 1], rank 1: ranks "
                 "[0, 1, 2]. All ranks must add and remove");
  const uint32_t set = add_set(negotiator, 3, {0, 1});
  check_eq(set, 1u);
  for (int rank : {0, 1}) say(negotiator, rank, removal_of(set));
  say(negotiator, 2, removal_of(set + 1));
  check_contains(only_error(negotiator),
                 "process set: ranks 0, 1: number 1, rank 2: "
                 "number 2");
  say(negotiator, 0, addition_of({2}));
  for (int rank : {1, 2}) say(negotiator, rank, removal_of(set));
  check_contains(only_error(negotiator),
                 "operation: rank 0: add_process_set, ranks 1, 2: "
                 "remove_process_set");
  say(negotiator, 0, in_set(set, allreduce_of("x")));
  say(negotiator, 1, in_set(set, allreduce_of("x")));
  check_eq(outcome(negotiator), "x", "the set is still there");
});

const Case fresh_ids("ids are not used again, nor those that were nearly used", [] {
  Negotiator negotiator(2);
  const auto remove = [&](uint32_t set) {
    for (int rank : {1, 0}) say(negotiator, rank, removal_of(set));
    return outcome(negotiator);
  };
  check_eq(add_set(negotiator, 2, {0}), 1u);
  check_eq(add_set(negotiator, 2, {0}), 2u);
  check_eq(remove(2), "process_sets");
  check_eq(add_set(negotiator, 2, {0}), 3u);
  check_eq(remove(1), "process_sets");
  check_eq(remove(3), "process_sets");
  check_eq(add_set(negotiator, 2, {1}), 4u);
  for (int rank : {1, 0}) say(negotiator, rank, removal_of(3));
  check_contains(only_error(negotiator), "process_sets: there is no process set 3");
});

const Case removal("what a removed set has pending fails, each name once, after the removal", [] {
  Negotiator negotiator(3);
  const uint32_t set = add_set(negotiator, 3, {0, 1});
  const auto member = [&](const char* name) {
    return in_set(set, member_of("g", 3, allreduce_of(name)));
  };
  // A group: one member complete, one half, one not yet there.
  for (int rank : {0, 1}) say(negotiator, rank, member("g1"));
  say(negotiator, 0, member("g2"));
  say(negotiator, 1, in_set(set, allreduce_of("alone")));
  say(negotiator, 2, allreduce_of("global"));
  for (int rank : {0, 1, 2}) {
    check_eq(outcome(negotiator), "");
    say(negotiator, rank, removal_of(set));
  }
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "process_sets | error alone g1 g2");
  check_eq(decisions[1].error->process_set, set);
  check_contains(decisions[1].error->text, "alone: process set 1 was removed before all its ranks");
  check_eq(negotiator.waiting().size(), 1u, "the other sets' tensors wait on");
  check_eq(negotiator.members(set), std::vector<int>{0, 1}, "for whom errors are");
});

const Case crossing("a statement that crosses the removal of its set is answered by an error", [] {
  Negotiator negotiator(2);
  const uint32_t set = add_set(negotiator, 2, {0, 1});
  for (int rank : {0, 1}) say(negotiator, rank, removal_of(set));
  check_eq(outcome(negotiator), "process_sets");
  for (int rank : {1, 0}) {
    say(negotiator, rank, in_set(set, allreduce_of("x")));
    const auto decisions = negotiator.take_decisions();
    check_eq(outcome(decisions), "error x");
    check_eq(decisions[0].error->process_set, set);
    check_eq(decisions[0].error->text, "x: process set 1 was removed");
  }
  check(negotiator.waiting().empty() && !negotiator.waiting_since());
  // Its old members are still the only ones who may speak of it.
  const uint32_t other = add_set(negotiator, 2, {0});
  for (int rank : {0, 1}) say(negotiator, rank, removal_of(other));
  outcome(negotiator);
  check_throws<DecodeError>([&] { say(negotiator, 1, in_set(other, allreduce_of("x"))); });
});

const Case bad_changes("changes of process sets that no rank makes are refused", [] {
  const auto refused = [](Ready ready, const std::string& text) {
    Negotiator negotiator(3);
    check_contains(check_throws<DecodeError>([&] { say(negotiator, 1, std::move(ready)); }), text);
    check(negotiator.waiting().empty());
  };
  for (const std::vector<int>& ranks :
       std::vector<std::vector<int>>{{}, {1, 1}, {2, 1}, {-1, 2}, {0, 3}}) {
    refused(addition_of(ranks), "rank 1 wants to add a process set of impossible ranks");
  }
  refused({addition_of({0}).desc, std::nullopt}, "impossible ranks");
  refused({addition_of({0, 1}).desc, std::string(8, '\0')}, "wrong length");
  for (int64_t id : {int64_t{0}, int64_t{-1}, (int64_t{1} << 32) + 1}) {
    refused(removal_of(id), "rank 1 wants to remove an impossible process set");
  }
  refused({removal_of(1).desc, std::nullopt}, "impossible process set");
  Negotiator negotiator(3);
  const uint32_t set = add_set(negotiator, 3, {0, 1});
  for (Ready ready : {addition_of({0}), removal_of(1), join_of()}) {
    ready.desc = share(in_set(set, *ready.desc));
    check_contains(check_throws<DecodeError>([&] { say(negotiator, 1, ready); }),
                   "elsewhere than in the global set");
    ready.desc = share(member_of("g", 2, in_set(0, *ready.desc)));
    check_throws<DecodeError>([&] { say(negotiator, 1, ready); });
  }
  check_contains(
      check_throws<DecodeError>([&] { say(negotiator, 1, {join_of().desc, std::string()}); }),
      "rank 1 sent a payload with a join");
  for (int rank : {0, 1, 2}) say(negotiator, rank, removal_of(7));
  check_contains(only_error(negotiator), "there is no process set 7");
  say(negotiator, 0, in_set(set, allreduce_of("x")));
  check_throws<DecodeError>([&] { say(negotiator, 2, in_set(set, allreduce_of("x"))); });
});

// --- join -----------------------------------------------------------------------------------

const Case last_to_join("a join is complete when all have joined, and tells who was last", [] {
  std::vector<int> order = {0, 1, 2};
  Negotiator negotiator(3);
  do {
    for (int rank : order) {
      check_eq(outcome(negotiator), "");
      say(negotiator, rank, join_of());
      check(negotiator.joined(rank) != (rank == order.back()));
    }
    const auto decisions = negotiator.take_decisions();
    check_eq(outcome(decisions), "join");
    check_eq(decisions[0].agreed[0].numbers, std::vector<int64_t>{order.back()});
    check_eq(decisions[0].agreed[0].absent, std::vector<int>{});
    for (int rank : order) check(!negotiator.joined(rank));
  } while (std::next_permutation(order.begin(), order.end()));
  say(negotiator, 1, join_of());
  check_contains(check_throws<DecodeError>([&] { say(negotiator, 1, join_of()); }),
                 "rank 1 joined twice");
});

const Case completed_by_join("a join completes what waited for that rank alone, oldest first", [] {
  Negotiator negotiator(3);
  say(negotiator, 2, desc_of(OpKind::kAllgather, "b", {5}));
  say(negotiator, 2, allreduce_of("mine"));
  say(negotiator, 0, allreduce_of("a"));
  say(negotiator, 0, desc_of(OpKind::kAllgather, "b", {3}));
  say(negotiator, 2, allreduce_of("a"));
  check_eq(outcome(negotiator), "");
  say(negotiator, 1, join_of());
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "b | a");
  check_eq(decisions[0].agreed[0].absent, std::vector<int>{1});
  check_eq(decisions[0].agreed[0].numbers, std::vector<int64_t>{3, 0, 5}, "no rows of the absent");
  check_eq(decisions[1].agreed[0].absent, std::vector<int>{1});
  check_eq(negotiator.waiting().size(), 2u, "the tensor, and the join");
  check_eq(negotiator.waiting()[0].missing, std::vector<int>{0}, "who joined is not missing");
  check_eq(negotiator.waiting()[1].missing, std::vector<int>{0, 2});
  say(negotiator, 0, join_of());
  check_eq(outcome(negotiator), "mine");
});

const Case keeps_part("what a rank submitted before it joined it takes part in", [] {
  Negotiator negotiator(3);
  say(negotiator, 1, allreduce_of("x", {1}), "1111");
  say(negotiator, 1, join_of());
  say(negotiator, 2, allreduce_of("x", {1}), "2222");
  check_eq(outcome(negotiator), "");
  say(negotiator, 0, allreduce_of("x", {1}), "0000");
  auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "x");
  check_eq(decisions[0].agreed[0].absent, std::vector<int>{});
  check_eq(decisions[0].agreed[0].payloads, std::vector<std::string>{"0000", "1111", "2222"});
  // The next one it does not; payloads count although one rank has none.
  say(negotiator, 2, allreduce_of("x", {1}), "2222");
  say(negotiator, 0, allreduce_of("x", {1}), "0000");
  decisions = negotiator.take_decisions();
  check_eq(decisions[0].agreed[0].absent, std::vector<int>{1});
  check_eq(decisions[0].agreed[0].payloads, std::vector<std::string>{"0000", "", "2222"});
  // One that another thread of it submits it takes part in as well.
  for (int rank : {1, 0, 2}) say(negotiator, rank, allreduce_of("y"));
  check_eq(negotiator.take_decisions()[0].agreed[0].absent, std::vector<int>{});
});

const Case joined_in_sets("a joined rank is absent in all its sets, by its rank in each", [] {
  Negotiator negotiator(4);
  const uint32_t set = add_set(negotiator, 4, {1, 3}), others = add_set(negotiator, 4, {0, 1, 2});
  say(negotiator, 3, join_of());
  say(negotiator, 1, in_set(set, allreduce_of("x")));
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "x");
  check_eq(decisions[0].agreed[0].absent, std::vector<int>{1});
  for (int rank : {0, 1}) say(negotiator, rank, in_set(others, allreduce_of("x")));
  check_eq(outcome(negotiator), "", "the set has no joined rank");
  // All the others join: it completes for the two that have submitted it, then all are back.
  for (int rank : {0, 1}) say(negotiator, rank, join_of());
  check_eq(outcome(negotiator), "");
  say(negotiator, 2, join_of());
  const auto last = negotiator.take_decisions();
  check_eq(outcome(last), "x | join");
  check_eq(last[0].agreed[0].absent, std::vector<int>{2});
});

const Case joined_root("a broadcast from a joined root is an error for the others", [] {
  Negotiator negotiator(3);
  OpDesc d = desc_of(OpKind::kBroadcast, "b");
  d.root = 1;
  say(negotiator, 0, d);
  say(negotiator, 1, join_of());
  say(negotiator, 2, d);
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "error b");
  check_contains(decisions[0].error->text, "b: the root, rank 1, has joined");
  check_eq(decisions[0].error->absent, std::vector<int>{1});
  d.root = 2;
  for (int rank : {0, 2}) say(negotiator, rank, d, rank == 2 ? "0123456789abcdef" : "");
  const auto fine = negotiator.take_decisions();
  check_eq(outcome(fine), "b");
  check_eq(fine[0].agreed[0].payloads.at(2), "0123456789abcdef");
});

const Case joined_and_sets("process sets change only while nobody has joined", [] {
  for (const bool joins_first : {true, false}) {
    Negotiator negotiator(3);
    const uint32_t set = add_set(negotiator, 3, {0, 1});
    for (const Ready& change : {addition_of({1, 2}), removal_of(set)}) {
      if (joins_first) say(negotiator, 1, join_of());
      for (int rank : {0, 2}) say(negotiator, rank, change);
      if (!joins_first) say(negotiator, 1, join_of());
      const auto decisions = negotiator.take_decisions();
      check_eq(outcome(decisions), "error process_sets");
      check_contains(decisions[0].error->text,
                     "process_sets: all ranks must take part, but rank 1 has joined");
      check_eq(decisions[0].error->absent, std::vector<int>{1});
      for (int rank : {0, 2}) say(negotiator, rank, join_of());
      check_eq(outcome(negotiator), "join");
    }
    check_eq(add_set(negotiator, 3, {0}), set + 1);
    say(negotiator, 0, in_set(set, allreduce_of("x")));
    say(negotiator, 1, in_set(set, allreduce_of("x")));
    check_eq(outcome(negotiator), "x");
  }
});

const Case joined_groups("a group that a join completes is one decision; one error fails it", [] {
  const auto member = [](const char* name) { return member_of("g", 2, allreduce_of(name)); };
  Negotiator negotiator(3);
  for (int rank : {0, 2}) {
    for (const char* name : {"g1", "g2"}) say(negotiator, rank, member(name));
  }
  say(negotiator, 1, join_of());
  const auto decisions = negotiator.take_decisions();
  check_eq(outcome(decisions), "g1 g2");
  for (const auto& agreement : decisions[0].agreed) {
    check_eq(agreement.absent, std::vector<int>{1});
  }
  for (int rank : {0, 2}) {
    say(negotiator, rank, member("g1"));
    OpDesc d = member("g2");
    if (rank == 2) d.dtype = DataType::kInt8;
    say(negotiator, rank, d);
  }
  const auto failed = negotiator.take_decisions();
  check_eq(outcome(failed), "error g1 g2");
  check_contains(failed[0].error->text, "dtype: rank 0: float32, rank 2: int8");
  check_eq(failed[0].error->absent, std::vector<int>{1});
});

const Case join_soak("random rounds: each tensor is decided once, by those who submit it", [] {
  for (int seed = 1; seed <= rounds(300); ++seed) {
    Random random(seed);
    const int size = 1 + random.below(5);
    Negotiator negotiator(size);
    std::vector<uint32_t> sets = {0};
    for (int n = random.below(3); n > 0; --n) {
      std::vector<int> ranks;
      for (int rank = 0; rank < size; ++rank) {
        if (random.one_in(2)) ranks.push_back(rank);
      }
      if (!ranks.empty()) sets.push_back(add_set(negotiator, size, ranks));
    }
    for (int epoch = 0; epoch < 4; ++epoch) {
      // Rank r submits the first data[r] tensors, in order, and then joins.
      std::vector<OpDesc> tensors;
      for (int n = random.below(6); n > 0; --n) {
        const uint32_t set = sets[random.below(static_cast<int>(sets.size()))];
        tensors.push_back(in_set(set, allreduce_of("t" + std::to_string(tensors.size()))));
      }
      std::vector<int> data(size), said(size), turns;
      for (int rank = 0; rank < size; ++rank) {
        data[rank] = random.below(static_cast<int>(tensors.size()) + 1);
        for (int turn = 0; turn <= data[rank]; ++turn) turns.push_back(rank);
      }
      std::shuffle(turns.begin(), turns.end(), random.engine());
      for (int rank : turns) {
        if (said[rank] == data[rank]) {
          say(negotiator, rank, join_of());
          continue;
        }
        const OpDesc& d = tensors[said[rank]++];
        const auto& members = negotiator.members(d.process_set);
        if (std::count(members.begin(), members.end(), rank) > 0) say(negotiator, rank, d);
      }
      std::map<std::string, std::vector<int>> absent;
      const auto decisions = negotiator.take_decisions();
      for (const auto& decision : decisions) {
        check(!decision.error);
        const auto& agreement = decision.agreed.at(0);
        check(absent.emplace(agreement.desc->name, agreement.absent).second, "decided twice");
      }
      check_eq(decisions.back().agreed[0].desc->name, "join");
      check_eq(decisions.back().agreed[0].numbers, std::vector<int64_t>{turns.back()});
      size_t expected = 1;
      for (int t = 0; t < static_cast<int>(tensors.size()); ++t) {
        std::vector<int> without;
        const auto& members = negotiator.members(tensors[t].process_set);
        for (size_t i = 0; i < members.size(); ++i) {
          if (data[members[i]] <= t) without.push_back(static_cast<int>(i));
        }
        if (without.size() == members.size()) continue;
        ++expected;
        check_eq(absent.at(tensors[t].name), without, "seed " + std::to_string(seed));
      }
      check_eq(absent.size(), expected);
      check(negotiator.waiting().empty());
    }
  }
});

}  // namespace
}  // namespace hvdtorch::test
