// Every collective of every host transport, at 1 to 5 ranks, against what its definition says.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "check.h"
#include "simulated_job.h"

namespace hvdtorch::test {
namespace {

constexpr int kMostRanks = 5;

// What rank `rank` brings to collective `round`: any bytes, the same whenever asked.
Bytes input(uint64_t round, int rank, int64_t bytes) {
  std::mt19937_64 random(round * 64 + rank);
  std::vector<uint64_t> words(bytes / 8 + 1);
  for (uint64_t& word : words) word = random();
  Bytes data(bytes);
  std::copy_n(reinterpret_cast<const uint8_t*>(words.data()), bytes, data.begin());
  return data;
}

Bytes joined(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes reduced(const Reduction& reduction, const std::vector<Bytes>& inputs, int64_t count) {
  Bytes result(count * size_of(reduction.dtype));
  std::vector<const void*> srcs;
  for (const Bytes& bytes : inputs) srcs.push_back(bytes.data());
  reduce(reduction, result.data(), srcs.data(), static_cast<int>(srcs.size()), count);
  return result;
}

Bytes slice(const Bytes& bytes, int64_t begin, int64_t length) {
  return {bytes.begin() + begin, bytes.begin() + begin + length};
}

void check_same(const Bytes& actual, const Bytes& expected, const std::string& what,
                const Where& where = Where::current()) {
  check_eq(actual.size(), expected.size(), what, where);
  const auto differ = std::mismatch(actual.begin(), actual.end(), expected.begin());
  if (differ.first != actual.end()) {
    fail(what + ": byte " + std::to_string(differ.first - actual.begin()) + " of " +
             std::to_string(actual.size()) + " differs",
         where);
  }
}

std::string text_of(const char* what, const Transport& transport, int64_t size) {
  return std::string(what) + " of " + std::to_string(size) + ", rank " +
         std::to_string(transport.rank()) + " of " + std::to_string(transport.size());
}

// --- one collective each, checked on every rank ---

void check_allreduce(Transport& transport, const Reduction& reduction, int64_t count,
                     uint64_t round) {
  const int64_t bytes = count * size_of(reduction.dtype);
  std::vector<Bytes> inputs;
  for (int r = 0; r < transport.size(); ++r) inputs.push_back(input(round, r, bytes));
  Bytes data = inputs[transport.rank()];
  transport.allreduce(reduction, data.data(), count);
  check_same(data, reduced(reduction, inputs, count), text_of("allreduce", transport, count));
}

void check_reduce_scatter(Transport& transport, const Reduction& reduction,
                          const std::vector<int64_t>& counts, uint64_t round) {
  const int64_t element = size_of(reduction.dtype);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t before =
      std::accumulate(counts.begin(), counts.begin() + transport.rank(), int64_t{0});
  const int64_t own = counts[transport.rank()];
  std::vector<Bytes> inputs;
  for (int r = 0; r < transport.size(); ++r) inputs.push_back(input(round, r, total * element));
  Bytes out(own * element);
  transport.reduce_scatter(reduction, inputs[transport.rank()].data(), out.data(), counts);
  check_same(out, slice(reduced(reduction, inputs, total), before * element, own * element),
             text_of("reduce_scatter", transport, total));
}

void check_allgather(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round) {
  std::vector<Bytes> parts;
  for (int r = 0; r < transport.size(); ++r) parts.push_back(input(round, r, bytes[r]));
  const Bytes expected = joined(parts);
  const std::string what = text_of("allgather", transport, expected.size());
  Bytes out(expected.size());
  transport.allgather(parts[transport.rank()].data(), out.data(), bytes);
  check_same(out, expected, what);

  Bytes in_place(expected.size());  // with the own part where it will be
  const int64_t own = std::accumulate(bytes.begin(), bytes.begin() + transport.rank(), int64_t{0});
  std::copy(parts[transport.rank()].begin(), parts[transport.rank()].end(), in_place.begin() + own);
  transport.allgather(in_place.data() + own, in_place.data(), bytes);
  check_same(in_place, expected, what + " in place");
}

void check_broadcast(Transport& transport, int64_t bytes, int root, uint64_t round) {
  Bytes data = input(round, transport.rank(), bytes);
  transport.broadcast(data.data(), bytes, root);
  check_same(data, input(round, root, bytes),
             text_of("broadcast", transport, bytes) + " from " + std::to_string(root));
}

// bytes[from * P + to]
void check_alltoall(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round) {
  const int ranks = transport.size(), me = transport.rank();
  std::vector<int64_t> sent, received;
  std::vector<Bytes> in, expected;
  for (int r = 0; r < ranks; ++r) {
    sent.push_back(bytes[me * ranks + r]);
    received.push_back(bytes[r * ranks + me]);
    in.push_back(input(round + r, me, sent.back()));
    expected.push_back(input(round + me, r, received.back()));
  }
  const Bytes in_bytes = joined(in), expected_bytes = joined(expected);
  Bytes out(expected_bytes.size());
  transport.alltoall(in_bytes.data(), sent, out.data(), received);
  check_same(out, expected_bytes, text_of("alltoall", transport, out.size()));
}

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
