// Bit-level conversions between float32 and the floating formats narrower than it: float16,
// bfloat16 and the four float8 formats. To the narrow format they round to nearest, ties to even,
// and treat overflow as torch does. They are branch-free and use no float32 subnormal, so that they
// do not depend on a flush-to-zero mode, and each is written once for a single number and for a
// vector of them.
//
// Words: an encoding is [sign][exponent: E bits][mantissa: M bits], the exponent biased by B. A
// value below 2^(1-B) is subnormal there: a multiple of 2^(1-B-M). A *word* is 32 bits, or a vector
// of such: a `widen` function takes codes and gives the bits of float32s, `narrow` the opposite.
#pragma once

#include <cstdint>

// Also where the compiler does not optimise: a function that is not inlined exists once in the
// program, and would have to run on every processor.
#define HVDTORCH_INLINE [[gnu::always_inline]] inline

namespace hvdtorch {

HVDTORCH_INLINE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
HVDTORCH_INLINE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// a - b, a + b of the float32s that are stored in words.
template <typename Word>
struct FloatWords {
  typedef float Floats __attribute__((vector_size(sizeof(Word))));
};
template <>
struct FloatWords<uint32_t> {
  using Floats = float;
};
template <typename Word>
HVDTORCH_INLINE Word plus(Word bits, float addend) {
  using Floats = typename FloatWords<Word>::Floats;
  return __builtin_bit_cast(Word, __builtin_bit_cast(Floats, bits) + addend);
}

// --- bfloat16: the upper half of a float32 ---

struct BFloat16Format {
  template <typename Word>
  HVDTORCH_INLINE static Word widen(Word code) {
    return code << 16;
  }
  template <typename Word>
  HVDTORCH_INLINE static Word narrow(Word x) {
    return round(x) >> 16;
  }
  // The code in the upper half; the lower half means nothing.
  template <typename Word>
  HVDTORCH_INLINE static Word round(Word x) {
    const Word rounded = x + 0x7fffu + ((x >> 16) & 1u);  // inf stays inf
    const Word quiet_nan = x | 0x00400000u;
    const auto value = __builtin_bit_cast(typename FloatWords<Word>::Floats, x);
    return value != value ? quiet_nan : rounded;
  }
};

// --- float16: E = 5, M = 10, B = 15 (the same bits as the F16C instructions, NaNs included) ---

struct Float16Format {
  template <typename Word>
  HVDTORCH_INLINE static Word widen(Word code) {
    const Word sign = (code & 0x8000u) << 16;
    const Word shifted = (code & 0x7fffu) << 13;  // in float32's fields
    const Word normal = shifted + ((127u - 15u) << 23);
    // 2^-14 + m * 2^-24 is exact, and so is taking 2^-14 away again.
    const Word subnormal =
        plus(Word(shifted | ((127u - 14u) << 23)), -bits_to_float((127u - 14u) << 23));
    const Word quiet = Word{} + 0x00400000u;
    const Word infinite = shifted | 0x7f800000u | (shifted > 0x0f800000u ? quiet : Word{});
    const Word finite = shifted < 0x00800000u ? subnormal : normal;
    return sign | (shifted >= 0x0f800000u ? infinite : finite);
  }
  template <typename Word>
  HVDTORCH_INLINE static Word narrow(Word bits) {
    const Word sign = (bits >> 16) & 0x8000u;
    const Word x = bits & 0x7fffffffu;
    const Word normal = (x + 0xfffu + ((x >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    // Adding 0.5, whose last bit is worth 2^-24, leaves the subnormal's mantissa, rounded.
    const Word subnormal = plus(x, 0.5f) - 0x3f000000u;
    const Word finite = x < ((127u - 14u) << 23) ? subnormal : normal;
    const Word infinity = Word{} + 0x7c00u;
    const Word in_range = x >= ((127u + 16u) << 23) ? infinity : finite;
    const Word quiet_nan = ((x >> 13) & 0x3ffu) | 0x7e00u;
    return sign | (x > 0x7f800000u ? quiet_nan : in_range);
  }
};

// --- float8 ---

// One format. `kLargest` is the code of the largest finite value, `kOverflow` what a larger one
// becomes, `kNan` the code of NaN. In the "uz" formats the code of -0 means NaN, so there is no -0
// and the sign of a NaN is lost; in the others every result keeps its sign.
template <int E, int M, int B, uint8_t Largest, uint8_t Overflow, uint8_t Nan>
struct Float8Format {
  static constexpr int kExponentBits = E, kMantissaBits = M, kBias = B;
  static constexpr uint8_t kLargest = Largest, kOverflow = Overflow, kNan = Nan;
  static constexpr bool kUnsignedZero = Nan == 0x80;
  static constexpr int kDropped = 23 - M;  // mantissa bits that float32 has more
  static constexpr uint32_t kFirstNormal = static_cast<uint32_t>(127 + 1 - B) << 23;

  template <typename Word>
  HVDTORCH_INLINE static Word widen(Word code) {
    const Word magnitude = code & 0x7fu;
    const Word shifted = magnitude << kDropped;  // in float32's fields
    const Word normal = shifted + (static_cast<uint32_t>(127 - B) << 23);
    const Word subnormal = plus(Word(shifted | kFirstNormal), -bits_to_float(kFirstNormal));
    const Word finite = shifted < (1u << 23) ? subnormal : normal;
    const Word nan = Word{} + 0x7fc00000u, infinity = Word{} + 0x7f800000u;
    const Word sign = (code & 0x80u) << 24;
    if constexpr (kUnsignedZero) return code == uint32_t{Nan} ? nan : (finite | sign);
    const Word beyond = Overflow != Largest ? (magnitude == uint32_t{Overflow} ? infinity : nan)
                                            : nan;  // the code after the largest one
    return (magnitude > uint32_t{Largest} ? beyond : finite) | sign;
  }
  template <typename Word>
  HVDTORCH_INLINE static Word narrow(Word bits) {
    constexpr uint32_t kRebias = static_cast<uint32_t>(127 - B) << M;
    // The power of two whose last float32 bit is worth one subnormal step.
    constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - B + kDropped) << 23;
    const Word x = bits & 0x7fffffffu;
    const Word normal =
        ((x + ((1u << (kDropped - 1)) - 1u) + ((x >> kDropped) & 1u)) >> kDropped) - kRebias;
    const Word subnormal = plus(x, bits_to_float(kMagic)) - kMagic;
    const Word finite = x < kFirstNormal ? subnormal : normal;
    const Word overflow = Word{} + uint32_t{Overflow}, nan = Word{} + uint32_t{Nan};
    const Word in_range = finite > uint32_t{Largest} ? overflow : finite;
    const Word code = x > 0x7f800000u ? nan : in_range;
    const Word sign = (bits >> 24) & 0x80u;
    if constexpr (kUnsignedZero) return code | (code == 0u ? Word{} : sign);
    return code | sign;
  }
};
using Float8E4M3 = Float8Format<4, 3, 7, 0x7e, 0x7e, 0x7f>;     // no inf: overflow saturates
using Float8E5M2 = Float8Format<5, 2, 15, 0x7b, 0x7c, 0x7f>;    // overflow is inf
using Float8E4M3Uz = Float8Format<4, 3, 8, 0x7f, 0x80, 0x80>;   // no inf: overflow is NaN
using Float8E5M2Uz = Float8Format<5, 2, 16, 0x7f, 0x80, 0x80>;  // no inf: overflow is NaN

// --- one number ---

HVDTORCH_INLINE float bfloat16_to_float(uint16_t code) {
  return bits_to_float(BFloat16Format::widen<uint32_t>(code));
}
HVDTORCH_INLINE uint16_t float_to_bfloat16(float value) {
  return static_cast<uint16_t>(BFloat16Format::narrow(float_to_bits(value)));
}
HVDTORCH_INLINE float float16_to_float(uint16_t code) {
  return bits_to_float(Float16Format::widen<uint32_t>(code));
}
HVDTORCH_INLINE uint16_t float_to_float16(float value) {
  return static_cast<uint16_t>(Float16Format::narrow(float_to_bits(value)));
}
template <typename Format>
HVDTORCH_INLINE float float8_to_float(uint8_t code) {
  return bits_to_float(Format::template widen<uint32_t>(code));
}
template <typename Format>
HVDTORCH_INLINE uint8_t float_to_float8(float value) {
  return static_cast<uint8_t>(Format::narrow(float_to_bits(value)));
}

}  // namespace hvdtorch
