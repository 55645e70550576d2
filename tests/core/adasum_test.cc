// Adasum against its formula in long double, at 1 to 8 ranks, and what becomes of it when it
// cannot go on. Also that reduce() and the collective give the same bits.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <random>
#include <thread>

#include "check.h"
#include "kernels/adasum_cpu.h"
#include "reduce_reference.h"
#include "simulated_job.h"

namespace hvdtorch::test {
namespace {

constexpr int kMostRanks = 8;
constexpr DataType kDataTypes[] = {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32,
                                   DataType::kFloat64};

using Vector = std::vector<long double>;

// --- elements of any dtype as numbers ---

long double element_at(DataType dtype, const Bytes& bytes, int64_t i) {
  const uint8_t* const from = bytes.data() + i * size_of(dtype);
  if (dtype == DataType::kFloat64) {
    double value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  if (dtype == DataType::kFloat32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  uint16_t code;
  std::memcpy(&code, from, sizeof code);
  return decode(dtype, code);
}

void set_element(DataType dtype, Bytes& bytes, int64_t i, double value) {
  uint8_t* const to = bytes.data() + i * size_of(dtype);
  if (dtype == DataType::kFloat64) {
    std::memcpy(to, &value, sizeof value);
  } else if (dtype == DataType::kFloat32) {
    const auto single = static_cast<float>(value);
    std::memcpy(to, &single, sizeof single);
  } else {
    const auto code = static_cast<uint16_t>(encode(dtype, static_cast<float>(value)));
    std::memcpy(to, &code, sizeof code);
  }
}

Bytes elements(DataType dtype, const std::vector<double>& values) {
  Bytes bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) set_element(dtype, bytes, i, values[i]);
  return bytes;
}

Vector numbers(DataType dtype, const Bytes& bytes) {
  Vector values;
  for (size_t i = 0; i < bytes.size() / size_of(dtype); ++i) {
    values.push_back(element_at(dtype, bytes, i));
  }
  return values;
}

// Half the distance between neighbouring values of the dtype around 1.
double rounding_of(DataType dtype) {
  if (dtype == DataType::kFloat64) return 0x1p-53;
  if (dtype == DataType::kFloat32) return 0x1p-24;
  return dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

double smallest_of(DataType dtype) {
  if (dtype == DataType::kFloat64) return 0x1p-1074;
  if (dtype == DataType::kFloat32) return 0x1p-149;
  return dtype == DataType::kFloat16 ? 0x1p-24 : 0x1p-133;
}

// --- the formula ---

long double dot(const Vector& x, const Vector& y) {
  long double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

Vector pair_of(const Vector& a, const Vector& b) {
  const long double ab = dot(a, b), aa = dot(a, a), bb = dot(b, b);
  const long double of_a = aa < 1.5e-154L ? 1 : 1 - ab / (2 * aa);
  const long double of_b = bb < 1.5e-154L ? 1 : 1 - ab / (2 * bb);
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}

// Each rank on its own, told by nothing but the definition: at distance 1, 2, 4, ... rank r is
// combined with rank r xor distance.
Vector formula(std::vector<Vector> ranks) {
  size_t power = 1;
  while (2 * power <= ranks.size()) power *= 2;
  for (size_t r = power; r < ranks.size(); ++r)
    ranks[r - power] = pair_of(ranks[r - power], ranks[r]);
  ranks.resize(power);
  for (size_t distance = 1; distance < power; distance *= 2) {
    std::vector<Vector> next;
    for (size_t r = 0; r < power; ++r) {
      next.push_back(pair_of(ranks[std::min(r, r ^ distance)], ranks[std::max(r, r ^ distance)]));
    }
    ranks = next;
  }
  return ranks[0];
}

// Every rank's adasum() of its bytes; all must end alike.
Bytes run_adasum(const Reduction& reduction, const std::vector<Bytes>& inputs,
                 const std::vector<Span>& tensors) {
  std::vector<Bytes> results;
  for (Medium medium : kMedia) {
    Job job(static_cast<int>(inputs.size()), medium);
    const size_t first = results.size();
    results.insert(results.end(), inputs.begin(), inputs.end());
    job.run([&](Transport& transport) {
      transport.adasum(reduction, results[first + transport.rank()].data(), tensors);
    });
  }
  for (const Span& tensor : tensors) {
    const int64_t size = size_of(reduction.dtype);
    for (const Bytes& result : results) {
      check(std::equal(result.begin() + tensor.offset * size,
                       result.begin() + (tensor.offset + tensor.count) * size,
                       results[0].begin() + tensor.offset * size),
            "ranks hold different bits");
    }
  }
  return results[0];
}

Bytes run_adasum(DataType dtype, const std::vector<Bytes>& inputs) {
  const auto count = static_cast<int64_t>(inputs[0].size()) / size_of(dtype);
  return run_adasum({dtype, ReduceOp::kAdasum}, inputs, {{0, count}});
}

Bytes random_elements(DataType dtype, int64_t count, double shift, std::mt19937_64& random) {
  std::uniform_real_distribution<double> draw(-1, 1);
  std::vector<double> values(count);
  for (double& value : values) value = draw(random) + shift;
  return elements(dtype, values);
}

// Within the rounding of `steps` combinations of values of at most `magnitude`.
void check_near(DataType dtype, const Bytes& actual, int64_t offset, const Vector& expected,
                int steps, const std::string& what) {
  const double computed = rounding_of(dtype == DataType::kFloat64 ? dtype : DataType::kFloat32);
  long double magnitude = 0;
  for (long double value : expected) magnitude = std::max(magnitude, std::fabs(value));
  const long double allowed =
      magnitude * (rounding_of(dtype) + 16 * steps * computed) + smallest_of(dtype);
  for (size_t i = 0; i < expected.size(); ++i) {
    const long double value = element_at(dtype, actual, offset + i);
    if (!(std::fabs(value - expected[i]) <= allowed)) {
      fail(what + ", element " + std::to_string(i) + ": got " + show(value) + ", expected " +
           show(expected[i]) + " within " + show(allowed));
    }
  }
}

// --- cases ---

const Case values("every dtype at 1 to 8 ranks, several tensors with gaps, odd lengths", [] {
  std::mt19937_64 random(20250107);
  const std::vector<Span> tensors = {{0, 1}, {3, 17}, {20, 0}, {24, 300}, {331, 4099}};
  const int64_t total = 4435;
  for (DataType dtype : kDataTypes) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      std::vector<Bytes> inputs;
      for (int r = 0; r < ranks; ++r) {
        inputs.push_back(random_elements(dtype, total, 0.25 * r, random));
      }
      const Bytes result = run_adasum({dtype, ReduceOp::kAdasum}, inputs, tensors);
      Bytes rest = result;
      for (const Span& tensor : tensors) {
        std::vector<Vector> parts;
        for (const Bytes& input : inputs) {
          const Vector all = numbers(dtype, input);
          parts.emplace_back(all.begin() + tensor.offset,
                             all.begin() + tensor.offset + tensor.count);
        }
        check_near(dtype, result, tensor.offset, formula(parts), ranks,
                   std::string(name_of(dtype)) + " at " + std::to_string(ranks) + " ranks, " +
                       std::to_string(tensor.count) + " elements");
        const int64_t size = size_of(dtype);
        std::copy_n(inputs[0].begin() + tensor.offset * size, tensor.count * size,
                    rest.begin() + tensor.offset * size);
      }
      check(rest == inputs[0], "a gap was written to");
    }
  }
});

const Case factors("prescale and postscale apply around it", [] {
  std::mt19937_64 random(5);
  for (DataType dtype : kDataTypes) {
    for (int ranks : {1, 2, 3, 4}) {
      std::vector<Bytes> inputs;
      std::vector<Vector> scaled;
      for (int r = 0; r < ranks; ++r) {
        inputs.push_back(random_elements(dtype, 77, 0.5, random));
        scaled.push_back(numbers(dtype, inputs.back()));
        for (long double& value : scaled.back()) value *= 0.25;
      }
      Vector expected = formula(scaled);
      for (long double& value : expected) value *= -3;
      check_near(dtype, run_adasum({dtype, ReduceOp::kAdasum, 0.25, -3}, inputs, {{0, 77}}), 0,
                 expected, ranks, name_of(dtype));
    }
  }
});

const Case rounded_once("narrow floats are scaled and combined in float32, rounded once", [] {
  // 40000 * 4 is no float16, but the parallel vectors' average times 1/4 is.
  const Bytes large = elements(DataType::kFloat16, {40000, 0, -40000});
  check(run_adasum({DataType::kFloat16, ReduceOp::kAdasum, 4, 0.25}, {large, large}, {{0, 3}}) ==
        large);
  // Orthogonal throughout; the first two add up to (257, -255, 2), and 257 is no bfloat16.
  const auto bfloat16 = [](double x, double y, double z) {
    return elements(DataType::kBFloat16, {x, y, z});
  };
  check(run_adasum(DataType::kBFloat16, {bfloat16(256, 1, 2), bfloat16(1, -256, 0),
                                         bfloat16(1, 1, -1), bfloat16(0, 0, 0)}) ==
        bfloat16(258, -254, 1));
});

const Case orthogonal("orthogonal vectors are added, exactly", [] {
  for (DataType dtype : kDataTypes) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      std::vector<Bytes> inputs;
      std::vector<double> sum(ranks);
      for (int r = 0; r < ranks; ++r) {
        std::vector<double> axis(ranks);
        axis[r] = sum[r] = 2 * r - 3;
        inputs.push_back(elements(dtype, axis));
      }
      check(run_adasum(dtype, inputs) == elements(dtype, sum), name_of(dtype));
    }
  }
});

const Case parallel("equal vectors stay what they are, opposite ones cancel, exactly", [] {
  const std::vector<double> some = {1, -2, 3.5, 0.0078125};
  for (DataType dtype : kDataTypes) {
    const Bytes same = elements(dtype, some);
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      check(run_adasum(dtype, std::vector<Bytes>(ranks, same)) == same, name_of(dtype));
    }
    const Vector none =
        numbers(dtype, run_adasum(dtype, {same, elements(dtype, {-1, 2, -3.5, -0.0078125})}));
    for (long double value : none) check_eq(value, 0.0L);
    // Parallel of different lengths: x and 3x give (1 - 3/2) x + (1 - 1/6) 3x = 2x.
    check_near(dtype, run_adasum(dtype, {same, elements(dtype, {3, -6, 10.5, 0.0234375})}), 0,
               {2, -4, 7, 0.015625}, 1, name_of(dtype));
  }
});

