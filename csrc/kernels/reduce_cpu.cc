// The CPU reduction kernels: a table of dtype x op, filled from one skeleton.
//
// Words: a *format* says how one dtype is stored in memory (Stored) and what it is computed in
// (Value), and how to scale and divide a Value. An *op* combines two Values. The skeleton,
// reduce_blocks(), takes a format and an op and works in *blocks* of elements that fit in L1: it
// widens, scales, combines, finishes and rounds one block with one simple loop per step, which the
// compiler vectorises. Every loop is compiled twice on x86-64, for any processor and for those with
// AVX2 and F16C; neither has fused multiply-add, so both give the same bits.
//
// To add a dtype: a format, if none of those here fits, and one row of kTable.
// To add an op: an op struct and one column.
#include "kernels/reduce_cpu.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/adasum_cpu.h"
#include "kernels/float_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvdtorch {
namespace {

constexpr int64_t kBlock = 2048;  // elements: two blocks of float32 are 16 KiB

enum class Isa { kBaseline, kAvx2 };

__extension__ using Int128 = __int128;

template <typename T>
constexpr bool kIsInteger = std::is_integral_v<T> || sizeof(T) > sizeof(double);

// Wraps where signed arithmetic would be undefined. 128-bit values hold exact sums, never overflow.
template <typename T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

// --- ops ---

template <typename T>
struct Pair {  // a complex number
  T re, im;
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      // 1u: a product of two uint16 would be computed in int, and overflow it.
      return static_cast<T>(1u * static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
  template <typename T>
  static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// A NaN on either side is the result: `a` by the second test, `b` because both tests fail.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct Or {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a | b) != 0; }
};

struct And {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a != 0) & (b != 0); }
};

// --- formats ---

// Stored as it is computed: float32 and float64.
template <typename T>
struct Float {
  using Stored = T;
  using Value = T;
  using Factor = T;
  static Value scale(Value value, Factor factor) { return value * factor; }
  static Value divide(Value value, int64_t divisor) { return value / static_cast<T>(divisor); }
};

template <typename T>
struct Complex {
  using Stored = Pair<T>;
  using Value = Pair<T>;
  using Factor = T;
  static Value scale(Value value, Factor factor) { return {value.re * factor, value.im * factor}; }
};

// Floats narrower than 32 bits: computed in float32, rounded once when stored.
template <typename Bits, float (*kWiden)(Bits), Bits (*kNarrow)(float)>
struct NarrowFloat : Float<float> {
  using Stored = Bits;
  template <Isa>
  [[gnu::always_inline]] static void load(const Bits* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = kWiden(from[i]);
  }
  template <Isa>
  [[gnu::always_inline]] static void store(const float* from, Bits* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = kNarrow(from[i]);
  }
};

using BFloat16 = NarrowFloat<uint16_t, bfloat16_to_float, float_to_bfloat16>;
template <typename Format>
using Float8 = NarrowFloat<uint8_t, float8_to_float<Format>, float_to_float8<Format>>;

struct Float16 : NarrowFloat<uint16_t, float16_to_float, float_to_float16> {
  using Software = NarrowFloat<uint16_t, float16_to_float, float_to_float16>;
  template <Isa isa>
  [[gnu::always_inline]] static void load(const uint16_t* from, float* to, int64_t n) {
    if constexpr (isa == Isa::kAvx2) return load_f16c(from, to, n);
    Software::load<isa>(from, to, n);
  }
  template <Isa isa>
  [[gnu::always_inline]] static void store(const float* from, uint16_t* to, int64_t n) {
    if constexpr (isa == Isa::kAvx2) return store_f16c(from, to, n);
    Software::store<isa>(from, to, n);
  }

#if defined(__x86_64__)
  [[gnu::target("avx2,f16c")]] static void load_f16c(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
    }
    for (; i < n; ++i) to[i] = float16_to_float(from[i]);
  }
  [[gnu::target("avx2,f16c")]] static void store_f16c(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
    }
    for (; i < n; ++i) to[i] = float_to_float16(from[i]);
  }
#endif
};

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

// Sums stay in T, or, for the average, in a type wide enough to be exact.
template <typename T, typename Wide = T>
struct Integer {
  using Stored = T;
  using Value = Wide;
  using Factor = double;
  static Value scale(Value value, Factor factor) {
    return truncate_to<T>(static_cast<double>(static_cast<T>(value)) * factor);
  }
  static Value divide(Value sum, int64_t divisor) {
    if constexpr (sizeof(Wide) > sizeof(int64_t)) {
      // Division of 128 bits is a slow library call, and sums rarely need it.
      const auto low = static_cast<int64_t>(sum);
      if (low == sum) return static_cast<T>(low / divisor);
    }
    return static_cast<T>(sum / static_cast<Wide>(divisor));
  }
  template <Isa>
  [[gnu::always_inline]] static void load(const T* from, Wide* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[i];
  }
  template <Isa>
  [[gnu::always_inline]] static void store(const Wide* from, T* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
  }
};

