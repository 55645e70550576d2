// Whole jobs of simulated ranks that run random programs: every rank submits the same operations,
// in an order of its own, on two threads, in several process sets, some of which come and go; and
// joins when its data ends, which is sooner than on others. Every result must be the exact one,
// every error the same everywhere, and nothing may be left over.
#include "core/runtime.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "check.h"
#include "core/log.h"
#include "kernels/reduce_cpu.h"
#include "samples.h"
#include "simulated_ranks.h"

namespace hvdtorch::test {
namespace {

using std::chrono::microseconds;

// A process set, as all ranks know it.
struct Set {
  uint32_t id;
  std::vector<int> ranks;  // global, ascending

  int size() const { return static_cast<int>(ranks.size()); }
  // Of a global rank among them; -1: not a member.
  int index_of(int rank) const {
    const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
    return it == ranks.end() || *it != rank ? -1 : static_cast<int>(it - ranks.begin());
  }
};

// One operation of a program, as all ranks know it. Ranks are counted within its set.
struct Step {
  OpDesc desc;                // rank 0's
  std::vector<OpDesc> descs;  // by rank
  Set set;
  std::vector<int> active;  // ranks that have not joined
  int64_t divisor = 1;      // of an average
  uint64_t seed;
  std::string error;  // how it fails; "": it does not

  bool has(int rank) const { return std::binary_search(active.begin(), active.end(), rank); }
};

// The splits of an alltoall: splits[from][to] rows.
std::vector<std::vector<int64_t>> splits_of(const Step& step) {
  Random random(step.seed ^ 0x5117);
  const int size = step.set.size();
  std::vector<std::vector<int64_t>> splits(size, std::vector<int64_t>(size));
  for (auto& from : splits) {
    for (auto& rows : from) rows = random.below(4);
  }
  return splits;
}

// What `rank` puts in. Bytes that mean a small number in every dtype: 0, 1 or 2 for integers, 0 or
// 1 for bool, and bit patterns without NaN or infinity for floats.
std::string input_of(const Step& step, int rank) {
  const OpDesc& d = step.descs[rank];
  Random random(step.seed * 31 + static_cast<uint64_t>(rank));
  std::string bytes(static_cast<size_t>(d.bytes()), '\0');
  const int64_t element = size_of(d.dtype);
  const bool floating = is_floating(d.dtype) || is_complex(d.dtype);
  for (size_t i = 0; i < bytes.size(); i += static_cast<size_t>(element)) {
    if (d.dtype == DataType::kFloat32 || d.dtype == DataType::kComplex64) {
      for (int64_t part = 0; part < element; part += 4) {
        const float value = static_cast<float>(random.below(2001) - 1000) / 7;
        std::memcpy(&bytes[i + static_cast<size_t>(part)], &value, 4);
      }
    } else if (floating) {
      bytes[i + static_cast<size_t>(element) - 1] = static_cast<char>(0x30 + random.below(8));
      if (element == 16) bytes[i + 7] = static_cast<char>(0x3f);
    } else {
      bytes[i] = static_cast<char>(random.below(d.dtype == DataType::kBool ? 2 : 3));
    }
  }
  return bytes;
}

std::string reduced(const Step& step) {
  std::vector<std::string> inputs;
  std::vector<const void*> sources;
  for (int rank : step.active) inputs.push_back(input_of(step, rank));
  for (const auto& input : inputs) sources.push_back(input.data());
  const OpDesc& d = step.desc;
  std::string result(static_cast<size_t>(d.bytes()), '\0');
  reduce({d.dtype, d.op, d.prescale, d.postscale, step.divisor}, result.data(), sources.data(),
         static_cast<int>(sources.size()), d.numel());
  return result;
}

std::string expected(const Step& step, int rank) {
  const OpDesc& d = step.desc;
  const int size = step.set.size();
  const auto row = static_cast<size_t>(d.row_numel() * size_of(d.dtype));
  std::string result;
  switch (d.kind) {
    case OpKind::kAllreduce:
      return reduced(step);
    case OpKind::kAllgather:
      for (int r : step.active) result += input_of(step, r);
      return result;
    case OpKind::kBroadcast:
      return input_of(step, d.root);
    case OpKind::kAlltoall: {
      const auto splits = splits_of(step);
      for (int from : step.active) {
        size_t before = 0;
        for (int to = 0; to < rank; ++to) before += static_cast<size_t>(splits[from][to]);
        result += input_of(step, from)
                      .substr(before * row, static_cast<size_t>(splits[from][rank]) * row);
      }
      return result;
    }
    case OpKind::kReducescatter: {
      const int64_t rows = d.shape[0];
      int64_t begin = 0;
      for (int r = 0; r < rank; ++r) begin += rows / size + (r < rows % size);
      const int64_t mine = rows / size + (rank < rows % size);
      return reduced(step).substr(static_cast<size_t>(begin) * row,
                                  static_cast<size_t>(mine) * row);
    }
    default:
      return "";  // a barrier
  }
}

OpDesc random_operation(Random& random, int size, const std::string& name) {
  OpDesc d;
  // Reductions are what most programs do most.
  d.kind = random.one_in(2) ? OpKind::kAllreduce : static_cast<OpKind>(random.below(kNumDataKinds));
  d.dtype = static_cast<DataType>(random.below(kNumDataTypes));
  d.name = std::string(name_of(d.kind)) + "." + name;
  d.shape = {random.one_in(8) ? 1000 + random.below(2000) : random.below(12)};
  if (random.one_in(3)) d.shape.push_back(1 + random.below(3));
  if (d.kind == OpKind::kBroadcast) d.root = random.below(size);
  if (d.kind == OpKind::kAllreduce && random.one_in(8)) d.shape = {};
  if (d.kind == OpKind::kBarrier) {
    d.shape = {0};
    d.dtype = DataType::kUInt8;
  }
  if (d.kind == OpKind::kAllreduce || d.kind == OpKind::kReducescatter) {
    do {
      d.op = static_cast<ReduceOp>(random.below(kNumReduceOps));
      d.prescale = random.one_in(5) ? 0.5 : 1;
      d.postscale = random.one_in(5) ? -2 : 1;
      if (random.one_in(4)) d.dtype = DataType::kFloat32;
    } while ((d.op == ReduceOp::kAdasum && d.kind == OpKind::kReducescatter) ||
             !why_not_reducible({d.dtype, d.op, d.prescale, d.postscale, size}).empty());
  }
  d.remembered = !random.one_in(6);
  return d;
}

// Who has data for a stream of rounds: rank r for the first rounds[r] ones.
struct Stream {
  std::string name;
  std::vector<int> rounds;
  bool average_over_active;