const Case zeros("a zero vector leaves the other as it is, with no NaN", [] {
  for (DataType dtype : kDataTypes) {
    const Bytes zero = elements(dtype, {0, 0, 0}), some = elements(dtype, {1.5, -2, 0});
    check(run_adasum(dtype, {zero, some}) == some);
    check(run_adasum(dtype, {some, zero}) == some);
    check(run_adasum(dtype, {zero, zero, zero}) == zero);
    check(run_adasum(dtype, {zero, zero, zero, zero, some}) == some);
  }
});

const Case tiny("below a squared norm of 1.5e-154 vectors are added; subnormals survive", [] {
  const double under = 1.2e-77, over = 1.3e-77;  // squares: 1.44e-154, 1.69e-154
  const auto both = [](double x) {
    const Bytes one = elements(DataType::kFloat64, {x});
    return static_cast<double>(
        element_at(DataType::kFloat64, run_adasum(DataType::kFloat64, {one, one}), 0));
  };
  check_eq(both(under), 2 * under);
  check_eq(both(over), over);
  check_eq(both(0x1p-1074), 0x1p-1073);
  // Each of the two has its own norm.
  const Bytes mixed = run_adasum(DataType::kFloat64, {elements(DataType::kFloat64, {under}),
                                                      elements(DataType::kFloat64, {over})});
  check_near(DataType::kFloat64, mixed, 0, {under + (1 - under / (2 * over)) * over}, 1, "mixed");
  // Subnormal float16 and float32 are normal float64: their products do not vanish.
  for (DataType dtype : {DataType::kFloat16, DataType::kFloat32, DataType::kBFloat16}) {
    const Bytes small = elements(dtype, {smallest_of(dtype), 0, -3 * smallest_of(dtype)});
    check(run_adasum(dtype, {small, small}) == small, name_of(dtype));
  }
});

