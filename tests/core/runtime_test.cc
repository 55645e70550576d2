// Whole jobs of simulated ranks that run random programs: every rank submits the same operations,
// in an order of its own, on two threads; every result must be the exact one, every error the same
// everywhere, and nothing may be left over.
#include "core/runtime.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "check.h"
#include "kernels/reduce_cpu.h"
#include "samples.h"
#include "simulated_ranks.h"

namespace hvdtorch::test {
namespace {

using std::chrono::microseconds;

// One operation of a program, as all ranks know it.
struct Step {
  OpDesc desc;                // rank 0's
  std::vector<OpDesc> descs;  // by rank
  uint64_t seed;
  int wrong_rank = -1;  // says something else than the others
};

// The splits of an alltoall: splits[from][to] rows.
std::vector<std::vector<int64_t>> splits_of(const Step& step, int size) {
  Random random(step.seed ^ 0x5117);
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

std::string reduced(const Step& step, int size) {
  std::vector<std::string> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(input_of(step, rank));
  for (const auto& input : inputs) sources.push_back(input.data());
  const OpDesc& d = step.desc;
  std::string result(static_cast<size_t>(d.bytes()), '\0');
  reduce({d.dtype, d.op, d.prescale, d.postscale, size}, result.data(), sources.data(), size,
         d.numel());
  return result;
}

std::string expected(const Step& step, int rank, int size) {
  const OpDesc& d = step.desc;
  const auto row = static_cast<size_t>(d.row_numel() * size_of(d.dtype));
  std::string result;
  switch (d.kind) {
    case OpKind::kAllreduce:
      return reduced(step, size);
    case OpKind::kAllgather:
      for (int r = 0; r < size; ++r) result += input_of(step, r);
      return result;
    case OpKind::kBroadcast:
      return input_of(step, d.root);
    case OpKind::kAlltoall: {
      const auto splits = splits_of(step, size);
      for (int from = 0; from < size; ++from) {
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
      return reduced(step, size)
          .substr(static_cast<size_t>(begin) * row, static_cast<size_t>(mine) * row);
    }
    case OpKind::kBarrier:
      return "";
  }
  fail("unknown kind");
}

OpDesc random_operation(Random& random, int size, const std::string& name) {
  OpDesc d;
  // Reductions are what most programs do most.
  d.kind = random.one_in(2) ? OpKind::kAllreduce : static_cast<OpKind>(random.below(kNumOpKinds));
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
    } while (d.op == ReduceOp::kAdasum ||
             !why_not_reducible({d.dtype, d.op, d.prescale, d.postscale, size}).empty());
  }
  d.remembered = !random.one_in(6);
  return d;
}

std::vector<Step> random_round(Random& random, int size, const std::string& prefix) {
  std::vector<Step> steps;
  const int count = 1 + random.below(6);
  const bool grouped = count > 1 && random.one_in(4);
  const bool wrong = size > 1 && random.one_in(6);
  for (int i = 0; i < count; ++i) {
    Step step;
    step.seed = random.engine()();
    do {
      step.desc = random_operation(random, size, prefix + std::to_string(i));
    } while (grouped && step.desc.kind == OpKind::kBarrier);
    if (grouped) step.desc = member_of(prefix + "group", count, step.desc);
    step.descs.assign(static_cast<size_t>(size), step.desc);
    if (step.desc.kind == OpKind::kAllgather) {
      for (OpDesc& d : step.descs) d.shape[0] = random.below(5);
    } else if (step.desc.kind == OpKind::kAlltoall) {
      const auto splits = splits_of(step, size);
      for (int r = 0; r < size; ++r) {
        int64_t rows = random.below(2);  // some that go nowhere
        for (int64_t n : splits[r]) rows += n;
        step.descs[r].shape[0] = rows;
      }
    }
    if (wrong && i == count / 2 && step.desc.kind != OpKind::kBarrier) {
      step.wrong_rank = random.below(size);
      OpDesc& d = step.descs[step.wrong_rank];
      if (random.one_in(2) && !d.shape.empty()) {
        d.shape.push_back(2);
      } else {
        d.dtype = d.dtype == DataType::kInt32 ? DataType::kInt64 : DataType::kInt32;
      }
    }
    steps.push_back(std::move(step));
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

void check_result(const Step& step, const Submission& submission, int rank, int size) {
  const std::string want = expected(step, rank, size);
  check(submission.output() == want, text_of(step.desc) + ": rank " + std::to_string(rank) +
                                         " got " + std::to_string(submission.output().size()) +
                                         " bytes that are not the " + std::to_string(want.size()) +
                                         " expected ones");
  check_eq(submission.finished(), 1, "times finish() ran");
  if (step.desc.kind != OpKind::kAlltoall) return;
  std::vector<int64_t> received;
  for (const auto& from : splits_of(step, size)) received.push_back(from[rank]);
  check_eq(submission.operation()->received_splits, received);
}

void run_round(SimulatedRanks& job, int rank, std::vector<Step> steps, Random& order,
               SameErrors& errors, const std::string& key) {
  const int size = job.size();
  // All members of a group share a completion, and are submitted at once.
  const bool grouped = !steps.front().desc.group.empty();
  const bool fails = std::any_of(steps.begin(), steps.end(),
                                 [](const Step& step) { return step.wrong_rank >= 0; });
  std::shuffle(steps.begin(), steps.end(), order.engine());
  auto whole = grouped ? std::make_shared<Completion>(static_cast<int>(steps.size())) : nullptr;
  std::vector<Submission> submissions;
  std::vector<std::shared_ptr<Operation>> group;
  for (const Step& step : steps) {
    submissions.emplace_back(step.descs[rank], input_of(step, rank), whole);
    const auto& op = submissions.back().operation();
    if (step.desc.kind == OpKind::kAlltoall) op->splits = splits_of(step, size)[rank];
    if (grouped) {
      group.push_back(op);
    } else {
      job[rank].submit({op});
    }
  }
  if (grouped) job[rank].submit(std::move(group));
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string error = submissions[i].wait();
    if (steps[i].wrong_rank >= 0 || (grouped && fails)) {
      check_contains(error, ": the ranks disagree on ");
      errors.check_same(key + (grouped ? "group" : steps[i].desc.name), error);
    } else {
      check_eq(error, "", text_of(steps[i].desc));
      check_result(steps[i], submissions[i], rank, size);
    }
  }
}

RuntimeOptions random_options(Random& random) {
  RuntimeOptions o;
  o.fusion_threshold = std::array{0, 64, 1000, 1 << 20}[random.below(4)];
  o.cycle_time = microseconds(std::array{0, 200, 1000}[random.below(3)]);
  o.cache_capacity = std::array{0u, 3u, 1024u}[random.below(3)];
  o.inline_limit = std::array{0, 64, 1024}[random.below(3)];
  o.lone_inline_limit = std::array{0, 1 << 16}[random.below(2)];
  return o;
}

// Two streams of rounds per rank, each on a thread of its own.
void soak(int size, Wire wire, int seed, int round_count) {
  const std::string which = std::to_string(size) + " ranks, seed " + std::to_string(seed) + ": ";
  Random random(static_cast<uint64_t>(seed));
  SimulatedRanks job(size, {.wire = wire, .options = random_options(random)});
  SameErrors errors;
  try {
    run_ranks(
        2 * size,
        [&](int thread) {
          const int rank = thread / 2, stream = thread % 2;
          const std::string prefix = stream == 0 ? "a" : "b";
          Random program(static_cast<uint64_t>(seed) * 2 + stream);  // the same on all ranks
          Random order(static_cast<uint64_t>(seed) * 1000 + thread);
          for (int round = 0; round < round_count; ++round) {
            run_round(job, rank, random_round(program, size, prefix), order, errors,
                      prefix + std::to_string(round) + " ");
          }
        },
        [&] { job.stop(); });
  } catch (const std::exception& error) {
    fail(which + error.what());
  }
  job.stop();
  check_eq(Submission::alive(), 0, which + "operations alive after the end");
}

void soaks(int size, Wire wire, int count, int round_count) {
  for (int seed = 1; seed <= count; ++seed) {
    soak(size, wire, seed + 100 * size + (wire == Wire::kSockets ? 50 : 0), rounds(round_count));
  }
}

const Case one("random programs on 1 rank", [] { soaks(1, Wire::kLocal, 4, 200); });
const Case two("random programs on 2 ranks", [] { soaks(2, Wire::kLocal, 8, 200); });
const Case three("random programs on 3 ranks", [] { soaks(3, Wire::kLocal, 6, 150); });
const Case four("random programs on 4 ranks", [] { soaks(4, Wire::kLocal, 6, 100); });
const Case eight("random programs on 8 ranks", [] { soaks(8, Wire::kLocal, 4, 40); });
const Case over_sockets("random programs on 2 and 4 ranks over sockets", [] {
  soaks(2, Wire::kSockets, 4, 200);
  soaks(4, Wire::kSockets, 4, 80);
});

}  // namespace
}  // namespace hvdtorch::test