  int longest() const { return *std::max_element(rounds.begin(), rounds.end()); }
  int shortest() const { return *std::min_element(rounds.begin(), rounds.end()); }
};

std::vector<Step> random_round(Random& random, const std::vector<Set>& sets, const Stream& stream,
                               int round) {
  std::vector<Step> steps;
  const int count = 1 + random.below(6);
  const bool grouped = count > 1 && random.one_in(4);
  const bool wrong = random.one_in(6);
  const auto any_set = [&] { return sets[random.below(static_cast<int>(sets.size()))]; };
  const Set set_of_group = any_set();
  for (int i = 0; i < count; ++i) {
    Step step;
    step.seed = random.engine()();
    step.set = grouped ? set_of_group : any_set();
    const int size = step.set.size();
    std::vector<int> absent;
    for (int r = 0; r < size; ++r) {
      (stream.rounds[step.set.ranks[r]] > round ? step.active : absent).push_back(r);
    }
    step.divisor = stream.average_over_active ? static_cast<int>(step.active.size()) : size;
    do {
      step.desc = random_operation(random, size, stream.name + std::to_string(i));
    } while (grouped && step.desc.kind == OpKind::kBarrier);
    step.desc.process_set = step.set.id;
    if (grouped) step.desc = member_of(stream.name + "group", count, step.desc);
    step.descs.assign(static_cast<size_t>(size), step.desc);
    if (step.desc.kind == OpKind::kAllgather) {
      for (OpDesc& d : step.descs) d.shape[0] = random.below(5);
    } else if (step.desc.kind == OpKind::kAlltoall) {
      const auto splits = splits_of(step);
      for (int r = 0; r < size; ++r) {
        int64_t rows = random.below(2);  // some that go nowhere
        for (int64_t n : splits[r]) rows += n;
        step.descs[r].shape[0] = rows;
      }
    } else if (step.desc.kind == OpKind::kBroadcast && !step.has(step.desc.root)) {
      step.error = "has joined";
    }
    if (wrong && i == count / 2 && step.active.size() > 1 && step.desc.kind != OpKind::kBarrier) {
      step.error = "the ranks disagree on";
      OpDesc& d = step.descs[step.active[random.below(static_cast<int>(step.active.size()))]];
      if (random.one_in(2) && !d.shape.empty()) {
        d.shape.push_back(2);
      } else {
        d.dtype = d.dtype == DataType::kInt32 ? DataType::kInt64 : DataType::kInt32;
      }
    }
    if (!step.active.empty()) steps.push_back(std::move(step));
  }
  return steps;
}

// The first rank to fail says how; the others must say the same.
class SameErrors {
 public:
  void check_same(const std::string& key, const std::string& error) {
    std::lock_guard lock(mutex_);
    const auto [it, first] = errors_.try_emplace(key, error);
    check_eq(error, it->second, "the error of " + key + " on another rank");
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> errors_;
};

void check_result(const Step& step, const Submission& submission, int rank) {
  const std::string want = expected(step, rank);
  check(submission.output() == want,
        text_of(step.desc) + ": rank " + std::to_string(rank) + " of " + show(step.active) +
            " got " + std::to_string(submission.output().size()) + " bytes that are not the " +
            std::to_string(want.size()) + " expected ones");
  check_eq(submission.finished(), 1, "times finish() ran");
  if (step.desc.kind != OpKind::kAlltoall) return;
  std::vector<int64_t> received;
  const auto splits = splits_of(step);
  for (int from = 0; from < step.set.size(); ++from) {
    received.push_back(step.has(from) ? splits[from][rank] : 0);
  }
  check_eq(submission.operation()->numbers, received);
}

void run_round(SimulatedRanks& job, int rank, std::vector<Step> steps, Random& order,
               SameErrors& errors, const std::string& key) {
  std::erase_if(steps, [&](const Step& step) { return !step.has(step.set.index_of(rank)); });
  if (steps.empty()) return;
  // All members of a group share a completion, and are submitted at once.
  const bool grouped = !steps.front().desc.group.empty();
  const bool fails =
      std::any_of(steps.begin(), steps.end(), [](const Step& step) { return !step.error.empty(); });
  std::shuffle(steps.begin(), steps.end(), order.engine());
  auto whole = grouped ? std::make_shared<Completion>(static_cast<int>(steps.size())) : nullptr;
  std::vector<Submission> submissions;
  std::vector<std::shared_ptr<Operation>> group;
  for (const Step& step : steps) {
    const int index = step.set.index_of(rank);
    submissions.emplace_back(step.descs[index], input_of(step, index), whole);
    const auto& op = submissions.back().operation();
    if (step.desc.kind == OpKind::kAlltoall) op->splits = splits_of(step)[index];
    if (grouped) {
      group.push_back(op);
    } else {
      job[rank].submit({op}, &step == &steps.back() && order.one_in(2));
    }
  }
  if (grouped) job[rank].submit(std::move(group), order.one_in(2));
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string error = submissions[i].wait(&job[rank]);
    if (grouped && fails) {
      check(error.find("the ranks disagree on") != std::string::npos ||
                error.find("has joined") != std::string::npos,
            error);
      errors.check_same(key + "group", error);
    } else if (!steps[i].error.empty()) {
      check_contains(error, steps[i].error);
      errors.check_same(key + std::to_string(steps[i].set.id) + steps[i].desc.name, error);
    } else {
      check_eq(error, "", text_of(steps[i].desc));
      check_result(steps[i], submissions[i], steps[i].set.index_of(rank));
    }
  }
}

// --- process sets that come and go ----------------------------------------------------------

Submission submit(SimulatedRanks& job, int rank, const Ready& change) {
  return job.submit(rank, *change.desc, change.payload.value_or(""));
}

Set add_set(SimulatedRanks& job, int rank, const std::vector<int>& ranks) {
  const auto addition = submit(job, rank, addition_of(ranks));
  check_eq(addition.wait(), "");
  return {static_cast<uint32_t>(addition.operation()->numbers.at(0)), ranks};
}

// With an operation that all members submitted, which is carried out, and one that one did, which
// fails.
void remove_set(SimulatedRanks& job, int rank, const Set& set) {
  std::optional<Submission> whole, half;
  if (set.index_of(rank) >= 0) {
    whole = job.submit(rank, in_set(set.id, allreduce_of("whole", {300})),
                       floats(std::vector<float>(300, 1)));
  }
  if (set.index_of(rank) == 0 && set.size() > 1) {
    half = job.submit(rank, in_set(set.id, allreduce_of("half")), floats({1, 2, 3, 4}));
  }
  check_eq(submit(job, rank, removal_of(set.id)).wait(), "");
  const Submission late(in_set(set.id, allreduce_of("late")), floats({1, 2, 3, 4}));
  check_contains(check_throws<std::invalid_argument>([&] { job[rank].submit({late.operation()}); }),
                 "late: this rank is not a member of process set");
  if (whole) {
    check_eq(whole->wait(), "");
    check(whole->output() == floats(std::vector<float>(300, static_cast<float>(set.size()))));
  }
  if (half) check_contains(half->wait(), "half: process set " + std::to_string(set.id) + " was");
}

std::vector<int> random_ranks(Random& random, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (random.one_in(2)) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(random.below(size));
  return ranks;
}

// --- whole programs -------------------------------------------------------------------------

RuntimeOptions random_options(Random& random) {
  RuntimeOptions o;
  o.planner.fusion_threshold = std::array{0, 64, 1000, 1 << 20}[random.below(4)];
  o.planner.group_fusion = !random.one_in(3);
  o.planner.average_over_active = random.one_in(2);
  o.cycle_time = microseconds(std::array{0, 200, 1000}[random.below(3)]);
  o.cache_capacity = std::array{0u, 3u, 1024u}[random.below(3)];
  o.inline_limit = std::array{0, 64, 1024}[random.below(3)];
  o.lone_inline_limit = std::array{0, 1 << 16}[random.below(2)];
  if (random.one_in(2)) o.stall_warn_after = std::chrono::milliseconds(1);
  return o;
}

// Rounds of the ranks for two streams: whose data ends first does so in both.
std::vector<Stream> random_streams(Random& random, int size, int longest, bool joins,
                                   bool average_over_active) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random.engine());
  std::vector<Stream> streams;
  for (const char* name : {"a", "b"}) {
    std::vector<int> lengths, rounds(static_cast<size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      lengths.push_back(joins ? 1 + random.below(longest) : longest);
    }
    std::sort(lengths.begin(), lengths.end());
    for (size_t i = 0; i < ranks.size(); ++i) rounds[static_cast<size_t>(ranks[i])] = lengths[i];
    streams.push_back({name, rounds, average_over_active});
  }
  return streams;
}

