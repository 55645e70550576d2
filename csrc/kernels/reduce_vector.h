// The reduction kernels, in vectors of kVectorBytes: included once per instruction set, by a file
// that has switched the compiler to it (reduce_avx512.cc and its siblings).
//
// Words: a *format* says how one dtype is stored in memory (Stored) and what it is computed in
// (Value), and how to widen and narrow a vector of them. An *op* combines two vectors of Values.
// The skeleton, run(), takes the format of the sources, that of the result, and an op. It works in
// *groups* of four vectors, which stay in registers from the first source to the result; the last,
// incomplete group is copied to and from a whole one, so there is no second code for single
// elements. No step here has a fused multiply-add (the build forbids them), so every instruction
// set gives the same bits.
//
// Everything is in an unnamed namespace and calls no function that could exist outside of it: what
// is compiled for AVX-512 must never be linked into what runs without.
//
// To add a dtype: a format, if none of those here fits, and a row of the tables at the end.
// To add an op: an op struct and a column.
#pragma once

#if !defined(HVDTORCH_VECTOR_BYTES)
#error "define HVDTORCH_VECTOR_BYTES, the bytes of one vector"
#endif

#include "kernels/float_formats.h"
#include "kernels/reduce_table.h"

namespace hvdtorch {
namespace {

constexpr int kVectorBytes = HVDTORCH_VECTOR_BYTES;

// --- vectors ---

template <typename T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <typename T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::Type;

template <typename T>
constexpr bool kIsInteger = static_cast<T>(0.5f) == T{0};
template <typename T>
constexpr bool kIsSigned = static_cast<T>(-1) < T{0};

template <bool kSigned, int kBytes>
struct IntegerOf;
template <>
struct IntegerOf<true, 1> {
  using Type = int8_t;
};
template <>
struct IntegerOf<true, 2> {
  using Type = int16_t;
};
template <>
struct IntegerOf<true, 4> {
  using Type = int32_t;
};
template <>
struct IntegerOf<true, 8> {
  using Type = int64_t;
};
template <>
struct IntegerOf<false, 1> {
  using Type = uint8_t;
};
template <>
struct IntegerOf<false, 2> {
  using Type = uint16_t;
};
template <>
struct IntegerOf<false, 4> {
  using Type = uint32_t;
};
template <>
struct IntegerOf<false, 8> {
  using Type = uint64_t;
};

// Integers to wider or narrower ones, by factors of two: compilers do only those well.
template <typename To, typename From, int kLanes>
HVDTORCH_INLINE Vector<To, kLanes> resize(Vector<From, kLanes> from) {
  if constexpr (sizeof(To) == sizeof(From)) {
    return __builtin_bit_cast(Vector<To, kLanes>, from);
  } else {
    constexpr int kNext = sizeof(To) > sizeof(From) ? sizeof(From) * 2 : sizeof(From) / 2;
    using Next = typename IntegerOf<kIsSigned<From>, kNext>::Type;
    return resize<To, Next, kLanes>(__builtin_convertvector(from, Vector<Next, kLanes>));
  }
}

template <typename V>
struct Group {
  V a, b, c, d;
};

// --- ops ---

struct Sum {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a + b;
  }
};

struct Product {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a * b;
  }
};

// A NaN on either side is the result: `a` by the first test, `b` because the second fails.
struct Min {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a != a ? a : (a < b ? a : b);
  }
};

struct Max {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a != a ? a : (a > b ? a : b);
  }
};

struct Or {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return ((a | b) != 0) ? V{} + 1 : V{};
  }
};

struct And {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return ((a != 0) & (b != 0)) ? V{} + 1 : V{};
  }
};

// --- formats ---

template <typename T, typename V = T>
struct Format {
  using Stored = T;
  using Value = V;
  static constexpr int kLanes = kVectorBytes / sizeof(V);  // of one vector of Values
  using StoredVector = Vector<T, kLanes>;
  using ValueVector = Vector<V, kLanes>;
};

// Stored as it is computed. Integers that are added or multiplied are unsigned: they wrap.
template <typename T>
struct Plain : Format<T> {
  using V = typename Format<T>::ValueVector;
  HVDTORCH_INLINE static V widen(V v) { return v; }
  HVDTORCH_INLINE static V narrow(V v) { return v; }
};

// Floats narrower than 32 bits: computed in float32, rounded once when stored.
template <typename Code, typename Conversion>
struct NarrowFloat : Format<Code, float> {
  using Base = Format<Code, float>;
  using Words = Vector<uint32_t, Base::kLanes>;
  HVDTORCH_INLINE static typename Base::ValueVector widen(typename Base::StoredVector codes) {
    const Words words = resize<uint32_t, Code, Base::kLanes>(codes);
    return __builtin_bit_cast(typename Base::ValueVector, Conversion::widen(words));
  }
  HVDTORCH_INLINE static typename Base::StoredVector narrow(typename Base::ValueVector values) {
    const Words words = Conversion::narrow(__builtin_bit_cast(Words, values));
    return resize<Code, uint32_t, Base::kLanes>(words);
  }
};