const Case not_finite("NaN and infinity on any rank make their tensor NaN, and no other", [] {
  for (DataType dtype : kDataTypes) {
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL}) {
      for (int from = 0; from < 3; ++from) {
        std::vector<Bytes> inputs(3, elements(dtype, {1, 2, 3, 4}));
        set_element(dtype, inputs[from], 1, bad);
        const Vector result =
            numbers(dtype, run_adasum({dtype, ReduceOp::kAdasum}, inputs, {{0, 2}, {2, 2}}));
        check(std::isnan(result[0]) && std::isnan(result[1]), name_of(dtype));
        check_eq(result[2], 3.0L);
        check_eq(result[3], 4.0L);
      }
    }
  }
});

const Case long_sums("the products of a long tensor do not drift", [] {
  const int64_t count = 1 << 18;
  std::vector<float> a(count, 0.1f), b(count, 0.1f);
  b[0] = 1000.0f;
  const long double x = 0.1f, aa = count * x * x;
  const long double ab = (count - 1) * x * x + x * 1000, bb = (count - 1) * x * x + 1e6L;
  const long double last = (1 - ab / (2 * aa)) * x + (1 - ab / (2 * bb)) * x;
  adasum_combine(DataType::kFloat32, a.data(), a.data(), b.data(), count);
  check_eq(a[count - 1], static_cast<float>(last));
});