struct Program {
  uint64_t seed;
  std::vector<Set> sets;
  std::vector<Stream> streams;
  std::vector<int> passing;  // ranks of a set that exists in stream 0 while all have data
};

// One stream on one rank; `key` tells its rounds from those of other programs.
void run_stream(SimulatedRanks& job, const Program& program, int rank, int index,
                SameErrors& errors, const std::string& key) {
  const Stream& stream = program.streams[index];
  Random random(program.seed * 2 + index);  // the same on all ranks
  Random order(program.seed * 1000 + 2 * rank + index);
  std::vector<Set> sets = program.sets;
  const bool with_passing = index == 0 && !program.passing.empty();
  if (with_passing) sets.push_back(add_set(job, rank, program.passing));
  for (int round = 0; round < stream.rounds[rank]; ++round) {
    run_round(job, rank, random_round(random, sets, stream, round), order, errors,
              key + stream.name + std::to_string(round) + " ");
    if (with_passing && round + 1 == stream.shortest()) {
      remove_set(job, rank, sets.back());
      sets.pop_back();
    }
  }
}

// Each rank runs two streams at a time, and joins when both have ended.
void run_until_joined(SimulatedRanks& job, const Program& program, bool joins, SameErrors& errors,
                      const std::string& key) {
  std::vector<std::atomic<int>> ended(static_cast<size_t>(job.size()));
  run_ranks(
      2 * job.size(),
      [&](int thread) {
        const int rank = thread / 2;
        run_stream(job, program, rank, thread % 2, errors, key);
        if (ended[static_cast<size_t>(rank)].fetch_add(1) == 0 || !joins) return;
        const auto join = submit(job, rank, join_of());
        check_eq(join.wait(), "");
        const auto& last = join.operation()->numbers;
        check(last.size() == 1 && last[0] >= 0 && last[0] < job.size());
        errors.check_same(key + "the last to join", std::to_string(last[0]));
      },
      [&] { job.stop(); });
}

