// Which instructions the kernels use: the best that the processor has, found out at run time.
// All give the same bits.
#pragma once

#include <cstdint>

namespace hvdtorch {

enum class Isa : uint8_t {
  kPlain,   // what every processor that the program was compiled for has: SSE2, NEON
  kAvx2,    // and F16C
  kAvx512,  // F, BW, DQ and VL
};
inline constexpr int kNumIsas = 3;

const char* name_of(Isa) noexcept;  // "AVX-512"
bool processor_has(Isa) noexcept;   // and this program was compiled for such a processor
Isa current_isa() noexcept;         // the last one given to use_isa(), else the best
bool use_isa(Isa) noexcept;         // for tests and benchmarks; false: the processor has no such

}  // namespace hvdtorch
