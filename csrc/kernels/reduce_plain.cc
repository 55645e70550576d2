// The reduction kernels for any processor: 16 bytes at once, which SSE2 and NEON have.
#define HVDTORCH_VECTOR_BYTES 16
#include "kernels/reduce_rows.h"

namespace hvdtorch {

const KernelTable& kernels_plain() { return kKernels; }

}  // namespace hvdtorch
