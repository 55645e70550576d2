// Bit-level conversions between float32 and the floating formats narrower than it: float16,
// bfloat16 and the four float8 formats. To the narrow format they round to nearest, ties to even,
// and treat overflow as torch does. They are branch-free and use no float32 subnormal, so that they
// neither depend on a flush-to-zero mode nor stop a compiler from vectorising loops over them.
//
// Words: an encoding is [sign][exponent: E bits][mantissa: M bits], the exponent biased by B. A
// value below 2^(1-B) is subnormal there: a multiple of 2^(1-B-M).
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace hvdtorch {

inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }

// --- bfloat16: the upper half of a float32 ---

inline float bfloat16_to_float(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t x = float_to_bits(value);
  const uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;  // inf stays inf
  const uint32_t quiet_nan = (x >> 16) | 0x40u;
  return static_cast<uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// --- float16: E = 5, M = 10, B = 15 (the same bits as the F16C instructions, NaNs included) ---

inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(bits & 0x7fffu) << 13;  // in float32's fields
  const uint32_t normal = shifted + ((127u - 15u) << 23);
  // 2^-14 + m * 2^-24 is exact, and so is taking 2^-14 away again.
  const float two_to_minus_14 = bits_to_float((127u - 14u) << 23);
  const uint32_t subnormal =
      float_to_bits(bits_to_float(((127u - 14u) << 23) | shifted) - two_to_minus_14);
  const uint32_t infinite = shifted | 0x7f800000u | (shifted > 0x0f800000u ? 0x00400000u : 0u);
  const uint32_t finite = shifted < 0x00800000u ? subnormal : normal;
  return bits_to_float(sign | (shifted >= 0x0f800000u ? infinite : finite));
}

inline uint16_t float_to_float16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t x = bits & 0x7fffffffu;
  const uint32_t normal = (x + 0xfffu + ((x >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  // Adding 0.5, whose last bit is worth 2^-24, leaves the subnormal's mantissa, rounded.
  const uint32_t subnormal = float_to_bits(bits_to_float(x) + 0.5f) - 0x3f000000u;
  const uint32_t finite = x < ((127u - 14u) << 23) ? subnormal : normal;
  const uint32_t in_range = x >= ((127u + 16u) << 23) ? 0x7c00u : finite;
  const uint32_t quiet_nan = 0x7e00u | ((x >> 13) & 0x3ffu);
  return static_cast<uint16_t>(sign | (x > 0x7f800000u ? quiet_nan : in_range));
}

// --- float8 ---

// One format. `kLargest` is the code of the largest finite value, `kOverflow` what a larger one
// becomes, `kNan` the code of NaN. In the "uz" formats the code of -0 means NaN, so there is no -0
// and the sign of a NaN is lost; in the others every result keeps its sign.
template <int E, int M, int B, uint8_t Largest, uint8_t Overflow, uint8_t Nan>
struct Float8Format {
  static constexpr int kExponentBits = E, kMantissaBits = M, kBias = B;
  static constexpr uint8_t kLargest = Largest, kOverflow = Overflow, kNan = Nan;
  static constexpr bool kUnsignedZero = Nan == 0x80;
};
using Float8E4M3 = Float8Format<4, 3, 7, 0x7e, 0x7e, 0x7f>;     // no inf: overflow saturates
using Float8E5M2 = Float8Format<5, 2, 15, 0x7b, 0x7c, 0x7f>;    // overflow is inf
using Float8E4M3Uz = Float8Format<4, 3, 8, 0x7f, 0x80, 0x80>;   // no inf: overflow is NaN
using Float8E5M2Uz = Float8Format<5, 2, 16, 0x7f, 0x80, 0x80>;  // no inf: overflow is NaN

template <typename Format>
constexpr float decode_float8(uint8_t code) {
  const uint8_t magnitude = code & 0x7f;
  const bool negative = (code & 0x80) != 0;
  if (Format::kUnsignedZero ? code == Format::kNan : magnitude > Format::kLargest) {
    const bool infinite = Format::kOverflow != Format::kNan && magnitude == Format::kOverflow;
    const float value =
        infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    return negative ? -value : value;
  }
  const int exponent = magnitude >> Format::kMantissaBits;
  int fraction = magnitude & ((1 << Format::kMantissaBits) - 1);
  if (exponent > 0) fraction |= 1 << Format::kMantissaBits;
  float value = static_cast<float>(fraction);
  const int power = (exponent > 0 ? exponent : 1) - Format::kBias - Format::kMantissaBits;
  for (int i = 0; i < power; ++i) value *= 2.0f;
  for (int i = 0; i > power; --i) value *= 0.5f;
  return negative ? -value : value;
}

template <typename Format>
inline constexpr std::array<float, 256> kFloat8Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    values[code] = decode_float8<Format>(static_cast<uint8_t>(code));
  }
  return values;
}();

template <typename Format>
float float8_to_float(uint8_t code) {
  return kFloat8Values<Format>[code];
}

template <typename Format>
uint8_t float_to_float8(float value) {
  constexpr int kDropped = 23 - Format::kMantissaBits;  // mantissa bits that are rounded away
  constexpr uint32_t kFirstNormal = static_cast<uint32_t>(127 + 1 - Format::kBias) << 23;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << Format::kMantissaBits;
  // The power of two whose last float32 bit is worth one subnormal step.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - Format::kBias + kDropped) << 23;
  const uint32_t bits = float_to_bits(value);
  const uint32_t x = bits & 0x7fffffffu;
  const uint32_t normal =
      ((x + (1u << (kDropped - 1)) - 1u + ((x >> kDropped) & 1u)) >> kDropped) - kRebias;
  const uint32_t subnormal = float_to_bits(bits_to_float(x) + bits_to_float(kMagic)) - kMagic;
  uint32_t code = x < kFirstNormal ? subnormal : normal;
  if (code > Format::kLargest) code = Format::kOverflow;
  if (x > 0x7f800000u) code = Format::kNan;
  const uint32_t sign = Format::kUnsignedZero && code == 0 ? 0u : (bits >> 24) & 0x80u;
  return static_cast<uint8_t>(code | sign);
}

}  // namespace hvdtorch
