// The hierarchical transport: every collective at 1 to 3 hosts of 1 to 4 ranks, placed in order and
// out of order, against what its definition says.
#include "transport/hierarchical.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "collective_checks.h"
#include "kernels/reduce_by_host.h"
#include "reduce_reference.h"
#include "simulated_hosts.h"

namespace hvdtorch::test {
namespace {

// By rank: its host.
const std::vector<std::vector<int>> kPlacements = {
    {0, 0, 1, 1},           // as launchers do
    {0, 1, 0, 1},           // in turn
    {1, 0, 0, 0, 1, 1},     // hosts are numbered by their lowest rank, whatever they are called
    {0, 0, 0, 0, 1},        // uneven
    {0, 1, 2, 2, 1, 2, 0},  // uneven and out of order, three hosts
    {0, 1, 1, 2, 2, 2, 2},  // uneven and in order
    {0, 1, 2},              // every rank a leader
    {3, 3, 3},              // one host
    {0},
};

void for_each_placement(const std::function<void(Transport&)>& body) {
  for (Medium inside : kMedia) {
    for (const auto& hosts : kPlacements) HostedJob(hosts, inside).run(body);
  }
}

// Elements of int32 around the edges of what crosses whole, and of stages and their slices.
const int64_t kCounts[] = {0,   1,   3,   63,  64,  65,  127, 128,  129,  149,  150,  151,
                           191, 192, 193, 255, 256, 257, 383, 384,  385,  511,  512,  513,
                           767, 768, 769, 777, 895, 896, 897, 1024, 1100, 1536, 1999, 5000};

const Case integers("allreduce of integers of every length around every edge, any bytes", [] {
  for_each_placement([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : kCounts) {
      check_allreduce(transport, {DataType::kInt32, ReduceOp::kSum}, count, ++round);
      check_allreduce(transport, {DataType::kUInt8, ReduceOp::kMax}, count, ++round);
      // Partial results are wider than the data, and the sum does not fit into it.
      check_allreduce(transport, {.dtype = DataType::kInt8, .op = ReduceOp::kAverage, .divisor = 3},
                      count, ++round);
    }
  });
});

const Case flat("allreduce that has no partial results is flat", [] {
  for_each_placement([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : {1, 100, 1000}) {
      check_allreduce(transport,
                      {.dtype = DataType::kInt64, .op = ReduceOp::kAverage, .divisor = 5}, count,
                      ++round);
      check_allreduce(transport, {DataType::kInt16, ReduceOp::kSum, 0.3, -1.7}, count, ++round);
    }
  });
});

// --- every dtype, in numbers whose sums and products are exact in whatever order ---

void set_number(DataType dtype, uint8_t* to, int value) {
  const auto put = [to](auto number) { std::memcpy(to, &number, sizeof number); };
  switch (dtype) {
    case DataType::kFloat32:
      return put(static_cast<float>(value));
    case DataType::kFloat64:
      return put(static_cast<double>(value));
    case DataType::kComplex64:
      put(static_cast<float>(value));
      to += sizeof(float);
      return put(static_cast<float>(1 - value));
    case DataType::kComplex128:
      put(static_cast<double>(value));
      to += sizeof(double);
      return put(static_cast<double>(1 - value));
    case DataType::kBool:
      return put(static_cast<uint8_t>(value & 1));
    default:
      break;
  }
  if (is_floating(dtype)) {
    const uint32_t code = encode(dtype, static_cast<float>(value));
    std::memcpy(to, &code, size_of(dtype));  // little-endian, as all that hvdtorch runs on
  } else {
    const auto whole = static_cast<int64_t>(value);
    std::memcpy(to, &whole, size_of(dtype));
  }
}

// The sign of a zero in a product of complex numbers depends on the order of the factors.
template <typename T>
bool same_parts(const uint8_t* a, const uint8_t* b) {
  T left[2], right[2];
  std::memcpy(left, a, sizeof left);
  std::memcpy(right, b, sizeof right);
  return left[0] == right[0] && left[1] == right[1];
}

bool same_number(DataType dtype, const uint8_t* a, const uint8_t* b) {
  if (dtype == DataType::kComplex64) return same_parts<float>(a, b);
  if (dtype == DataType::kComplex128) return same_parts<double>(a, b);
  return same_element(dtype, a, b);
}

Bytes numbers(DataType dtype, int64_t count, uint64_t round, int rank) {
  const Bytes random = input(round, rank, count);
  const int lowest = dtype == DataType::kFloat8E5M2Uz || is_floating(dtype) ? -2 : 0;
  Bytes result(count * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    set_number(dtype, result.data() + i * size_of(dtype), lowest + random[i] % 5);
  }
  return result;
}

