// GradientMemory: where autograd allocates large gradients while a backward() runs whose gradients
// are reduced: blocks of the arena that the ranks of this host share, so that the reduction reads
// and writes them directly, and no block is new to the process in every step.
//
// A gradient that is reduced alone (gradient_bucket.h) registers its number of bytes. From the
// first gradient of such a backward() until its end, allocations of exactly so many bytes in its
// thread are served from here, as many at a time as there are registered gradients of that size.
// That other tensors may be among them does no harm. All else goes to torch's allocator.
#pragma once

#include <cstddef>

namespace hvdtorch {

class GradientMemory {
 public:
  // One more, or one less, gradient of so many bytes. The first one makes torch ask here.
  static void want(size_t bytes);
  static void unwant(size_t bytes) noexcept;

  // A backward() whose gradients are reduced runs in this thread; it has ended.
  static void begin() noexcept;
  static void end() noexcept;

  // The job has ended: its blocks are not used again.
  static void reset() noexcept;
};

}  // namespace hvdtorch
