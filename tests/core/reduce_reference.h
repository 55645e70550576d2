// A second, plain implementation of the reduction rules, one element at a time, which shares no
// line and no trick with the kernels: exact 128-bit integers, and rounding by searching the nearest
// representable value.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reduce_cpu.h"

namespace hvdtorch::test {

__extension__ using Int128 = __int128;

struct FloatFormat {  // IEEE-like, with the exceptions that the float8 formats make
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity;   // the largest exponent is kept for inf and NaN
  bool unsigned_zero;  // the code of -0 is the only NaN
  bool saturates;      // overflow gives the largest finite value
};

// The narrow formats only: float16, bfloat16, float8.
const FloatFormat& format_of(DataType dtype);
double decode(DataType dtype, uint32_t code);
uint32_t encode(DataType dtype, float value);

// What reduce() must leave in dst, for `count` elements at each of srcs.
std::vector<uint8_t> reference_reduce(const Reduction& reduction,
                                      const std::vector<const uint8_t*>& srcs, int64_t count);

// Whether two elements are the same bits, or both NaN (in each part, for complex).
bool same_element(DataType dtype, const uint8_t* a, const uint8_t* b);

}  // namespace hvdtorch::test
