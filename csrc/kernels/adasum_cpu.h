// Adasum on the CPU: the arithmetic on whole tensors, and Adasum of P tensors in one place.
//
// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021)
// combines two vectors so that orthogonal ones are added and parallel ones averaged:
//
//     a (+) b = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
//
// with the coefficient 1 of a vector whose squared norm is below 1.5e-154. The products are summed
// in float64 over the whole tensor, in an order that depends on its length alone. A NaN or infinite
// element makes them, and so the whole result, NaN.
//
// P vectors are combined in a tree over ranks: neighbours first, then pairs of pairs, the lower
// rank always `a`. For a P that is no power of two, let p be the largest below it: ranks p, p + 1,
// ... are combined into ranks 0, 1, ... first.
//
// Words: *values* are what Adasum computes in: float32, and float64 for float64.
#pragma once

#include <cstdint>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {

inline constexpr double kAdasumLeastSquaredNorm = 1.5e-154;

// float16, bfloat16, float32 and float64. The functions below take no other dtype.
bool has_adasum(DataType dtype) noexcept;
int64_t adasum_value_size(DataType dtype) noexcept;  // bytes of one value

// The largest power of two that is at most `ranks` (>= 1).
int adasum_power_of_two(int ranks) noexcept;

// values[i] = prescale * from[i]; `from` may be `values` if the dtype is stored as it is computed.
void adasum_load(const Reduction& reduction, void* values, const void* from, int64_t count);
// to[i] = postscale * values[i], rounded to the dtype; `to` may be `values` likewise.
void adasum_store(const Reduction& reduction, void* to, const void* values, int64_t count);
// out = a (+) b on values; out may be exactly `a` or `b`.
void adasum_combine(DataType dtype, void* out, const void* a, const void* b, int64_t count);

// What reduce() does for ReduceOp::kAdasum: all srcs, each one tensor, into dst.
void adasum_reduce(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
                   int64_t count);

}  // namespace hvdtorch
