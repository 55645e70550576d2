// Vectors of kVectorBytes, and the formats of the reduction kernels: how a dtype is stored in
// memory (Stored), what it is computed in (Value), and how a vector of one becomes a vector of the
// other. The vectors are those of gcc and clang, written once for all instruction sets.
//
// Everything here and in the headers that include this one is in an unnamed namespace, always
// inlined or a template of such, and calls no function that could exist outside of it: what is
// compiled for AVX-512 must never be linked into what runs without.
//
// To add a dtype: a format, if none of those here fits, and its rows in reduce_rows.h.
#pragma once

#include <type_traits>

#include "kernels/float_formats.h"

namespace hvdtorch {
namespace {

constexpr int kVectorBytes = HVDTORCH_VECTOR_BYTES;  // defined by the including file

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

template <bool kSigned, typename Signed, typename Unsigned>
using SignedIf = std::conditional_t<kSigned, Signed, Unsigned>;
template <bool kSigned, int kBytes>
using IntegerOf = std::conditional_t<
    kBytes == 1, SignedIf<kSigned, int8_t, uint8_t>,
    std::conditional_t<kBytes == 2, SignedIf<kSigned, int16_t, uint16_t>,
                       std::conditional_t<kBytes == 4, SignedIf<kSigned, int32_t, uint32_t>,
                                          SignedIf<kSigned, int64_t, uint64_t>>>>;

// Integers to wider or narrower ones, by factors of two: compilers do only those well.
template <typename To, typename From, int kLanes>
HVDTORCH_INLINE Vector<To, kLanes> resize(Vector<From, kLanes> from) {
  if constexpr (sizeof(To) == sizeof(From)) {
    return __builtin_bit_cast(Vector<To, kLanes>, from);
  } else {
    constexpr int kNext = sizeof(To) > sizeof(From) ? sizeof(From) * 2 : sizeof(From) / 2;
    using Next = IntegerOf<kIsSigned<From>, kNext>;
    return resize<To, Next, kLanes>(__builtin_convertvector(from, Vector<Next, kLanes>));
  }
}

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
  HVDTORCH_INLINE static typename Base::ValueVector from_words(Words codes) {
    return __builtin_bit_cast(typename Base::ValueVector, Conversion::widen(codes));
  }
  HVDTORCH_INLINE static Words to_words(typename Base::ValueVector values) {
    return Conversion::narrow(__builtin_bit_cast(Words, values));
  }
  HVDTORCH_INLINE static typename Base::ValueVector widen(typename Base::StoredVector codes) {
    return from_words(resize<uint32_t, Code, Base::kLanes>(codes));
  }
  HVDTORCH_INLINE static typename Base::StoredVector narrow(typename Base::ValueVector values) {
    return resize<Code, uint32_t, Base::kLanes>(to_words(values));
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
  HVDTORCH_INLINE static typename Base::ValueVector from_words(Words words) {
    return __builtin_convertvector(words, typename Base::ValueVector);
  }
  HVDTORCH_INLINE static Words to_words(typename Base::ValueVector values) {
    return __builtin_convertvector(values, Words);  // truncates
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
#if HVDTORCH_VECTOR_BYTES == 64
    if constexpr (kIsSigned<T>) {
      return __builtin_bit_cast(V, _mm512_maskz_cvtepi32_pd(0xff, __builtin_bit_cast(__m256i, v)));
    } else {
      return __builtin_bit_cast(V, _mm512_maskz_cvtepu32_pd(0xff, __builtin_bit_cast(__m256i, v)));
    }
#endif
    const Words words = resize<int64_t, T, Base::kLanes>(v);
    const V magic = V{} + kMagic;
    return __builtin_bit_cast(V, words + __builtin_bit_cast(Words, magic)) - kMagic;
  }
  HVDTORCH_INLINE static typename Base::StoredVector narrow(V v) {
#if HVDTORCH_VECTOR_BYTES == 64
    const __m512i whole = _mm512_maskz_cvttpd_epi64(0xff, __builtin_bit_cast(__m512d, v));
    return __builtin_bit_cast(typename Base::StoredVector,
                              _mm512_maskz_cvtepi64_epi32(0xff, whole));
#endif
    const V magic = V{} + kMagic, zero = V{}, one = V{} + 1.0;
    const V nearest = (v + magic) - magic;
    const V down = nearest > v ? one : zero;  // v > 0: rounded up
    const V up = nearest < v ? one : zero;
    const V truncated = nearest - (v > zero ? down : zero) + (v < zero ? up : zero);
    const Words words = __builtin_bit_cast(Words, truncated + magic);
    return resize<T, int64_t, Base::kLanes>(words - __builtin_bit_cast(Words, magic));
  }
};

// Elements of 8 and 16 bits that are computed in 32, four or two to a 32-bit word: the first of all
// words make one vector, the second the next one, and so on. That takes shifts, and no permutation.
// It changes the order inside of a group, so that both formats of a kernel must be packed.
template <typename Inner>
struct Packed : Inner {
  using Words = typename Inner::Words;
  using Codes = Vector<uint32_t, Inner::kLanes>;
  static constexpr int kPerWord = 4 / sizeof(typename Inner::Stored);
  static constexpr int kBits = 8 * sizeof(typename Inner::Stored);

  template <int kIndex>
  HVDTORCH_INLINE static typename Inner::ValueVector widen(Codes packed) {
    const Codes top = packed << (32 - kBits * (kIndex + 1));
    if constexpr (kIsBFloat16) {
      const Codes upper_half = kIndex == 0 ? top : packed & 0xffff0000u;
      return __builtin_bit_cast(typename Inner::ValueVector, upper_half);
    } else if constexpr (kIsSigned<typename Inner::Stored>) {
      return Inner::from_words(__builtin_bit_cast(Words, top) >> (32 - kBits));
    } else {
      return Inner::from_words(__builtin_bit_cast(Words, top >> (32 - kBits)));
    }
  }
  template <int kIndex>
  HVDTORCH_INLINE static Codes narrow(typename Inner::ValueVector values) {
    if constexpr (kIsBFloat16) {
      const Codes rounded = BFloat16Format::round(__builtin_bit_cast(Codes, values));
      return kIndex == 0 ? rounded >> 16 : rounded & 0xffff0000u;
    }
    const Codes codes = __builtin_bit_cast(Codes, Inner::to_words(values));
    // Codes of floats have no higher bits; negative integers, and those that wrap, do.
    constexpr bool kIsClean = std::is_same_v<Words, Codes> || kIndex == kPerWord - 1;
    return (kIsClean ? codes : codes & ((1u << kBits) - 1u)) << (kBits * kIndex);
  }

 private:
  // Its codes are float32s without their lower half: fewer steps than by way of from_words().
  static constexpr bool kIsBFloat16 = std::is_same_v<Inner, BFloat16>;
};
template <typename F>
constexpr bool kIsPacked = requires { F::kPerWord; };

// Exact sums of integers up to 32 bits.
template <typename T>
struct SumInInt64 : Format<T, int64_t> {
  using Base = Format<T, int64_t>;
  HVDTORCH_INLINE static typename Base::ValueVector widen(typename Base::StoredVector v) {
    return resize<int64_t, T, Base::kLanes>(v);
  }
};

}  // namespace
}  // namespace hvdtorch