#if defined(HVDTORCH_HAS_F16C)
// The 512-bit conversions are the masked ones: gcc 12 warns of the plain ones in its own header.
struct Float16 : Format<uint16_t, float> {
  HVDTORCH_INLINE static ValueVector widen(StoredVector codes) {
#if HVDTORCH_VECTOR_BYTES == 64
    return __builtin_bit_cast(ValueVector,
                              _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, codes)));
#else
    return __builtin_bit_cast(ValueVector, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, codes)));
#endif
  }
  HVDTORCH_INLINE static StoredVector narrow(ValueVector values) {
#if HVDTORCH_VECTOR_BYTES == 64
    return __builtin_bit_cast(StoredVector,
                              _mm512_maskz_cvtps_ph(0xffff, __builtin_bit_cast(__m512, values),
                                                    _MM_FROUND_TO_NEAREST_INT));
#else
    return __builtin_bit_cast(StoredVector, _mm256_cvtps_ph(__builtin_bit_cast(__m256, values),
                                                            _MM_FROUND_TO_NEAREST_INT));
#endif
  }
};
#else
using Float16 = NarrowFloat<uint16_t, Float16Format>;
#endif
using BFloat16 = NarrowFloat<uint16_t, BFloat16Format>;
template <typename Conversion>
using Float8 = NarrowFloat<uint8_t, Conversion>;

// Averages of integers up to 16 bits, in float32, which holds sums below 2^24 exactly. Then the
// quotient, rounded to float32, has the right integer part: it is too far from the next one, by at
// least 1 / divisor, to be rounded to it. Averages of 32 bits likewise in float64.
template <typename T>
struct AverageInFloat : Format<T, float> {
  using Base = Format<T, float>;
  using Words = Vector<int32_t, Base::kLanes>;
  HVDTORCH_INLINE static typename Base::ValueVector widen(typename Base::StoredVector v) {
    const Words words = resize<int32_t, T, Base::kLanes>(v);
    return __builtin_convertvector(words, typename Base::ValueVector);
  }
  HVDTORCH_INLINE static typename Base::StoredVector narrow(typename Base::ValueVector v) {
    return resize<T, int32_t, Base::kLanes>(__builtin_convertvector(v, Words));
  }
};

template <typename T>
struct AverageInDouble : Format<T, double> {
  using Base = Format<T, double>;
  using V = typename Base::ValueVector;
  using Words = Vector<int64_t, Base::kLanes>;
  // The last bit of a double of this size is worth 1, so that adding it rounds to an integer and
  // leaves that in the low bits; for magnitudes up to 2^51.
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52

  HVDTORCH_INLINE static V widen(typename Base::StoredVector v) {
    const Words words = resize<int64_t, T, Base::kLanes>(v);
    const V magic = V{} + kMagic;
    return __builtin_bit_cast(V, words + __builtin_bit_cast(Words, magic)) - kMagic;
  }
  HVDTORCH_INLINE static typename Base::StoredVector narrow(V v) {
    const V magic = V{} + kMagic, zero = V{}, one = V{} + 1.0;
    const V nearest = (v + magic) - magic;
    const V down = nearest > v ? one : zero;  // v > 0: rounded up
    const V up = nearest < v ? one : zero;
    const V truncated = nearest - (v > zero ? down : zero) + (v < zero ? up : zero);
    const Words words = __builtin_bit_cast(Words, truncated + magic);
    return resize<T, int64_t, Base::kLanes>(words - __builtin_bit_cast(Words, magic));
  }
};

// Exact sums of integers up to 32 bits.
template <typename T>
struct SumInInt64 : Format<T, int64_t> {
  using Base = Format<T, int64_t>;
  HVDTORCH_INLINE static typename Base::ValueVector widen(typename Base::StoredVector v) {
    return resize<int64_t, T, Base::kLanes>(v);
  }
};

// --- the skeleton ---

// One vector of T at `at`, which need not be aligned.
template <typename V>
HVDTORCH_INLINE V load(const void* at) {
  V v;
  __builtin_memcpy(&v, at, sizeof(V));
  return v;
}

template <typename V>
HVDTORCH_INLINE void store(void* at, V v) {
  __builtin_memcpy(at, &v, sizeof(V));
}

