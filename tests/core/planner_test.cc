// Fusion: what shares a launch, in which order, where it lies in the buffer; and results that are
// computed at the coordinator because every rank sent its payload.
#include "core/planner.h"

#include <cstring>

#include "check.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

constexpr int64_t kFloat = 4;

Planner::Options up_to(int64_t threshold) { return {.fusion_threshold = threshold}; }

void add(Planner& planner, const OpDesc& d, std::vector<int> absent = {}) {
  Decision decision;
  decision.agreed.push_back({share(d), std::move(absent), {}, {}});
  check(!planner.add(std::move(decision)), "a tensor without payloads is queued");
}

// "a b | c": names by launch.
std::string names(const std::vector<Launch>& launches) {
  std::string text;
  for (const auto& launch : launches) {
    check(!launch.inlined);
    text += text.empty() ? "" : " |";
    for (const auto& item : launch.items) text += (text.empty() ? "" : " ") + item.desc->name;
  }
  return text;
}

// The launches of these tensors, queued in this order.
std::string planned(const Planner::Options& options, const std::vector<OpDesc>& descs) {
  Planner planner(4, options);
  for (const auto& d : descs) add(planner, d);
  return names(planner.plan());
}

std::string planned(int64_t threshold, const std::vector<OpDesc>& descs) {
  return planned(up_to(threshold), descs);
}

OpDesc with(OpDesc d, const std::function<void(OpDesc&)>& change) {
  change(d);
  return d;
}

const Case threshold("tensors share a launch up to the threshold, inclusive", [] {
  const OpDesc a = allreduce_of("a", {10}), b = allreduce_of("b", {10}), c = allreduce_of("c", {1});
  check_eq(planned(1000, {a, b, c}), "a b c");
  check_eq(planned(20 * kFloat, {a, b, c}), "a b | c");
  check_eq(planned(20 * kFloat - 1, {a, b, c}), "a c | b");
  check_eq(planned(1, {a, b, c}), "a | b | c", "a tensor above the threshold goes alone");
  check_eq(planned(0, {a, b, c}), "a | b | c", "0 turns fusion off");
  check_eq(planned(1000, {}), "");
});

const Case large("what takes longer to copy than to launch is launched alone", [] {
  constexpr int64_t kMost = (1 << 20) / kFloat;
  const OpDesc a = allreduce_of("a", {10}), b = allreduce_of("b", {kMost}),
               c = allreduce_of("c", {kMost + 1}), d = allreduce_of("d", {10});
  check_eq(planned(1 << 30, {a, b, c, d}), "a b d | c");
  check_eq(planned(1 << 30, {c, a, d}), "c | a d");
});

const Case look_ahead("what does not fit is passed over; order is kept among the rest", [] {
  const OpDesc big = allreduce_of("big", {100});
  const auto small = [](const char* name) { return allreduce_of(name, {1}); };
  const OpDesc other = allreduce_of("other", {1}, DataType::kInt64);
  check_eq(planned(100 * kFloat, {small("a"), big, small("b"), other, small("c")}),
           "a b c | big | other");
  check_eq(planned(1000, {other, small("a"), with(other, [](OpDesc& d) { d.name = "p"; })}),
           "other p | a");
});

const Case like("only like reductions share a launch", [] {
  const OpDesc a = allreduce_of("a");
  const auto apart = [&](const std::function<void(OpDesc&)>& change, const char* what) {
    OpDesc b = a;
    b.name = "b";
    check_eq(planned(1000, {a, b}), "a b");
    change(b);
    check_eq(planned(1000, {a, b}), "a | b", what);
  };
  apart([](OpDesc& d) { d.dtype = DataType::kFloat64; }, "dtype");
  apart([](OpDesc& d) { d.dtype = DataType::kInt32; }, "dtype of the same size");
  apart([](OpDesc& d) { d.op = ReduceOp::kAverage; }, "op");
  apart([](OpDesc& d) { d.prescale = 0.5; }, "prescale");
  apart([](OpDesc& d) { d.postscale = 0.5; }, "postscale");
  apart([](OpDesc& d) { d.device = {DeviceKind::kCuda, 0}; }, "device");
  apart([](OpDesc& d) { d.kind = OpKind::kBroadcast; }, "kind");
});