void soak(int size, Wire wire, int seed, int round_count) {
  const std::string which = std::to_string(size) + " ranks, seed " + std::to_string(seed) + ": ";
  configure_log(LogLevel::kFatal, false);  // stalls are reported after a millisecond
  Random random(static_cast<uint64_t>(seed));
  const RuntimeOptions options = random_options(random);
  SimulatedRanks job(size, {.wire = wire, .options = options});
  SameErrors errors;
  constexpr int kEpochs = 4;
  try {
    std::vector<Set> sets = {{0, std::vector<int>(static_cast<size_t>(size))}};
    std::iota(sets[0].ranks.begin(), sets[0].ranks.end(), 0);
    for (int n = random.below(4); n > 0; --n) {
      const auto ranks = random_ranks(random, size);
      sets.push_back({static_cast<uint32_t>(sets.size()), ranks});
      run_ranks(size, [&](int rank) {
        check_eq(add_set(job, rank, ranks).id, sets.back().id, "a set's id");
      });
    }
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      const bool joins = epoch % 2 == 1;
      const int longest = std::max(1, round_count / kEpochs);
      Program program{
          static_cast<uint64_t>(seed) * kEpochs + epoch,
          sets,
          random_streams(random, size, longest, joins, options.planner.average_over_active),
          {}};
      if (random.one_in(2)) program.passing = random_ranks(random, size);
      run_until_joined(job, program, joins, errors, "epoch " + std::to_string(epoch) + " ");
    }
  } catch (const std::exception& error) {
    fail(which + error.what());
  }
  job.stop();
  check_eq(Submission::alive(), 0, which + "operations alive after the end");
}