// --- the skeleton ---

// out may be exactly `a` or `b`: no iteration reads what another one wrote.
template <typename Op, typename T>
[[gnu::always_inline]] inline void combine(T* out, const T* a, const T* b, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
}

template <typename Format, typename T>
[[gnu::always_inline]] inline void scale(T* out, const T* in, double by, int64_t n) {
  const auto factor = static_cast<typename Format::Factor>(by);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = Format::scale(in[i], factor);
}

template <typename Format, typename T>
[[gnu::always_inline]] inline void divide(T* out, const T* in, int64_t divisor, int64_t n) {
  // Floats: a power of two has an exact inverse, and multiplying by it rounds to the same bits.
  if (!kIsInteger<T> && (divisor & (divisor - 1)) == 0) {
    return scale<Format>(out, in, 1.0 / static_cast<double>(divisor), n);
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = Format::divide(in[i], divisor);
}

template <Isa isa, typename Format, typename Op, bool kAverage>
[[gnu::always_inline]] inline void reduce_blocks(const Reduction& reduction, void* dst_bytes,
                                                 const void* const* srcs, int nsrc, int64_t count) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  // Stored as computed: sources are read, and the last step writes to dst, without a copy between.
  constexpr bool kDirect = std::is_same_v<Stored, Value>;
  const bool prescales = reduction.prescale != 1.0;
  const bool postscales = reduction.postscale != 1.0;
  const bool divides = kAverage && reduction.divisor != 1;
  alignas(64) Value left_block[kBlock];
  alignas(64) Value right_block[kBlock];

  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    Stored* const dst = static_cast<Stored*>(dst_bytes) + begin;

    // Source r of this block as Values: in place where it can be, else in `block`.
    const auto values_of = [&](int r, Value* block) __attribute__((always_inline)) -> const Value* {
      const Stored* const src = static_cast<const Stored*>(srcs[r]) + begin;
      const Value* values = block;
      if constexpr (kDirect) {
        values = src;
      } else {
        Format::template load<isa>(src, block, n);
      }
      if (prescales) {
        scale<Format>(block, values, reduction.prescale, n);
        values = block;
      }
      return values;
    };
    // Where a step puts its result. dst may be one of the sources, so it takes a result only when
    // all of them have been read: that of the last combination, or of a later step.
    const auto target = [&](bool all_read) __attribute__((always_inline)) -> Value* {
      if constexpr (kDirect) {
        if (all_read) return dst;
      }
      return left_block;
    };

    const Value* result = values_of(0, left_block);
    for (int r = 1; r < nsrc; ++r) {
      const Value* const right = values_of(r, right_block);
      Value* const out = target(r == nsrc - 1);
      combine<Op>(out, result, right, n);
      result = out;
    }
    const auto postscale = [&]() __attribute__((always_inline)) {
      Value* const out = target(true);
      scale<Format>(out, result, reduction.postscale, n);
      result = out;
    };
    // The scaled quotient of floats is rounded to the dtype once, after both; that of integers is
    // a product with the average, which is an integer itself.
    if (postscales && !kIsInteger<Value>) postscale();
    if constexpr (kAverage) {
      if (divides) {
        Value* const out = target(true);
        divide<Format>(out, result, reduction.divisor, n);
        result = out;
      }
    }
    if (postscales && kIsInteger<Value>) postscale();

    if constexpr (!kDirect) {
      Format::template store<isa>(result, dst, n);
    } else if (result != dst) {  // one source, only prescaled
      std::memcpy(dst, result, n * sizeof(Value));
    }
  }
}

// --- the table ---

using Kernel = void (*)(const Reduction&, void*, const void* const*, int, int64_t);

template <typename Format, typename Op, bool kAverage>
void kernel_baseline(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
                     int64_t count) {
  reduce_blocks<Isa::kBaseline, Format, Op, kAverage>(reduction, dst, srcs, nsrc, count);
}

#if defined(__x86_64__)
template <typename Format, typename Op, bool kAverage>
[[gnu::target("avx2,f16c")]] void kernel_avx2(const Reduction& reduction, void* dst,
                                              const void* const* srcs, int nsrc, int64_t count) {
  reduce_blocks<Isa::kAvx2, Format, Op, kAverage>(reduction, dst, srcs, nsrc, count);
}
#endif

template <Isa isa, typename Format, typename Op, bool kAverage = false>
constexpr Kernel kernel() {
#if defined(__x86_64__)
  if constexpr (isa == Isa::kAvx2) return kernel_avx2<Format, Op, kAverage>;
#endif
  return kernel_baseline<Format, Op, kAverage>;
}

// A complex sum is a sum of twice as many real numbers.
template <Kernel kReal>
void by_parts(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
              int64_t count) {
  kReal(reduction, dst, srcs, nsrc, 2 * count);
}

struct Row {  // nullptr: has no meaning
  Kernel average, sum, min, max, product;
};