template <typename In>
HVDTORCH_INLINE Group<typename In::ValueVector> load_group(const char* at) {
  using V = typename In::StoredVector;
  return {In::widen(load<V>(at)), In::widen(load<V>(at + sizeof(V))),
          In::widen(load<V>(at + 2 * sizeof(V))), In::widen(load<V>(at + 3 * sizeof(V)))};
}

template <typename V>
HVDTORCH_INLINE void store_group(char* at, const Group<V>& group) {
  store(at, group.a);
  store(at + sizeof(V), group.b);
  store(at + 2 * sizeof(V), group.c);
  store(at + 3 * sizeof(V), group.d);
}

template <typename V, typename T>
HVDTORCH_INLINE void scale(Group<V>& group, T factor) {
  group.a *= factor;
  group.b *= factor;
  group.c *= factor;
  group.d *= factor;
}

template <typename In, typename Out, typename Op>
void run(const Work& work) {
  using Value = typename In::Value;
  using V = typename In::ValueVector;
  constexpr int kGroup = 4 * In::kLanes;
  constexpr bool kFloats = !kIsInteger<Value>;
  constexpr int64_t kIn = sizeof(typename In::Stored), kOut = sizeof(typename Out::Stored);
  // Factors of integers: reduce_scalar.cc. A power of two has an exact inverse, and multiplying by
  // it rounds to the same bits as the division, which is slower.
  const bool prescales = kFloats && work.prescale != 1.0;
  const bool postscales = kFloats && work.postscale != 1.0;
  const bool inverts = kFloats && (work.divisor & (work.divisor - 1)) == 0;
  const bool divides = kFloats && !inverts;
  const bool finishes = postscales || divides || work.divisor != 1;
  const auto pre = static_cast<Value>(work.prescale);
  const auto post = static_cast<Value>(work.postscale);
  const auto divisor = static_cast<Value>(work.divisor);
  const auto inverse = static_cast<Value>(1.0 / static_cast<double>(work.divisor));

  alignas(64) char whole[kGroup * (kIn > kOut ? kIn : kOut)];
  for (int64_t begin = 0; begin < work.count; begin += kGroup) {
    const int64_t left = work.count - begin;
    const bool is_whole = left >= kGroup;
    const auto read = [&](int r) __attribute__((always_inline)) {
      const char* from = static_cast<const char*>(work.srcs[r]) + begin * kIn;
      if (!is_whole) [[unlikely]] {
        __builtin_memset(whole, 0, sizeof(whole));
        __builtin_memcpy(whole, from, static_cast<size_t>(left * kIn));
        from = whole;
      }
      Group<V> group = load_group<In>(from);
      if (prescales) scale(group, pre);
      return group;
    };
    Group<V> sum = read(0);
    for (int r = 1; r < work.nsrc; ++r) {
      const Group<V> next = read(r);
      sum = {Op::apply(sum.a, next.a), Op::apply(sum.b, next.b), Op::apply(sum.c, next.c),
             Op::apply(sum.d, next.d)};
    }
    if constexpr (kFloats) {
      if (finishes) {
        if (postscales) scale(sum, post);
        if (divides) {
          sum = {sum.a / divisor, sum.b / divisor, sum.c / divisor, sum.d / divisor};
        } else {
          scale(sum, inverse);
        }
      }
    }
    const Group<typename Out::StoredVector> result = {Out::narrow(sum.a), Out::narrow(sum.b),
                                                      Out::narrow(sum.c), Out::narrow(sum.d)};
    if (is_whole) [[likely]] {
      for (int d = 0; d < work.ndst; ++d) {
        store_group(static_cast<char*>(work.dsts[d]) + begin * kOut, result);
      }
    } else {
      store_group(whole, result);
      for (int d = 0; d < work.ndst; ++d) {
        __builtin_memcpy(static_cast<char*>(work.dsts[d]) + begin * kOut, whole,
                         static_cast<size_t>(left * kOut));
      }
    }
  }
}

// --- the tables ---

// A complex number is two real ones, but for products.
template <Kernel kReal>
void by_parts(const Work& work) {
  Work twice = work;
  twice.count *= 2;
  kReal(twice);
}

// From one format to another; the two are the same, or that of the result is float32.
template <typename In, typename Out>
constexpr KernelRow float_row() {
  constexpr Kernel sum = run<In, Out, Sum>;
  return {sum, sum, run<In, Out, Min>, run<In, Out, Max>, run<In, Out, Product>};
}

template <typename Wrapping, typename T, typename Average>
constexpr KernelRow integer_row() {
  return {run<Average, Average, Sum>, run<Plain<Wrapping>, Plain<Wrapping>, Sum>,
          run<Plain<T>, Plain<T>, Min>, run<Plain<T>, Plain<T>, Max>,
          run<Plain<Wrapping>, Plain<Wrapping>, Product>};
}