const Case broadcasts("broadcasts of any dtype share a launch, of another root do not", [] {
  const OpDesc a = desc_of(OpKind::kBroadcast, "a", {3}, DataType::kInt8);
  const OpDesc b = desc_of(OpKind::kBroadcast, "b", {3}, DataType::kFloat64);
  check_eq(planned(1000, {a, b}), "a b");
  check_eq(planned(1000, {a, with(b, [](OpDesc& d) { d.root = 1; })}), "a | b");
  check_eq(planned(3 + 24 - 1, {a, b}), "a | b");
});

const Case alone("the other kinds go alone", [] {
  for (OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReducescatter}) {
    check_eq(planned(1000, {desc_of(kind, "a"), desc_of(kind, "b")}), "a | b");
  }
});

const Case parties("what the same ranks take part in shares a launch, what others do never", [] {
  Planner planner(4, up_to(1000));
  add(planner, allreduce_of("a"));
  add(planner, allreduce_of("b"), {1});
  add(planner, allreduce_of("c"), {1, 3});
  add(planner, allreduce_of("d"));
  add(planner, allreduce_of("e"), {1});
  add(planner, desc_of(OpKind::kBroadcast, "f"), {1});
  const auto launches = planner.plan();
  check_eq(names(launches), "a d | b e | c | f");
  check_eq(launches[0].absent, std::vector<int>{});
  check_eq(launches[1].absent, std::vector<int>{1});
  check_eq(launches[2].absent, std::vector<int>{1, 3});
  check_eq(launches[3].absent, std::vector<int>{1});
});

const Case groups_apart("without group fusion, a group is fused with itself only", [] {
  const auto member = [](const char* name, const char* group) {
    return member_of(group, 2, allreduce_of(name));
  };
  const std::vector<OpDesc> tensors = {allreduce_of("x"), member("a1", "a"), member("b1", "b"),
                                       member("a2", "a"), member("b2", "b"), allreduce_of("y")};
  check_eq(planned(1000, tensors), "x a1 b1 a2 b2 y");
  auto options = up_to(1000);
  options.group_fusion = false;
  check_eq(planned(options, tensors), "x y | a1 a2 | b1 b2");
  options.fusion_threshold = 0;
  check_eq(planned(options, tensors), "x | a1 | b1 | a2 | b2 | y");
});

const Case queue("planning empties the queue", [] {
  Planner planner(2, up_to(7 * kFloat));
  check(planner.idle());
  add(planner, allreduce_of("a", {5}));
  check(!planner.idle() && !planner.full());
  add(planner, allreduce_of("b", {2}));
  check(planner.full());
  check_eq(names(planner.plan()), "a b");
  check(planner.idle() && !planner.full());
  check(planner.plan().empty());
});

const Case layout("members lie at 64-byte boundaries, from the launch alone", [] {
  Launch launch;
  for (int64_t n : {1, 16, 17, 0, 3}) {
    launch.items.push_back({share(allreduce_of("t" + std::to_string(n), {n})), {}, ""});
  }
  const Layout layout = layout_of(launch);
  check_eq(layout.offsets, std::vector<int64_t>{0, 64, 128, 256, 256});
  check_eq(layout.bytes, 320);
  check_eq(layout_of({}).bytes, 0);
});