Bytes slice_of(const Bytes& bytes, int64_t i, int64_t element) {
  return {bytes.begin() + i * element, bytes.begin() + (i + 1) * element};
}

void check_numbers(Transport& transport, const Reduction& reduction, int64_t count,
                   uint64_t round) {
  std::vector<Bytes> inputs;
  std::vector<const uint8_t*> srcs;
  for (int r = 0; r < transport.size(); ++r) {
    inputs.push_back(numbers(reduction.dtype, count, round, r));
  }
  for (const Bytes& bytes : inputs) srcs.push_back(bytes.data());
  const Bytes expected = reference_reduce(reduction, srcs, count);
  Bytes data = inputs[transport.rank()];
  transport.allreduce(reduction, data.data(), count);
  const int64_t element = size_of(reduction.dtype);
  for (int64_t i = 0; i < count; ++i) {
    check(same_number(reduction.dtype, data.data() + i * element, expected.data() + i * element),
          std::string(name_of(reduction.op)) + " of " + name_of(reduction.dtype) + ", element " +
              std::to_string(i) + " of " + std::to_string(count) + ": got " +
              show(slice_of(data, i, element)) + ", expected " +
              show(slice_of(expected, i, element)));
  }
}

const Case dtypes("allreduce of every dtype and op, with factors, short and long", [] {
  HostedJob({0, 1, 1, 0, 2}, Medium::kSharedMemory).run([](Transport& transport) {
    uint64_t round = 0;
    for (int d = 0; d < kNumDataTypes; ++d) {
      for (ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin,
                          ReduceOp::kMax}) {
        for (const auto& [pre, post] : {std::pair(1.0, 1.0), std::pair(0.5, 4.0)}) {
          const Reduction reduction{static_cast<DataType>(d), op, pre, post, transport.size()};
          if (!why_not_reducible(reduction).empty()) continue;
          for (int64_t count : {21, 1000}) check_numbers(transport, reduction, count, ++round);
        }
      }
    }
  });
});

// --- the order of sums ---

const Case by_host("sums of float32 are associated by host, in rank order in each", [] {
  HostedJob job({0, 1, 0, 1, 1});
  job.run([](Transport& transport) {
    for (int64_t count : {5, 3000}) {
      const auto at = [](int rank, int64_t i) {
        return std::ldexp(static_cast<float>(i * 7919 % 1000 + 1), rank * 5 % 17) / 3;
      };
      std::vector<float> data(count);
      for (int64_t i = 0; i < count; ++i) data[i] = at(transport.rank(), i);
      transport.allreduce({DataType::kFloat32, ReduceOp::kSum}, data.data(), count);
      int64_t unlike_flat = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float first = at(0, i) + at(2, i);
        const float second = at(1, i) + at(3, i) + at(4, i);
        check_eq(data[i], first + second, std::to_string(i));
        unlike_flat += data[i] != at(0, i) + at(1, i) + at(2, i) + at(3, i) + at(4, i);
      }
      check(unlike_flat > 0, "the numbers do not tell one order from the other");
    }
  });
});

// Any bits: whether a tensor travels in the log or through the transport depends on timing.
const Case as_in_the_log("floats of any bits get the bits that reduce_by_host() gives", [] {
  for (const auto& hosts : kPlacements) {
    HostedJob(hosts).run([&](Transport& transport) {
      uint64_t round = 0;
      for (DataType dtype : {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                             DataType::kFloat16, DataType::kFloat8E4M3, DataType::kComplex64}) {
        for (ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kProduct}) {
          for (int64_t count : {33, 900}) {
            const Reduction reduction{dtype, op, 0.3, -1.7, transport.size()};
            const int64_t element = size_of(dtype);
            std::vector<Bytes> inputs;
            std::vector<const void*> srcs;
            for (int r = 0; r < transport.size(); ++r) {
              inputs.push_back(input(round, r, count * element));
            }
            for (const Bytes& bytes : inputs) srcs.push_back(bytes.data());
            Bytes expected(count * element), data = inputs[transport.rank()];
            reduce_by_host(reduction, expected.data(), srcs, hosts, count);
            transport.allreduce(reduction, data.data(), count);
            for (int64_t i = 0; i < count; ++i) {
              check(same_element(dtype, data.data() + i * element, expected.data() + i * element),
                    std::string(name_of(op)) + " of " + name_of(dtype) + ", element " +
                        std::to_string(i));
            }
            ++round;
          }
        }
      }
    });
  }
});

