// The reduction kernels for processors that have AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "kernels/reduce_table.h"  // and so all headers but our own before the switch

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define HVDTORCH_VECTOR_BYTES 32
#define HVDTORCH_HAS_F16C
#include "kernels/reduce_rows.h"

namespace hvdtorch {

const KernelTable& kernels_avx2() { return kKernels; }

}  // namespace hvdtorch

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