const Case soak("random queues: nothing lost, nothing above the threshold, order kept", [] {
  for (int seed = 1; seed <= rounds(500); ++seed) {
    Random random(seed);
    const int64_t limit = random.below(200);
    Planner planner(2, up_to(limit));
    const int tensors = random.below(40);
    std::vector<OpDesc> queued;
    std::vector<std::vector<int>> absent;
    for (int t = 0; t < tensors; ++t) {
      OpDesc d = allreduce_of(std::to_string(t), {random.below(20)},
                              random.one_in(3) ? DataType::kInt16 : DataType::kFloat32);
      if (random.one_in(4)) d.kind = OpKind::kBroadcast;
      queued.push_back(d);
      absent.push_back(random.one_in(3) ? std::vector<int>{1} : std::vector<int>{});
      add(planner, d, absent.back());
    }
    std::vector<int> seen(tensors, 0);
    for (const auto& launch : planner.plan()) {
      int64_t bytes = 0;
      int previous = -1;
      for (const auto& item : launch.items) {
        const int t = std::stoi(item.desc->name);
        ++seen[t];
        check_eq(text_of(*item.desc), text_of(queued[t]));
        check_eq(launch.absent, absent[t]);
        check(t > previous, "order within a launch");
        previous = t;
        bytes += item.desc->bytes();
      }
      check(launch.items.size() == 1 || bytes <= limit, "seed " + std::to_string(seed));
    }
    check_eq(seen, std::vector<int>(tensors, 1), "seed " + std::to_string(seed));
  }
});

// --- inline results -------------------------------------------------------------------------

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// What a decision of these payloads, one for each rank of the set, leads to.
LaunchItem inlined(const OpDesc& d, std::vector<std::string> payloads,
                   std::vector<int64_t> numbers = {}, std::vector<int> absent = {},
                   bool average_over_active = false, std::vector<int> hosts = {}) {
  auto options = up_to(1000);
  options.hosts = std::move(hosts);
  options.average_over_active = average_over_active;
  Planner planner(static_cast<int>(payloads.size()), options);
  Decision decision;
  decision.agreed.push_back({share(d), absent, std::move(numbers), std::move(payloads)});
  const auto launch = planner.add(std::move(decision));
  check(planner.idle());
  check(launch && launch->inlined);
  check_eq(launch->absent, absent);
  check_eq(launch->items.size(), 1u);
  return launch->items.front();
}

const Case inline_reductions("an inline allreduce is exact, by the rules of its dtype", [] {
  OpDesc d = allreduce_of("x", {2}, DataType::kInt64);
  d.op = ReduceOp::kAverage;
  const int64_t big = int64_t{1} << 60;
  check_eq(inlined(d, {bytes_of<int64_t>({big + 3, -3}), bytes_of<int64_t>({big + 1, 0})}).result,
           bytes_of<int64_t>({big + 2, -1}));
  d = allreduce_of("x", {3}, DataType::kUInt8);
  d.op = ReduceOp::kAverage;
  check_eq(inlined(d, {"\xc8\x01\x02", "\x64\x02\x02"}).result, "\x96\x01\x02");
  d = allreduce_of("x", {1});
  d.prescale = 0.5;
  d.postscale = 4;
  check_eq(inlined(d, {bytes_of<float>({1}), bytes_of<float>({2}), bytes_of<float>({4})}).result,
           bytes_of<float>({14}));
  check_eq(inlined(allreduce_of("empty", {0}), {"", ""}).result, "");
});

const Case inline_by_host("an inline allreduce is associated by host, without absent ranks", [] {
  const OpDesc d = allreduce_of("x", {1});
  // 2^24 swallows a 1 that comes alone.
  const float large = 0x1p24f;
  const std::vector<std::string> payloads = {bytes_of<float>({large}), bytes_of<float>({1}),
                                             bytes_of<float>({1}), bytes_of<float>({1})};
  check_eq(inlined(d, payloads).result, bytes_of<float>({large}));
  check_eq(inlined(d, payloads, {}, {}, false, {0, 1, 1, 0}).result, bytes_of<float>({large + 2}));
  check_eq(inlined(d, payloads, {}, {3}, false, {0, 1, 1, 0}).result, bytes_of<float>({large + 2}));
  check_eq(inlined(d, payloads, {}, {2}, false, {0, 1, 1, 0}).result, bytes_of<float>({large}));
});

