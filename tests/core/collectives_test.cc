// Every collective of every host transport, at 1 to 5 ranks, against what its definition says.
#include <algorithm>
#include <atomic>
#include <random>

#include "check.h"
#include "collective_checks.h"
#include "simulated_job.h"

namespace hvdtorch::test {
namespace {

constexpr int kMostRanks = 5;

// --- cases ---

void for_each_size(const std::function<void(Transport&)>& body) {
  for (Medium medium : kMedia) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) Job(ranks, medium).run(body);
  }
}

// Elements of int32 around every edge: alignment, the direct limit, chunks, slices.
const int64_t kCounts[] = {0,   1,   3,   15,  16,  17,  31,  32,  33,   63,   64,   65,   127,
                           128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 5000};

const Case allreduce("allreduce of every length around every edge", [] {
  for_each_size([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      check_allreduce(transport, {DataType::kInt32, ReduceOp::kSum}, count, ++round);
      check_allreduce(transport, {DataType::kUInt8, ReduceOp::kMax}, count, ++round);
    }
  });
});

const Case dtypes("allreduce of every dtype, short and long, gives all ranks the same bits", [] {
  for_each_size([](Transport& transport) {
    uint64_t round = 0;
    for (int d = 0; d < kNumDataTypes; ++d) {
      for (ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kProduct}) {
        Reduction reduction{static_cast<DataType>(d), op};
        reduction.divisor = transport.size();
        if (!why_not_reducible(reduction).empty()) continue;
        for (int64_t count : {21, 1111}) check_allreduce(transport, reduction, count, ++round);
      }
    }
  });
});

const Case factors("factors and the divisor apply, at one rank too", [] {
  for_each_size([](Transport& transport) {
    std::vector<float> data(700, 6.0f);
    for (int64_t count : {7, 700}) {
      std::fill(data.begin(), data.end(), 6.0f);
      transport.allreduce({DataType::kFloat32, ReduceOp::kAverage, 0.5, 3.0, 2}, data.data(),
                          count);
      check_eq(data[0], 4.5f * static_cast<float>(transport.size()));
      check_eq(data[count - 1], data[0]);
    }
  });
});

const Case reduce_scatter("reduce_scatter of even and uneven shares, some empty", [] {
  for_each_size([](Transport& transport) {
    const Reduction sum{DataType::kInt32, ReduceOp::kSum};
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      std::vector<int64_t> counts(transport.size(), count);
      check_reduce_scatter(transport, sum, counts, ++round);
      for (size_t r = 0; r < counts.size(); ++r) counts[r] = count * r;  // none for rank 0
      check_reduce_scatter(transport, sum, counts, ++round);
      counts.assign(counts.size(), 0);
      counts[round % counts.size()] = count;  // all for one
      check_reduce_scatter(transport, sum, counts, ++round);
    }
  });
});

const Case allgather("allgather of even and uneven parts, some empty", [] {
  for_each_size([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      std::vector<int64_t> bytes(transport.size(), count);
      check_allgather(transport, bytes, ++round);
      for (size_t r = 0; r < bytes.size(); ++r) bytes[r] = (r + round) % 3 * count;
      check_allgather(transport, bytes, ++round);
    }
  });
});

const Case broadcast("broadcast of every length from every root", [] {
  for_each_size([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      for (int root = 0; root < transport.size(); ++root) {
        check_broadcast(transport, count, root, ++round);
      }
    }
  });
});

const Case alltoall("alltoall of even and uneven parts, some empty", [] {
  for_each_size([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      std::vector<int64_t> bytes(transport.size() * transport.size(), count);
      check_alltoall(transport, bytes, round += 10);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i * 7 % 3 * count;
      check_alltoall(transport, bytes, round += 10);
    }
  });
});

const Case barrier("no rank leaves a barrier before all have entered", [] {
  for (Medium medium : kMedia) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      std::atomic<int> entered{0};
      Job(ranks, medium).run([&](Transport& transport) {
        for (int round = 1; round <= 50; ++round) {
          ++entered;
          transport.barrier();
          check(entered >= round * ranks, "left early");
        }
      });
    }
  }
});

