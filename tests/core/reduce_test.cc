// The CPU reduction kernels against a plain reference, and the rules' exact examples.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "kernels/reduce_cpu.h"
#include "reduce_reference.h"

namespace hvdtorch::test {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

std::string text_of(const Reduction& reduction, int nsrc, int64_t count) {
  return std::string(name_of(reduction.op)) + " of " + std::to_string(nsrc) + " x " +
         std::to_string(count) + " " + name_of(reduction.dtype) + " prescale " +
         show(reduction.prescale) + " postscale " + show(reduction.postscale);
}

// Elements of any bits, but small enough that sums of floats are not all inf or NaN; bool is 0
// or 1.
std::vector<uint8_t> random_elements(DataType dtype, int64_t count, std::mt19937_64& random) {
  const int64_t size = size_of(dtype);
  std::vector<uint8_t> bytes(count * size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const int64_t part = is_complex(dtype) ? size / 2 : size;
  for (size_t i = 0; i < bytes.size(); i += part) {
    if (dtype == DataType::kBool) bytes[i] &= 1;
    // In three of four floats the topmost exponent bit is cleared: magnitudes below 2.
    if (!is_integer(dtype) && dtype != DataType::kBool && random() % 4 != 0) {
      bytes[i + part - 1] &= 0xbf;
    }
  }
  return bytes;
}

// Reduces into a buffer of its own (alias == -1) or into source `alias`, one element off the
// allocation's alignment, and compares every element.
void compare(const Reduction& reduction, int nsrc, int64_t count, int alias,
             std::mt19937_64& random) {
  const int64_t size = size_of(reduction.dtype);
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<const uint8_t*> srcs;
  for (int r = 0; r < nsrc; ++r) {
    buffers.push_back(random_elements(reduction.dtype, count + 1, random));
  }
  for (const auto& buffer : buffers) srcs.push_back(buffer.data() + size);
  const std::vector<uint8_t> expected = reference_reduce(reduction, srcs, count);
  std::vector<uint8_t> own((count + 1) * size);
  uint8_t* dst = (alias < 0 ? own : buffers[alias]).data() + size;
  const std::vector<const void*> pointers(srcs.begin(), srcs.end());
  reduce(reduction, dst, pointers.data(), nsrc, count);
  for (int64_t i = 0; i < count; ++i) {
    if (!same_element(reduction.dtype, dst + i * size, &expected[i * size])) {
      std::string bytes;
      for (int64_t b = 0; b < size; ++b) {
        bytes += " " + show(dst[i * size + b]) + "/" + show(expected[i * size + b]);
      }
      fail(text_of(reduction, nsrc, count) + " into " + std::to_string(alias) + ": element " +
           std::to_string(i) + ": bytes got/expected" + bytes);
    }
  }
}

void compare_all(DataType dtype, double prescale, double postscale,
                 const std::vector<int64_t>& counts) {
  std::mt19937_64 random(20240601 + static_cast<int>(dtype));
  int compared = 0;
  for (ReduceOp op : kOps) {
    for (int nsrc = 1; nsrc <= 5; ++nsrc) {
      const Reduction reduction{dtype, op, prescale, postscale, nsrc};
      if (!why_not_reducible(reduction).empty()) continue;
      for (int64_t count : counts) {
        for (int alias = -1; alias < nsrc; ++alias) {
          compare(reduction, nsrc, count, alias, random);
          ++compared;
        }
      }
    }
  }
  check(compared > 0 || dtype == DataType::kBool, "nothing was compared");
}

void for_every_dtype(double prescale, double postscale, const std::vector<int64_t>& counts) {
  for (int d = 0; d < kNumDataTypes; ++d) {
    compare_all(static_cast<DataType>(d), prescale, postscale, counts);
  }
}

const Case plain("every dtype and op, any sources, aliased or not",
                 [] { for_every_dtype(1.0, 1.0, {0, 1, 7, 100}); });

const Case scaled("every dtype and op with scale factors", [] {
  for_every_dtype(0.37, 1.0, {33});
  for_every_dtype(1.0, -0.25, {33});
  for_every_dtype(0.5, 0.75, {33});
});

const Case blocks("counts around the edges of blocks", [] {
  for (DataType dtype : {DataType::kFloat16, DataType::kFloat32, DataType::kInt64}) {
    std::mt19937_64 random(7);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      for (int64_t count : {2047, 2048, 2049, 4095, 4096, 4097, 6145}) {
        for (int alias : {-1, 0, 1, 2}) compare({dtype, op, 1, 1, 3}, 3, count, alias, random);
      }
    }
  }
});

// reduce() of one element per rank.
template <typename T>
T reduced(Reduction reduction, const std::vector<T>& values) {
  std::vector<const void*> srcs;
  for (const T& value : values) srcs.push_back(&value);
  reduction.divisor = static_cast<int64_t>(values.size());
  T result{};
  reduce(reduction, &result, srcs.data(), static_cast<int>(values.size()), 1);
  return result;
}

float reduced_narrow(DataType dtype, ReduceOp op, const std::vector<float>& values) {
  std::vector<uint16_t> codes;
  for (float value : values) codes.push_back(static_cast<uint16_t>(encode(dtype, value)));
  return static_cast<float>(decode(dtype, reduced<uint16_t>({dtype, op}, codes)));
}

const Case narrow("float16 and bfloat16 are summed in float32 and rounded once", [] {
  const float tiny = std::ldexp(1.0f, -24);
  const auto half = DataType::kFloat16, brain = DataType::kBFloat16;
  check_eq(reduced_narrow(half, ReduceOp::kAverage, {40000, 40000}), 40000.0f);
  check_eq(reduced_narrow(half, ReduceOp::kSum, {40000, 40000}), INFINITY);
  check_eq(reduced_narrow(half, ReduceOp::kAverage, {tiny, tiny}), tiny);
  check_eq(reduced_narrow(brain, ReduceOp::kSum, {256, 1, 1, 1}), 260.0f);
  check_eq(reduced_narrow(brain, ReduceOp::kAverage, {256, 1, 1, 1}), 65.0f);
});

template <typename T>
T average(DataType dtype, const std::vector<T>& values) {
  return reduced<T>({dtype, ReduceOp::kAverage}, values);
}

const Case integer_average("the average of integers is exact and truncates toward zero", [] {
  const int64_t big = int64_t{1} << 60;
  check_eq(average<int32_t>(DataType::kInt32, {-1, -2}), -1);
  check_eq(average<int32_t>(DataType::kInt32, {1, 2}), 1);
  check_eq(average<int32_t>(DataType::kInt32, {2, 3}), 2);
  check_eq(average<int32_t>(DataType::kInt32, {3, 4}), 3);
  check_eq(average<int64_t>(DataType::kInt64, {big + 3, big + 1}), big + 2);
  const int64_t least = std::numeric_limits<int64_t>::min();
  check_eq(average<int64_t>(DataType::kInt64, {least, least, least}), least);
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  check_eq(average<uint64_t>(DataType::kUInt64, {most, most - 2}), most - 1);
  check_eq(average<uint8_t>(DataType::kUInt8, {200, 100}), 150);
  check_eq(average<int8_t>(DataType::kInt8, {127, 127, 127}), 127);
});

const Case integer_scale("a scaled integer truncates toward zero, before and after", [] {
  const int32_t inputs[] = {1, 2, 3, -3}, expected[] = {0, 2, 2, -2};
  for (int i = 0; i < 4; ++i) {
    check_eq(reduced<int32_t>({DataType::kInt32, ReduceOp::kSum, 0.5}, {inputs[i], inputs[i]}),
             expected[i]);
  }
  check_eq(reduced<int32_t>({DataType::kInt32, ReduceOp::kSum, 1.0, 0.5}, {-4, -3}), -3);
});

const Case out_of_range("scaling an integer out of range is defined: clamp to 64 bits, wrap", [] {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t least = std::numeric_limits<int64_t>::min();
  const auto scale = [](int64_t value, double by) {
    return reduced<int64_t>({DataType::kInt64, ReduceOp::kSum, by}, {value});
  };
  check_eq(scale(most, 4.0), most);
  check_eq(scale(most, -4.0), least);
  check_eq(scale(3, NAN), 0);
  check_eq(scale(3, INFINITY), most);
  const uint64_t half = uint64_t{1} << 63;
  const Reduction twice{DataType::kUInt64, ReduceOp::kSum, 1.5};
  check_eq(reduced<uint64_t>(twice, {half}), half + half / 2);
  check_eq(reduced<uint64_t>(twice, {half + half / 2}), std::numeric_limits<uint64_t>::max());
  check_eq(reduced<uint8_t>({DataType::kUInt8, ReduceOp::kSum, 2.0}, {200}), 144);
  check_eq(reduced<int8_t>({DataType::kInt8, ReduceOp::kSum, 2.0}, {100}), -56);
});

const Case wrapping("integer Sum and Product wrap", [] {
  check_eq(reduced<uint8_t>({DataType::kUInt8, ReduceOp::kSum}, {200, 100}), 44);
  check_eq(reduced<uint16_t>({DataType::kUInt16, ReduceOp::kProduct}, {65535, 65535}), 1);
  check_eq(reduced<int32_t>({DataType::kInt32, ReduceOp::kSum}, {2147483647, 1}),
           std::numeric_limits<int32_t>::min());
});

const Case logic("bool: Sum is or, Product is and, Min is and, Max is or", [] {
  for (uint8_t a : {0, 1}) {
    for (uint8_t b : {0, 1}) {
      const auto result = [&](ReduceOp op) {
        return reduced<uint8_t>({DataType::kBool, op}, {a, b});
      };
      check_eq(result(ReduceOp::kSum), a | b);
      check_eq(result(ReduceOp::kMax), a | b);
      check_eq(result(ReduceOp::kProduct), a & b);
      check_eq(result(ReduceOp::kMin), a & b);
    }
  }
});

const Case nan("Min and Max are NaN if any rank's value is", [] {
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const std::vector<float>& values :
         {std::vector<float>{NAN, 1, 2}, {1, NAN, 2}, {1, 2, NAN}, {NAN, NAN, 1}}) {
      check(std::isnan(reduced<float>({DataType::kFloat32, op}, values)));
      check(std::isnan(reduced_narrow(DataType::kFloat16, op, values)));
      check(std::isnan(reduced_narrow(DataType::kBFloat16, op, values)));
    }
  }
  check_eq(reduced<double>({DataType::kFloat64, ReduceOp::kMin}, {1, -INFINITY}), -INFINITY);
});