const Case inline_others("inline broadcast, allgather and barrier", [] {
  OpDesc d = desc_of(OpKind::kBroadcast, "x", {1});
  d.root = 1;
  check_eq(inlined(d, {"", "root", ""}).result, "root");
  const auto gathered =
      inlined(desc_of(OpKind::kAllgather, "x", {1}), {"", "11112222", "3333"}, {0, 2, 1});
  check_eq(gathered.result, "111122223333");
  check_eq(gathered.numbers, std::vector<int64_t>{0, 2, 1});
  check_eq(inlined(desc_of(OpKind::kBarrier, "x", {0}), {}).result, "");
  check_eq(inlined(desc_of(OpKind::kJoin, "x", {0}), {}, {2}).numbers, std::vector<int64_t>{2});
  const auto added = inlined(desc_of(OpKind::kAddProcessSet, "x", {1}), {"a", "a"}, {7});
  check_eq(added.numbers, std::vector<int64_t>{7});
  check_eq(added.result, "");
});

const Case inline_absent("inline results without the absent; what an average then divides by", [] {
  OpDesc d = allreduce_of("x", {1});
  const std::vector<std::string> payloads = {bytes_of<float>({1}), "", bytes_of<float>({5})};
  check_eq(inlined(d, payloads, {}, {1}).result, bytes_of<float>({6}));
  d.op = ReduceOp::kMin;
  check_eq(inlined(d, payloads, {}, {1}).result, bytes_of<float>({1}));
  d.op = ReduceOp::kAverage;
  check_eq(inlined(d, payloads, {}, {1}).result, bytes_of<float>({2}));
  check_eq(inlined(d, payloads, {}, {1}, true).result, bytes_of<float>({3}));
  // One rank alone.
  check_eq(inlined(d, {"", bytes_of<float>({4})}, {}, {0}).result, bytes_of<float>({2}));
  check_eq(inlined(d, {"", bytes_of<float>({4})}, {}, {0}, true).result, bytes_of<float>({4}));
  d = desc_of(OpKind::kBroadcast, "x", {1});
  d.root = 2;
  check_eq(inlined(d, {"", "", "root"}, {}, {0}).result, "root");
  check_eq(
      inlined(desc_of(OpKind::kAllgather, "x", {1}), {"", "1111", "2222"}, {0, 1, 1}, {0}).result,
      "11112222");
});

const Case divisors("an average divides by the set's size, or by the ranks that take part", [] {
  check_eq(average_divisor(5, {}, false), 5);
  check_eq(average_divisor(5, {}, true), 5);
  check_eq(average_divisor(5, {0, 4}, false), 5);
  check_eq(average_divisor(5, {0, 4}, true), 3);
});

const Case mixed("of a group, what has payloads is inlined, the rest queued", [] {
  Planner planner(2, up_to(1000));
  Decision group;
  group.agreed.push_back({share(allreduce_of("a", {1})), {}, {}, {"1111", "2222"}});
  group.agreed.push_back({share(allreduce_of("b", {100})), {}, {}, {}});
  const auto launch = planner.add(std::move(group));
  check(launch.has_value());
  check_eq(launch->items.size(), 1u);
  check_eq(launch->items.front().desc->name, "a");
  check_eq(names(planner.plan()), "b");
});

const Case may("what may travel inside the log", [] {
  const OpDesc d = allreduce_of("x", {16});
  check(may_inline(d, 64, 2));
  check(!may_inline(d, 63, 2));
  check(!may_inline(d, 64, 1), "one rank has nobody to send to");
  check(!may_inline(with(d, [](OpDesc& o) { o.device = {DeviceKind::kCuda, 0}; }), 64, 2));
  check(may_inline(allreduce_of("empty", {0}), 0, 2));
  check(!may_inline(with(d, [](OpDesc& o) { o.op = ReduceOp::kAdasum; }), 64, 2));
  check(may_inline(desc_of(OpKind::kAllgather, "x"), 64, 2));
  check(may_inline(desc_of(OpKind::kBroadcast, "x"), 64, 2));
  for (OpKind kind : {OpKind::kAlltoall, OpKind::kReducescatter, OpKind::kBarrier, OpKind::kJoin,
                      OpKind::kAddProcessSet, OpKind::kRemoveProcessSet}) {
    check(!may_inline(desc_of(kind, "x"), 64, 2));
  }
  check(!may_inline(allreduce_of("x", {1 << 20}), int64_t{1} << 40, 8), "the sum is bounded");
});

}  // namespace
}  // namespace hvdtorch::test
