// The reductions that work on one element at a time: integers with scale factors, averages of
// 64-bit integers or of very many sources, and products of complex numbers.
#pragma once

#include "kernels/reduce_table.h"

namespace hvdtorch {

struct Reduction;

// nullptr: the vector kernels compute this.
Kernel scalar_kernel(const Reduction& reduction, int nsrc);

// dst[i] = what the average stores for the exact sum sums[i].
void finish_average(const Reduction& reduction, void* dst, const int64_t* sums, int64_t count);

}  // namespace hvdtorch
