#include "kernels/isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hvdtorch {
namespace {

Isa best_isa() noexcept {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (processor_has(isa)) return isa;
  }
  return Isa::kPlain;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

#if defined(__x86_64__)
bool has_f16c() noexcept {  // __builtin_cpu_supports() does not know it everywhere
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

}  // namespace

const char* name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kPlain:
      return "plain";
    case Isa::kAvx2:
      return "AVX2";
    case Isa::kAvx512:
      return "AVX-512";
  }
  return "?";
}

bool processor_has([[maybe_unused]] Isa isa) noexcept {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kPlain;
}

Isa current_isa() noexcept { return chosen().load(std::memory_order_relaxed); }

bool use_isa(Isa isa) noexcept {
  if (!processor_has(isa)) return false;
  chosen().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace hvdtorch
