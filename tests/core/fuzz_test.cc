// A bounded run of the fuzzer (fuzz_message.cc, which says how to run it for longer).
#include <cstdlib>

#include "allocations.h"
#include "check.h"
#include "fuzz_message.h"
#include "samples.h"

namespace hvdtorch::test {
namespace {

uint64_t setting(const char* name, uint64_t usual) {
  const char* text = std::getenv(name);
  return text == nullptr ? usual : std::strtoull(text, nullptr, 10);
}

const Case seeds("the seeds are well-formed, and used as libFuzzer does", [] {
  for (const std::string& seed : fuzz_seeds()) {
    check_eq(LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(seed.data()), seed.size()), 0);
  }
});

const Case loop("mutated frames do no harm to decoder, negotiator and planner", [] {
  const uint64_t seed = setting("HVDTORCH_FUZZ_SEED", 1);
  const auto iterations =
      static_cast<int>(setting("HVDTORCH_FUZZ_ITERATIONS", static_cast<uint64_t>(rounds(200'000))));
  FuzzReport report;
  const size_t largest = largest_allocation([&] { report = fuzz(seed, iterations); });
  // Inputs are at most 4 KB: nothing they claim may be believed.
  check(largest <= 1 << 20, "an allocation of " + std::to_string(largest) + " bytes");
  check_eq(report.decoded + report.refused, iterations);
  check(report.decoded > iterations / 100, "mutations hardly ever decode: nothing was fuzzed");
  check(report.refused > iterations / 100, "mutations hardly ever fail: nothing was fuzzed");
});

}  // namespace
}  // namespace hvdtorch::test