template <Isa isa, typename Format, typename AverageFormat = Format>
constexpr Row number_row() {
  return {kernel<isa, AverageFormat, Sum, true>(), kernel<isa, Format, Sum>(),
          kernel<isa, Format, Min>(), kernel<isa, Format, Max>(), kernel<isa, Format, Product>()};
}

template <Isa isa, typename T, typename Wide>
constexpr Row integer_row() {
  return number_row<isa, Integer<T>, Integer<T, Wide>>();
}

template <Isa isa, typename T>
constexpr Row complex_row() {
  return {by_parts<kernel<isa, Float<T>, Sum, true>()>, by_parts<kernel<isa, Float<T>, Sum>()>,
          nullptr, nullptr, kernel<isa, Complex<T>, Product>()};
}

template <Isa isa>
constexpr Row bool_row() {
  constexpr Kernel any = kernel<isa, Integer<uint8_t>, Or>();
  constexpr Kernel all = kernel<isa, Integer<uint8_t>, And>();
  return {nullptr, any, all, any, all};
}

template <Isa isa>
constexpr std::array<Row, kNumDataTypes> kTable = {{
    /* bool            */ bool_row<isa>(),
    /* uint8           */ integer_row<isa, uint8_t, int64_t>(),
    /* int8            */ integer_row<isa, int8_t, int64_t>(),
    /* int16           */ integer_row<isa, int16_t, int64_t>(),
    /* int32           */ integer_row<isa, int32_t, int64_t>(),
    /* int64           */ integer_row<isa, int64_t, Int128>(),
    /* uint16          */ integer_row<isa, uint16_t, int64_t>(),
    /* uint32          */ integer_row<isa, uint32_t, int64_t>(),
    /* uint64          */ integer_row<isa, uint64_t, Int128>(),
    /* float16         */ number_row<isa, Float16>(),
    /* bfloat16        */ number_row<isa, BFloat16>(),
    /* float32         */ number_row<isa, Float<float>>(),
    /* float64         */ number_row<isa, Float<double>>(),
    /* complex64       */ complex_row<isa, float>(),
    /* complex128      */ complex_row<isa, double>(),
    /* float8_e4m3fn   */ number_row<isa, Float8<Float8E4M3>>(),
    /* float8_e5m2     */ number_row<isa, Float8<Float8E5M2>>(),
    /* float8_e4m3fnuz */ number_row<isa, Float8<Float8E4M3Uz>>(),
    /* float8_e5m2fnuz */ number_row<isa, Float8<Float8E5M2Uz>>(),
}};

const std::array<Row, kNumDataTypes>& table() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (has_avx2) return kTable<Isa::kAvx2>;
#endif
  return kTable<Isa::kBaseline>;
}

Kernel find_kernel(const Reduction& reduction) {
  const auto index = static_cast<size_t>(reduction.dtype);
  if (index >= kTable<Isa::kBaseline>.size()) return nullptr;
  const Row& row = table()[index];
  switch (reduction.op) {
    case ReduceOp::kAverage:
      return row.average;
    case ReduceOp::kSum:
      return row.sum;
    case ReduceOp::kMin:
      return row.min;
    case ReduceOp::kMax:
      return row.max;
    case ReduceOp::kProduct:
      return row.product;
    case ReduceOp::kAdasum:  // of whole tensors: adasum_cpu.h
      return nullptr;
  }
  return nullptr;
}

}  // namespace

std::string why_not_reducible(const Reduction& reduction) {
  const std::string what = std::string(name_of(reduction.op)) + " of " + name_of(reduction.dtype);
  const bool is_bool = reduction.dtype == DataType::kBool;
  if (reduction.op == ReduceOp::kAdasum) {
    return has_adasum(reduction.dtype)
               ? ""
               : what + " is not available: cast to float16, bfloat16, float32 or float64 first";
  }
  if (find_kernel(reduction) == nullptr) {
    if (is_bool) return what + " has no meaning: use Sum (logical or), or cast to a number first";
    if (is_complex(reduction.dtype)) return what + " has no meaning: complex numbers have no order";
    return what + " is not available";
  }
  if (is_bool && (reduction.prescale != 1.0 || reduction.postscale != 1.0)) {
    return what + " cannot be scaled: leave the prescale and postscale factors at 1";
  }
  if (reduction.op == ReduceOp::kAverage && reduction.divisor < 1) {
    return what + " needs a divisor of at least 1, not " + std::to_string(reduction.divisor);
  }
  return "";
}

void reduce(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
            int64_t count) {
  const bool scales = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  const bool divides = reduction.op == ReduceOp::kAverage && reduction.divisor != 1;
  if (nsrc == 1 && !scales && !divides) {
    if (dst != srcs[0] && count > 0) std::memcpy(dst, srcs[0], count * size_of(reduction.dtype));
    return;
  }
  if (reduction.op == ReduceOp::kAdasum) return adasum_reduce(reduction, dst, srcs, nsrc, count);
  find_kernel(reduction)(reduction, dst, srcs, nsrc, count);
}

}  // namespace hvdtorch
