// Conversions of the narrow floating formats: every bit pattern, and rounding by search.
#include "kernels/float_formats.h"

#include <cmath>
#include <random>

#include "check.h"
#include "kernels/reduce_cpu.h"
#include "reduce_reference.h"

namespace hvdtorch::test {
namespace {

struct Conversion {
  DataType dtype;
  uint32_t codes;
  float (*widen)(uint32_t);
  uint32_t (*narrow)(float);
};

template <typename Format>
Conversion float8(DataType dtype) {
  return {dtype, 256,
          [](uint32_t code) { return float8_to_float<Format>(static_cast<uint8_t>(code)); },
          [](float value) { return static_cast<uint32_t>(float_to_float8<Format>(value)); }};
}

const Conversion kConversions[] = {
    {DataType::kFloat16, 65536,
     [](uint32_t code) { return float16_to_float(static_cast<uint16_t>(code)); },
     [](float value) { return static_cast<uint32_t>(float_to_float16(value)); }},
    {DataType::kBFloat16, 65536,
     [](uint32_t code) { return bfloat16_to_float(static_cast<uint16_t>(code)); },
     [](float value) { return static_cast<uint32_t>(float_to_bfloat16(value)); }},
    float8<Float8E4M3>(DataType::kFloat8E4M3),
    float8<Float8E5M2>(DataType::kFloat8E5M2),
    float8<Float8E4M3Uz>(DataType::kFloat8E4M3Uz),
    float8<Float8E5M2Uz>(DataType::kFloat8E5M2Uz),
};

std::string text_of(const Conversion& format, uint32_t code) {
  return std::string(name_of(format.dtype)) + " code " + std::to_string(code);
}

const Case patterns("every bit pattern has the right value and comes back", [] {
  for (const Conversion& format : kConversions) {
    for (uint32_t code = 0; code < format.codes; ++code) {
      const float value = format.widen(code);
      const double expected = decode(format.dtype, code);
      if (std::isnan(expected)) {
        check(std::isnan(value), text_of(format, code));
        check(std::isnan(decode(format.dtype, format.narrow(value))), text_of(format, code));
      } else {
        check_eq(static_cast<double>(value), expected, text_of(format, code));
        check_eq(format.narrow(value), code, text_of(format, code));
      }
    }
  }
});

void check_narrow(const Conversion& format, float value) {
  const uint32_t code = format.narrow(value);
  if (std::isnan(value)) {
    check(std::isnan(decode(format.dtype, code)), text_of(format, code));
  } else {
    check_eq(code, encode(format.dtype, value),
             std::string(name_of(format.dtype)) + " of " + std::to_string(value));
  }
}

const Case rounding("float32 rounds to the nearest value, ties to even", [] {
  std::mt19937 random(11);
  for (const Conversion& format : kConversions) {
    const int rounds = is_sanitized() ? 20000 : 400000;
    for (int i = 0; i < rounds; ++i) check_narrow(format, bits_to_float(random()));
    // Every tie between neighbours, and the floats next to it.
    for (uint32_t code = 0; code + 1 < format.codes; ++code) {
      const double a = decode(format.dtype, code), b = decode(format.dtype, code + 1);
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      const float tie = static_cast<float>((a + b) / 2);
      for (float value : {std::nextafter(tie, -INFINITY), tie, std::nextafter(tie, INFINITY)}) {
        check_narrow(format, value);
      }
    }
    for (float value : {INFINITY, -INFINITY, 0.0f, -0.0f, 464.0f, 464.1f, 480.0f, 65519.0f,
                        65520.0f, 61439.0f, 61440.0f, 3.4e38f, -3.4e38f, 247.9f, 248.0f}) {
      check_narrow(format, value);
    }
  }
});

// reduce() converts whole blocks, with other instructions than the functions above.
const Case bulk("reduce() converts all patterns as the scalar functions do", [] {
  for (const Conversion& format : kConversions) {
    if (size_of(format.dtype) != 2) continue;
    std::vector<uint16_t> codes(format.codes), zeros(format.codes, 0x8000), result(format.codes);
    for (uint32_t code = 0; code < format.codes; ++code) codes[code] = static_cast<uint16_t>(code);
    const void* srcs[] = {codes.data(), zeros.data()};
    reduce({format.dtype, ReduceOp::kSum}, result.data(), srcs, 2, format.codes);
    for (uint32_t code = 0; code < format.codes; ++code) {
      const float value = format.widen(code);
      check_eq(uint32_t{result[code]}, format.narrow(value + -0.0f), text_of(format, code));
    }
  }
});

}  // namespace
}  // namespace hvdtorch::test
