// The fuzz target of the control plane's decoder, its seeds, and a mutation loop of our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// What libFuzzer calls. Returns 0; anything wrong is a crash (abort, sanitizer report).
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace hvdtorch::test {

// Well-formed inputs with every record in them.
std::vector<std::string> fuzz_seeds();

// Runs the target on `iterations` inputs, each a mutation of a seed or of an earlier input that was
// decoded without an error. The same seed gives the same inputs.
struct FuzzReport {
  int decoded = 0;  // inputs without an error: shows that mutations get past the first byte
  int refused = 0;
};
FuzzReport fuzz(uint64_t seed, int iterations);

}  // namespace hvdtorch::test
