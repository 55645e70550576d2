// Reduction of P equal spans into one, on the CPU: one written rule per dtype,
// the same for every host transport and for values that travel inside the log.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/types.h"

namespace hvdtorch {

// y = post( reduce_r( pre(x_r) ) ). Rules (docs/architecture.md, "Values"):
// - floats narrower than 32 bits accumulate in fp32, in rank order, rounded once at the end;
// - float32 accumulates in fp32, float64 in fp64, in rank order; complex as two such parts
//   (Product: complex product; Min/Max of complex are refused);
// - prescale / postscale: fp32 for floats up to 32 bits, fp64 for float64; integers: float64
//   product truncated toward zero, at pre and at post, each giving a value of the dtype (NaN
//   gives 0; what 64 bits cannot hold is clamped to them, then wrapped); a factor of exactly 1 is
//   skipped;
// - average: op is kAverage and `divisor` the number of ranks to divide by. Floats
//   are postscaled, then divided, then rounded once. Integers: exact sum in a wider type (128 bits
//   for 64-bit), quotient truncated toward zero, then wrapped to the dtype, then postscaled;
// - integer Sum/Product wrap as the dtype does; bool: Sum = or, Product = and, Min = and,
//   Max = or, scale factors other than 1 and Average are refused;
// - Adasum: not by element but of whole tensors (kernels/adasum_cpu.h); floats of 16 bits and more;
// - Min/Max propagate NaN. Overflow to a narrow float does what torch's conversion does.
struct Reduction {
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int64_t divisor = 1;  // used by kAverage only
};

// Empty when `reduction` can be computed, else one sentence that says why not.
std::string why_not_reducible(const Reduction& reduction);

// dst[i] = reduction over r of srcs[r][i], for i in [0, count); for Adasum the count elements are
// one tensor. srcs are in rank order. dst may be
// exactly one of the srcs, and must not overlap any of them otherwise. No alignment is assumed
// beyond the dtype's own. nsrc >= 1: with nsrc == 1 the factors and the divisor still apply.
// Precondition: why_not_reducible(reduction).empty().
void reduce(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
            int64_t count);

// As reduce(), and the result is written to every one of dsts. Each may be exactly one of the srcs,
// no two may overlap. ndst >= 1.
void reduce_to_all(const Reduction& reduction, void* const* dsts, int ndst, const void* const* srcs,
                   int nsrc, int64_t count);

// --- in two steps: first some ranks at a time, then those partial results ---

// The dtype in which results of some ranks can travel and be combined further without losing what
// the rules above keep: float32 for narrower floats, int64 for averages of integers up to 32 bits,
// else the dtype itself. None for integers with scale factors and averages of 64-bit integers,
// whose steps need more than 64 bits or round in between, and for Adasum, which has no such step.
std::optional<DataType> partial_type(const Reduction& reduction);

// The reduction that combines partial results, of partial_type(reduction), which it has.
Reduction combine_partials(const Reduction& reduction);

// dst[i] = op over r of prescale * srcs[r][i], in partial_type(reduction), which it has; neither
// postscaled nor divided. dst may be exactly one of the srcs if the two dtypes are equal.
void reduce_partial(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
                    int64_t count);

// dst[i] = what reduce() stores, given the partial result of all ranks: postscaled, divided and
// rounded once. dst may be exactly `partial` if the two dtypes are equal.
void finish_partial(const Reduction& reduction, void* dst, const void* partial, int64_t count);

}  // namespace hvdtorch