const Case rounded_once("narrow floats are rounded once, after all hosts", [] {
  HostedJob job({0, 1, 0, 1});
  job.run([](Transport& transport) {
    for (int64_t count : {3, 2000}) {
      // 256 + 1 is 256 in bfloat16, and so is every sum that a rounding between the hosts gives.
      const float mine = transport.rank() == 0 ? 256.0f : 1.0f;
      const auto code = static_cast<uint16_t>(encode(DataType::kBFloat16, mine));
      std::vector<uint16_t> data(count, code);
      transport.allreduce({DataType::kBFloat16, ReduceOp::kSum}, data.data(), count);
      // 259 lies between 258 and 260, ties to even.
      for (uint16_t bits : data) check_eq(decode(DataType::kBFloat16, bits), 260.0);
    }
  });
});

// --- data movement ---

const Case broadcast("broadcast of every length from every root", [] {
  for_each_placement([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t bytes : {0, 1, 64, 255, 256, 257, 1000, 5000}) {
      for (int root = 0; root < transport.size(); ++root) {
        check_broadcast(transport, bytes, root, ++round);
      }
    }
  });
});

const Case allgather("allgather of even and uneven parts, some empty", [] {
  for_each_placement([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : {0, 1, 17, 64, 300, 2000}) {
      std::vector<int64_t> bytes(transport.size(), count);
      check_allgather(transport, bytes, ++round);
      for (size_t r = 0; r < bytes.size(); ++r) bytes[r] = (r + round) % 3 * count;
      check_allgather(transport, bytes, ++round);
    }
  });
});

const Case others("alltoall and reduce_scatter, even and uneven", [] {
  for_each_placement([](Transport& transport) {
    uint64_t round = 0;
    for (int64_t count : {0, 1, 64, 700}) {
      std::vector<int64_t> bytes(transport.size() * transport.size(), count);
      check_alltoall(transport, bytes, round += 10);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i * 7 % 3 * count;
      check_alltoall(transport, bytes, round += 10);
      std::vector<int64_t> counts(transport.size(), count);
      for (size_t r = 0; r < counts.size(); ++r) counts[r] += r % 2;
      check_reduce_scatter(transport, {DataType::kFloat16, ReduceOp::kSum}, counts, ++round);
    }
  });
});

const Case adasum("adasum is that of all ranks", [] {
  for (const auto& hosts : kPlacements) {
    std::vector<float> expected(100);
    std::vector<std::vector<float>> inputs;
    std::vector<const void*> srcs;
    for (size_t r = 0; r < hosts.size(); ++r) {
      inputs.emplace_back();
      for (int i = 0; i < 100; ++i) {
        inputs.back().push_back(static_cast<float>(i * (r + 1) % 7) - 2.5f);
      }
    }
    for (const auto& one : inputs) srcs.push_back(one.data());
    const Reduction reduction{DataType::kFloat32, ReduceOp::kAdasum};
    reduce(reduction, expected.data(), srcs.data(), static_cast<int>(srcs.size()), 100);
    HostedJob(hosts).run([&](Transport& transport) {
      std::vector<float> data = inputs[transport.rank()];
      transport.adasum(reduction, data.data(), {{0, 100}});
      check_eq(data, expected);
    });
  }
});

const Case barrier("no rank leaves a barrier before all have entered", [] {
  for (const auto& hosts : kPlacements) {
    std::atomic<int> entered{0};
    HostedJob(hosts).run([&](Transport& transport) {
      for (int round = 1; round <= 30; ++round) {
        ++entered;
        transport.barrier();
        check(entered >= round * transport.size(), "left early");
      }
    });
  }
});

// --- all together ---

void random_round(Transport& transport, std::mt19937_64& random) {
  const int ranks = transport.size();
  const uint64_t round = random();
  const auto length = [&] { return static_cast<int64_t>(random() % 4 == 0 ? 0 : random() % 3000); };
  const auto lengths = [&](int n) {
    std::vector<int64_t> all(n);
    for (int64_t& one : all) one = length();
    return all;
  };
  const DataType integers[] = {DataType::kUInt8, DataType::kInt16, DataType::kInt32,
                               DataType::kInt64};
  const ReduceOp ops[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin};
  const Reduction reduction{integers[random() % 4], ops[random() % 3], 1.0, 1.0, ranks};
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

const Case random_rounds("100 random collectives in a row", [] {
  const uint64_t seed = std::random_device{}();
  for (const auto& hosts : kPlacements) {
    HostedJob(hosts, Medium::kSharedMemory).run([&](Transport& transport) {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 100; ++i) {
        try {
          random_round(transport, random);
        } catch (const CheckFailure& failure) {
          fail("seed " + std::to_string(seed) + ", round " + std::to_string(i) + ": " +
               failure.what());
        }
      }
    });
  }
});

}  // namespace
}  // namespace hvdtorch::test