// All ranks draw the same numbers, so that they agree on what comes next.
void random_round(Transport& transport, std::mt19937_64& random) {
  const int ranks = transport.size();
  const uint64_t round = random();
  const auto length = [&] { return static_cast<int64_t>(random() % 4 == 0 ? 0 : random() % 3000); };
  const auto lengths = [&](int n) {
    std::vector<int64_t> all(n);
    for (int64_t& one : all) one = length();
    return all;
  };
  Reduction reduction{static_cast<DataType>(random() % kNumDataTypes),
                      static_cast<ReduceOp>(random() % kNumReduceOps)};
  reduction.divisor = ranks;
  if (reduction.op == ReduceOp::kAdasum || !why_not_reducible(reduction).empty()) {
    reduction.op = ReduceOp::kSum;  // Adasum is a collective of its own: adasum_test.cc
  }
  switch (random() % 6) {
    case 0:
      return check_allreduce(transport, reduction, length(), round);
    case 1:
      return check_reduce_scatter(transport, reduction, lengths(ranks), round);
    case 2:
      return check_allgather(transport, lengths(ranks), round);
    case 3:
      return check_broadcast(transport, length(), static_cast<int>(round % ranks), round);
    case 4:
      return check_alltoall(transport, lengths(ranks * ranks), round);
    default:
      return transport.barrier();
  }
}

const Case random_rounds("200 random collectives in a row", [] {
  const uint64_t seed = std::random_device{}();
  for (Medium medium : kMedia) {
    for (int ranks = 2; ranks <= kMostRanks; ++ranks) {
      Job(ranks, medium).run([&](Transport& transport) {
        std::mt19937_64 random(seed + ranks);
        for (int i = 0; i < 200; ++i) {
          try {
            random_round(transport, random);
          } catch (const CheckFailure& failure) {
            fail("seed " + std::to_string(seed) + ", round " + std::to_string(i) + ": " +
                 failure.what());
          }
        }
      });
    }
  }
});

const Case tags("tags come round: more collectives than there are numbers", [] {
  Job(3, Medium::kLinks).run([](Transport& transport) {
    for (int i = 0; i < 1200; ++i) {
      int32_t value = i + transport.rank();
      transport.allreduce({DataType::kInt32, ReduceOp::kSum}, &value, 1);
      check_eq(value, 3 * i + 3);
    }
  });
});

const Case soak("large reduce_scatter of float64, default sizes", [] {
  constexpr int64_t kCount = 1 << 20;  // 8 MiB
  for (const auto& [medium, ranks] : {std::pair{Medium::kLinks, 2},
                                      {Medium::kLinks, 3},
                                      {Medium::kSharedMemory, 2},
                                      {Medium::kSharedMemory, 3}}) {
    Job(ranks, medium, {}, {}).run([&, ranks = ranks](Transport& transport) {
      std::vector<int64_t> counts(ranks, kCount / ranks);
      counts.back() += kCount % ranks;
      std::vector<double> in(kCount), out(counts[transport.rank()]);
      const int64_t begin = transport.rank() * counts[0];
      for (int round = 0; round < (is_sanitized() ? 3 : 25); ++round) {
        for (int64_t i = 0; i < kCount; ++i) {  // integers: exact in any order
          in[i] = static_cast<double>(i * (transport.rank() + 1) + round);
        }
        transport.reduce_scatter({DataType::kFloat64, ReduceOp::kSum}, in.data(), out.data(),
                                 counts);
        for (size_t i = 0; i < out.size(); ++i) {
          const double expected = static_cast<double>(
              (begin + static_cast<int64_t>(i)) * ranks * (ranks + 1) / 2 + round * ranks);
          if (out[i] != expected) check_eq(out[i], expected, std::to_string(i));
        }
      }
    });
  }
});

}  // namespace
}  // namespace hvdtorch::test
