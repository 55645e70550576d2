#include "kernels/adasum_cpu.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/float_formats.h"

namespace hvdtorch {
namespace {

// Sums run in kLanes separate accumulators, so that they vectorise, and start anew every kBlock
// elements, so that rounding errors do not grow with the tensor.
constexpr int kLanes = 16;
constexpr int64_t kBlock = 4096;

// --- formats: how a dtype is stored, and what it is computed in ---

template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T widen(T stored) { return stored; }
  static T narrow(T value) { return value; }
};

template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
struct Narrow {
  using Stored = uint16_t;
  using Value = float;
  static float widen(uint16_t stored) { return kWiden(stored); }
  static uint16_t narrow(float value) { return kNarrow(value); }
};

template <typename Body>
void with_format(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::kFloat16:
      return body(Narrow<float16_to_float, float_to_float16>{});
    case DataType::kBFloat16:
      return body(Narrow<bfloat16_to_float, float_to_bfloat16>{});
    case DataType::kFloat32:
      return body(Plain<float>{});
    case DataType::kFloat64:
      return body(Plain<double>{});
    default:
      throw std::logic_error(std::string("Adasum of ") + name_of(dtype));
  }
}

// --- two vectors ---

struct Products {
  double aa = 0, bb = 0, ab = 0;
};

template <typename T>
Products products_of_block(const T* a, const T* b, int64_t count) {
  double aa[kLanes] = {}, bb[kLanes] = {}, ab[kLanes] = {};
  const auto add = [&](int lane, int64_t i) {
    const double x = a[i], y = b[i];
    aa[lane] += x * x;
    bb[lane] += y * y;
    ab[lane] += x * y;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
  }
  for (int lane = 0; i + lane < count; ++lane) add(lane, i + lane);
  Products sum;
  for (int lane = 0; lane < kLanes; ++lane) {
    sum.aa += aa[lane];
    sum.bb += bb[lane];
    sum.ab += ab[lane];
  }
  return sum;
}

template <typename T>
Products products_of(const T* a, const T* b, int64_t count) {
  Products sum;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const Products block = products_of_block(a + begin, b + begin, std::min(kBlock, count - begin));
    sum.aa += block.aa;
    sum.bb += block.bb;
    sum.ab += block.ab;
  }
  return sum;
}

double coefficient(double ab, double squared_norm) {
  return squared_norm < kAdasumLeastSquaredNorm ? 1.0 : 1.0 - 0.5 * (ab / squared_norm);
}

template <typename T>
void combine(T* out, const T* a, const T* b, int64_t count) {
  const Products products = products_of(a, b, count);
  const double of_a = coefficient(products.ab, products.aa);
  const double of_b = coefficient(products.ab, products.bb);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(of_a * a[i] + of_b * b[i]);
}

}  // namespace

bool has_adasum(DataType dtype) noexcept { return is_floating(dtype) && size_of(dtype) >= 2; }

int64_t adasum_value_size(DataType dtype) noexcept {
  return dtype == DataType::kFloat64 ? sizeof(double) : sizeof(float);
}

int adasum_power_of_two(int ranks) noexcept {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
}

void adasum_load(const Reduction& reduction, void* values, const void* from, int64_t count) {
  with_format(reduction.dtype, [&](auto format) {
    using Format = decltype(format);
    auto* const out = static_cast<typename Format::Value*>(values);
    const auto* const in = static_cast<const typename Format::Stored*>(from);
    if (reduction.prescale != 1.0) {
      const auto factor = static_cast<typename Format::Value>(reduction.prescale);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) out[i] = Format::widen(in[i]) * factor;
    } else if (values != from) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) out[i] = Format::widen(in[i]);
    }
  });
}

void adasum_store(const Reduction& reduction, void* to, const void* values, int64_t count) {
  with_format(reduction.dtype, [&](auto format) {
    using Format = decltype(format);
    auto* const out = static_cast<typename Format::Stored*>(to);
    const auto* const in = static_cast<const typename Format::Value*>(values);
    if (reduction.postscale != 1.0) {
      const auto factor = static_cast<typename Format::Value>(reduction.postscale);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) out[i] = Format::narrow(in[i] * factor);
    } else if (to != values) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) out[i] = Format::narrow(in[i]);
    }
  });
}

void adasum_combine(DataType dtype, void* out, const void* a, const void* b, int64_t count) {
  with_format(dtype, [&](auto format) {
    using Value = typename decltype(format)::Value;
    combine(static_cast<Value*>(out), static_cast<const Value*>(a), static_cast<const Value*>(b),
            count);
  });
}

void adasum_reduce(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
                   int64_t count) {
  const int64_t stride = count * adasum_value_size(reduction.dtype);
  std::vector<double> memory((nsrc * stride + 7) / 8);  // aligned for every value
  auto* const first = reinterpret_cast<std::byte*>(memory.data());
  const auto vector_of = [&](int rank) { return first + rank * stride; };
  const auto fold = [&](int a, int b) {
    adasum_combine(reduction.dtype, vector_of(a), vector_of(a), vector_of(b), count);
  };
  for (int r = 0; r < nsrc; ++r) adasum_load(reduction, vector_of(r), srcs[r], count);
  const int power = adasum_power_of_two(nsrc);
  for (int r = power; r < nsrc; ++r) fold(r - power, r);
  for (int distance = 1; distance < power; distance *= 2) {
    for (int r = 0; r < power; r += 2 * distance) fold(r, r + distance);
  }
  adasum_store(reduction, dst, first, count);
}

}  // namespace hvdtorch