const Case in_one_place("reduce() gives the same bits as the collective, wherever it writes", [] {
  std::mt19937_64 random(11);
  for (DataType dtype : kDataTypes) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      std::vector<Bytes> inputs;
      for (int r = 0; r < ranks; ++r) inputs.push_back(random_elements(dtype, 55, 0.1, random));
      const Reduction reduction{dtype, ReduceOp::kAdasum, 0.37, 1.7};
      const Bytes expected = run_adasum(reduction, inputs, {{0, 55}});
      for (int into = -1; into < ranks; ++into) {
        std::vector<Bytes> buffers = inputs;
        std::vector<const void*> srcs;
        for (const Bytes& buffer : buffers) srcs.push_back(buffer.data());
        Bytes own(expected.size());
        Bytes& dst = into < 0 ? own : buffers[into];
        reduce(reduction, dst.data(), srcs.data(), ranks, 55);
        check(dst == expected, std::string(name_of(dtype)) + " of " + std::to_string(ranks));
      }
    }
  }
});

const Case nothing("no tensors, and tensors of no elements", [] {
  for (Medium medium : kMedia) {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      Job(ranks, medium).run([](Transport& transport) {
        transport.adasum({DataType::kFloat32, ReduceOp::kAdasum}, nullptr, {});
        transport.adasum({DataType::kFloat16, ReduceOp::kAdasum}, nullptr, {{0, 0}, {0, 0}});
        transport.barrier();
      });
    }
  }
});

const Case among_others("between other collectives, round after round, over all tags", [] {
  Job(3, Medium::kLinks).run([](Transport& transport) {
    for (int i = 0; i < 600; ++i) {
      float axis[3] = {};
      axis[transport.rank()] = static_cast<float>(i + 1);
      transport.adasum({DataType::kFloat32, ReduceOp::kAdasum}, axis, {{0, 3}});
      for (float value : axis) check_eq(value, static_cast<float>(i + 1));
      int32_t one = 1;
      transport.allreduce({DataType::kInt32, ReduceOp::kSum}, &one, 1);
      check_eq(one, 3);
    }
  });
});

// --- failures ---

void small_adasum(Transport& transport) {
  std::vector<float> data(500, 1.0f);
  transport.adasum({DataType::kFloat32, ReduceOp::kAdasum}, data.data(), {{0, 200}, {250, 250}});
}

const Case aborted("abort() ends it on a rank in every part of the tree", [] {
  for (int ranks : {2, 3, 4, 6, 7}) {
    for (int absent = 0; absent < ranks; ++absent) {
      Job job(ranks, kMedia[absent % 2]);
      std::vector<std::future<std::string>> blocked;
      for (int r = 0; r < ranks; ++r) {
        if (r == absent) continue;
        blocked.push_back(std::async(std::launch::async, [&, r] {
          return check_throws<TransportError>([&] { small_adasum(*job.transports[r]); });
        }));
      }
      for (auto& transport : job.transports) transport->abort("rank was lost");
      for (auto& why : blocked) check_contains(why.get(), "rank was lost");
    }
  }
});

const Case racing("abort() at any time, of ranks that are busy", [] {
  for (int round = 0; round < 40; ++round) {
    Job job(5, kMedia[round % 2]);
    std::atomic<int> rounds{0};
    std::jthread aborter([&](const std::stop_token& stop) {
      while (rounds < 5 * round && !stop.stop_requested()) std::this_thread::yield();
      for (auto& transport : job.transports) transport->abort("stop");
    });
    job.run([&](Transport& transport) {
      const std::string why = check_throws<TransportError>([&] {
        for (;; ++rounds) small_adasum(transport);
      });
      check_eq(why, std::string("stop"));
    });
  }
});

const Case vanished("a peer that vanishes fails it, and all later ones alike", [] {
  for (int ranks : {2, 3, 4}) {
    Job job(ranks, Medium::kLinks);
    Transport& transport = *job.transports[0];
    auto blocked = std::async(std::launch::async, [&] {
      return check_throws<TransportError>([&] { small_adasum(transport); });
    });
    for (int r = 1; r < ranks; ++r) {
      job.transports[r].reset();
      job.links[r].reset();
    }
    const std::string why = blocked.get();
    check_contains(why, "is gone");
    check_eq(check_throws<TransportError>([&] { small_adasum(transport); }), why);
  }
});

}  // namespace
}  // namespace hvdtorch::test