const Case refused("what has no meaning is refused with a reason", [] {
  const auto reason = [](DataType dtype, ReduceOp op, double pre = 1, int64_t divisor = 1) {
    return why_not_reducible({dtype, op, pre, 1.0, divisor});
  };
  check_contains(reason(DataType::kBool, ReduceOp::kAverage), "Average of bool has no meaning");
  check_contains(reason(DataType::kBool, ReduceOp::kSum, 2.0), "cannot be scaled");
  check_contains(reason(DataType::kComplex64, ReduceOp::kMin), "complex numbers have no order");
  check_contains(reason(DataType::kComplex128, ReduceOp::kMax), "complex numbers have no order");
  check_contains(reason(DataType::kFloat32, ReduceOp::kAverage, 1, 0), "divisor");
  int allowed = 0;
  for (int d = 0; d < kNumDataTypes; ++d) {
    const auto dtype = static_cast<DataType>(d);
    for (ReduceOp op : kOps) allowed += reason(dtype, op).empty();
  }
  check_eq(allowed, 5 * kNumDataTypes - 1 - 4);  // but Average of bool, Min and Max of complex
  for (DataType dtype : {DataType::kInt32, DataType::kBool, DataType::kComplex64,
                         DataType::kFloat8E4M3, static_cast<DataType>(200)}) {
    check_contains(reason(dtype, ReduceOp::kAdasum), "Adasum of " + std::string(name_of(dtype)));
  }
  for (DataType dtype :
       {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32, DataType::kFloat64}) {
    check_eq(reason(dtype, ReduceOp::kAdasum), std::string());
  }
  check(!reason(static_cast<DataType>(200), ReduceOp::kSum).empty());
  check(!reason(DataType::kFloat32, static_cast<ReduceOp>(200)).empty());
});

}  // namespace
}  // namespace hvdtorch::test
