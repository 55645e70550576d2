#include "kernels/reduce_scalar.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {
namespace {

__extension__ using Int128 = __int128;

// Sums of so many integers are still exact in the floats that the vector kernels average in.
constexpr int kMostAveraged16 = 256, kMostAveraged32 = 1 << 18;

// --- integers ---

template <typename T>
constexpr T wrapping_product(T a, T b) {
  // 1u: a product of two uint16 would be computed in int, and overflow it.
  return static_cast<T>(1u * static_cast<std::make_unsigned_t<T>>(a) *
                        static_cast<std::make_unsigned_t<T>>(b));
}

// The value truncated toward zero. NaN gives 0; what int64 (for uint64: uint64) cannot hold is
// clamped to it, and what is left wraps to T.
template <typename T>
T truncate_to(double value) {
  constexpr double kTwoTo63 = 9223372036854775808.0;
  if (value >= kTwoTo63) {
    if constexpr (std::is_same_v<T, uint64_t>) {
      return value < 2 * kTwoTo63 ? static_cast<uint64_t>(value)
                                  : std::numeric_limits<uint64_t>::max();
    }
    return static_cast<T>(std::numeric_limits<int64_t>::max());
  }
  if (value < -kTwoTo63) return static_cast<T>(std::numeric_limits<int64_t>::min());
  return value == value ? static_cast<T>(static_cast<int64_t>(value)) : T{0};
}

template <typename T>
T scale(T value, double factor) {
  return factor == 1.0 ? value : truncate_to<T>(static_cast<double>(value) * factor);
}

// Toward zero. Divisions are slow, those of 128 bits are library calls; so powers of two are
// shifts, and sums that fit are divided in 64 bits.
class Divider {
 public:
  explicit Divider(int64_t divisor)
      : divisor_(divisor),
        is_power_(std::has_single_bit(static_cast<uint64_t>(divisor))),
        shift_(std::countr_zero(static_cast<uint64_t>(divisor))) {}

  Int128 operator()(Int128 sum) const {
    if (is_power_) return (sum + (sum < 0 ? divisor_ - 1 : 0)) >> shift_;
    const auto low = static_cast<int64_t>(sum);
    return low == sum ? Int128{low / divisor_} : sum / divisor_;
  }

 private:
  int64_t divisor_;
  bool is_power_;
  int shift_;
};

template <typename T, ReduceOp kOp>
void integers(const Work& work) {
  const Divider divide(work.divisor);
  for (int64_t i = 0; i < work.count; ++i) {
    const auto value_of = [&](int r) {
      return scale(static_cast<const T*>(work.srcs[r])[i], work.prescale);
    };
    T result = value_of(0);
    if constexpr (kOp == ReduceOp::kAverage) {
      Int128 sum = result;
      for (int r = 1; r < work.nsrc; ++r) sum += value_of(r);
      result = static_cast<T>(divide(sum));
    } else {
      for (int r = 1; r < work.nsrc; ++r) {
        const T value = value_of(r);
        if constexpr (kOp == ReduceOp::kSum) {
          using Unsigned = std::make_unsigned_t<T>;
          result = static_cast<T>(static_cast<Unsigned>(result) + static_cast<Unsigned>(value));
        } else if constexpr (kOp == ReduceOp::kProduct) {
          result = wrapping_product(result, value);
        } else {
          result = (kOp == ReduceOp::kMin ? value < result : value > result) ? value : result;
        }
      }
    }
    result = scale(result, work.postscale);
    for (int d = 0; d < work.ndst; ++d) static_cast<T*>(work.dsts[d])[i] = result;
  }
}

template <typename T>
Kernel integer_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return integers<T, ReduceOp::kAverage>;
    case ReduceOp::kSum:
      return integers<T, ReduceOp::kSum>;
    case ReduceOp::kMin:
      return integers<T, ReduceOp::kMin>;
    case ReduceOp::kMax:
      return integers<T, ReduceOp::kMax>;
    case ReduceOp::kProduct:
      return integers<T, ReduceOp::kProduct>;
    case ReduceOp::kAdasum:
      return nullptr;
  }
  return nullptr;
}

template <typename Body>
auto with_integer(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::kUInt8:
      return body(uint8_t{});
    case DataType::kInt8:
      return body(int8_t{});
    case DataType::kUInt16:
      return body(uint16_t{});
    case DataType::kInt16:
      return body(int16_t{});
    case DataType::kUInt32:
      return body(uint32_t{});
    case DataType::kInt32:
      return body(int32_t{});
    case DataType::kUInt64:
      return body(uint64_t{});
    default:
      return body(int64_t{});
  }
}

// --- complex numbers ---

template <typename T>
struct Complex {
  T re, im;
};

// In blocks that stay in the cache, and simple loops over them, which compilers vectorise.
template <typename T>
void complex_product(const Work& work) {
  constexpr int64_t kBlock = 512;
  Complex<T> product[kBlock], scaled[kBlock];
  const auto scale_by = [](double factor, const Complex<T>* from, Complex<T>* to, int64_t n) {
    const auto by = static_cast<T>(factor);
    for (int64_t i = 0; i < n; ++i) to[i] = {from[i].re * by, from[i].im * by};
  };
  for (int64_t begin = 0; begin < work.count; begin += kBlock) {
    const int64_t n = std::min(kBlock, work.count - begin);
    const auto source = [&](int r, Complex<T>* block) {
      const auto* const from = static_cast<const Complex<T>*>(work.srcs[r]) + begin;
      if (work.prescale == 1.0) return from;
      scale_by(work.prescale, from, block, n);
      return static_cast<const Complex<T>*>(block);
    };
    std::memmove(product, source(0, product), n * sizeof(Complex<T>));
    for (int r = 1; r < work.nsrc; ++r) {
      const Complex<T>* const b = source(r, scaled);
      for (int64_t i = 0; i < n; ++i) {
        const Complex<T> a = product[i];
        product[i] = {a.re * b[i].re - a.im * b[i].im, a.re * b[i].im + a.im * b[i].re};
      }
    }
    if (work.postscale != 1.0) scale_by(work.postscale, product, product, n);
    for (int d = 0; d < work.ndst; ++d) {
      std::memcpy(static_cast<Complex<T>*>(work.dsts[d]) + begin, product, n * sizeof(Complex<T>));
    }
  }
}

}  // namespace

Kernel scalar_kernel(const Reduction& reduction, int nsrc) {
  const DataType dtype = reduction.dtype;
  if (is_complex(dtype) && reduction.op == ReduceOp::kProduct) {
    return dtype == DataType::kComplex64 ? complex_product<float> : complex_product<double>;
  }
  if (!is_integer(dtype)) return nullptr;
  const bool averages = reduction.op == ReduceOp::kAverage;
  const int64_t size = size_of(dtype);
  const int most = size == 4 ? kMostAveraged32 : kMostAveraged16;
  const bool scales = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (!scales && !(averages && (size == 8 || nsrc > most))) return nullptr;
  return with_integer(dtype,
                      [&](auto zero) { return integer_kernel<decltype(zero)>(reduction.op); });
}

void finish_average(const Reduction& reduction, void* dst, const int64_t* sums, int64_t count) {
  with_integer(reduction.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Divider divide(reduction.divisor);
    for (int64_t i = 0; i < count; ++i) static_cast<T*>(dst)[i] = static_cast<T>(divide(sums[i]));
  });
}

}  // namespace hvdtorch