// Other programs than usual: HVDTORCH_SOAK_SEED=7 PROGRAM "runtime: ".
void soaks(int size, Wire wire, int count, int round_count) {
  const char* text = std::getenv("HVDTORCH_SOAK_SEED");
  const int first =
      (text == nullptr ? 0 : std::atoi(text)) * 1000 + 100 * size + 25 * static_cast<int>(wire);
  for (int seed = first + 1; seed <= first + count; ++seed) {
    soak(size, wire, seed, rounds(round_count));
  }
}

const Case one("random programs on 1 rank", [] { soaks(1, Wire::kLocal, 4, 200); });
const Case two("random programs on 2 ranks", [] { soaks(2, Wire::kLocal, 12, 200); });
const Case three("random programs on 3 ranks", [] { soaks(3, Wire::kLocal, 12, 150); });
const Case four("random programs on 4 ranks", [] { soaks(4, Wire::kLocal, 10, 100); });
const Case five("random programs on 5 ranks", [] { soaks(5, Wire::kLocal, 8, 100); });
const Case eight("random programs on 8 ranks", [] { soaks(8, Wire::kLocal, 4, 40); });
const Case over_sockets("random programs on 2, 3 and 5 ranks over sockets", [] {
  soaks(2, Wire::kSockets, 6, 200);
  soaks(3, Wire::kSockets, 6, 150);
  soaks(5, Wire::kSockets, 6, 80);
});
const Case over_rings("random programs on 2, 3 and 5 ranks over rings in shared memory", [] {
  soaks(2, Wire::kRings, 12, 200);
  soaks(3, Wire::kRings, 8, 150);
  soaks(5, Wire::kRings, 6, 80);
});

}  // namespace
}  // namespace hvdtorch::test
