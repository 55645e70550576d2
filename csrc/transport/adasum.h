// Adasum of ranks that can only exchange whole vectors, two at a time: by recursive doubling. In
// step k a rank exchanges its vector with its neighbour, rank xor 2^k, and both compute the same
// combination from the same two vectors, so that after log2 P steps all ranks hold identical bits.
// The order of combination is that of kernels/adasum_cpu.h, also for a P that is no power of two.
// log2 P steps, n log2 P bytes (n: bytes of the values on one rank); 2 steps more when ranks are
// folded in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "transport/transport.h"

namespace hvdtorch {

// One step, which all ranks take together: `sent` goes to rank `to` and what rank `from` sends
// comes into `received`, each `bytes` long. A rank of -1: nothing that way.
using AdasumStep = std::function<void(const std::byte* sent, int to, std::byte* received, int from,
                                      int64_t bytes)>;

// `scratch(bytes)` gives memory that stays until the end. The rest as Transport::adasum().
void adasum_by_doubling(int rank, int size, const Reduction& reduction, void* data,
                        const std::vector<Span>& tensors,
                        const std::function<std::byte*(int64_t bytes)>& scratch,
                        const AdasumStep& step);

}  // namespace hvdtorch
