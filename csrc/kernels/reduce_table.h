// What reduce_cpu.cc looks kernels up in: one table per instruction set, filled by
// reduce_rows.h, and the few kernels that work on one element at a time.
#pragma once

#include <cstdint>

#include "core/types.h"
#include "kernels/isa.h"

namespace hvdtorch {

// One call of a kernel: dsts[d][i] = op over r of (prescale * srcs[r][i]), multiplied by postscale,
// then divided by divisor, which is 1 but for averages. (Integers are divided first.)
struct Work {
  void* const* dsts;
  int ndst;
  const void* const* srcs;
  int nsrc;
  int64_t count;
  double prescale = 1.0;
  double postscale = 1.0;
  int64_t divisor = 1;
};
using Kernel = void (*)(const Work&);

struct KernelRow {  // nullptr: has no meaning
  Kernel average, sum, min, max, product;
};

struct KernelTable {
  KernelRow whole[kNumDataTypes];    // from the dtype to the dtype
  KernelRow partial[kNumDataTypes];  // from the dtype to its partial type, where they differ
  Kernel finish[kNumDataTypes];      // from the partial type of floats to the dtype, likewise
};

const KernelTable& kernels_plain();
#if defined(__x86_64__)
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
#endif

}  // namespace hvdtorch