template <typename Wrapping, typename T>
constexpr KernelRow long_row() {  // averages and products of these: reduce_scalar.cc
  return {nullptr, run<Plain<Wrapping>, Plain<Wrapping>, Sum>, run<Plain<T>, Plain<T>, Min>,
          run<Plain<T>, Plain<T>, Max>, run<Plain<Wrapping>, Plain<Wrapping>, Product>};
}

template <typename T>
constexpr KernelRow complex_row() {
  constexpr Kernel sum = by_parts<run<Plain<T>, Plain<T>, Sum>>;
  return {sum, sum, nullptr, nullptr, nullptr};
}

constexpr KernelRow bool_row() {
  using Bool = Plain<uint8_t>;
  return {nullptr, run<Bool, Bool, Or>, run<Bool, Bool, And>, run<Bool, Bool, Or>,
          run<Bool, Bool, And>};
}

template <typename T>
constexpr KernelRow partial_average() {
  return {run<SumInInt64<T>, Plain<int64_t>, Sum>, nullptr, nullptr, nullptr, nullptr};
}

constexpr KernelRow kNothing = {nullptr, nullptr, nullptr, nullptr, nullptr};

template <typename Narrow>
constexpr Kernel finish() {
  return run<Plain<float>, Narrow, Sum>;
}

constexpr KernelTable kKernels = {
    .whole = {
        /* bool            */ bool_row(),
        /* uint8           */ integer_row<uint8_t, uint8_t, AverageInFloat<uint8_t>>(),
        /* int8            */ integer_row<uint8_t, int8_t, AverageInFloat<int8_t>>(),
        /* int16           */ integer_row<uint16_t, int16_t, AverageInFloat<int16_t>>(),
        /* int32           */ integer_row<uint32_t, int32_t, AverageInDouble<int32_t>>(),
        /* int64           */ long_row<uint64_t, int64_t>(),
        /* uint16          */ integer_row<uint16_t, uint16_t, AverageInFloat<uint16_t>>(),
        /* uint32          */ integer_row<uint32_t, uint32_t, AverageInDouble<uint32_t>>(),
        /* uint64          */ long_row<uint64_t, uint64_t>(),
        /* float16         */ float_row<Float16, Float16>(),
        /* bfloat16        */ float_row<BFloat16, BFloat16>(),
        /* float32         */ float_row<Plain<float>, Plain<float>>(),
        /* float64         */ float_row<Plain<double>, Plain<double>>(),
        /* complex64       */ complex_row<float>(),
        /* complex128      */ complex_row<double>(),
        /* float8_e4m3fn   */ float_row<Float8<Float8E4M3>, Float8<Float8E4M3>>(),
        /* float8_e5m2     */ float_row<Float8<Float8E5M2>, Float8<Float8E5M2>>(),
        /* float8_e4m3fnuz */ float_row<Float8<Float8E4M3Uz>, Float8<Float8E4M3Uz>>(),
        /* float8_e5m2fnuz */ float_row<Float8<Float8E5M2Uz>, Float8<Float8E5M2Uz>>(),
    },
    .partial = {
        /* bool            */ kNothing,
        /* uint8           */ partial_average<uint8_t>(),
        /* int8            */ partial_average<int8_t>(),
        /* int16           */ partial_average<int16_t>(),
        /* int32           */ partial_average<int32_t>(),
        /* int64           */ kNothing,
        /* uint16          */ partial_average<uint16_t>(),
        /* uint32          */ partial_average<uint32_t>(),
        /* uint64          */ kNothing,
        /* float16         */ float_row<Float16, Plain<float>>(),
        /* bfloat16        */ float_row<BFloat16, Plain<float>>(),
        /* float32         */ kNothing,
        /* float64         */ kNothing,
        /* complex64       */ kNothing,
        /* complex128      */ kNothing,
        /* float8_e4m3fn   */ float_row<Float8<Float8E4M3>, Plain<float>>(),
        /* float8_e5m2     */ float_row<Float8<Float8E5M2>, Plain<float>>(),
        /* float8_e4m3fnuz */ float_row<Float8<Float8E4M3Uz>, Plain<float>>(),
        /* float8_e5m2fnuz */ float_row<Float8<Float8E5M2Uz>, Plain<float>>(),
    },
    .finish =
        {
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            /* float16         */ finish<Float16>(),
            /* bfloat16        */ finish<BFloat16>(),
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            /* float8_e4m3fn   */ finish<Float8<Float8E4M3>>(),
            /* float8_e5m2     */ finish<Float8<Float8E5M2>>(),
            /* float8_e4m3fnuz */ finish<Float8<Float8E4M3Uz>>(),
            /* float8_e5m2fnuz */ finish<Float8<Float8E5M2Uz>>(),
        },
};

}  // namespace
}  // namespace hvdtorch
