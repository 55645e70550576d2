// The data plane's seam: a transport moves and combines flat, agreed, contiguous spans among the
// ranks of one process set. It holds no policy: it does not fuse, scale, negotiate or log.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {

// The data plane failed (a peer vanished, a deadline passed, abort() was called). After it the
// transport is unusable; the runtime finds the root cause and tells every rank.
struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Span {  // of elements
  int64_t offset;
  int64_t count;
};

// One method per collective, called by one thread at a time, in the same order on all ranks (the
// log guarantees it), each returning when the result is in place. All sizes agree by construction.
// Zero-length spans are legal everywhere.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const noexcept = 0;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  // In place. Every rank ends with identical bits. Any op but kAdasum.
  virtual void allreduce(const Reduction& reduction, void* data, int64_t count) = 0;
  // Adasum (kernels/adasum_cpu.h), in place: every span of `data` is a tensor of its own, what lies
  // between spans is left alone. reduction.op is not looked at. Every rank ends with identical
  // bits.
  virtual void adasum(const Reduction& reduction, void* data, const std::vector<Span>& tensors) = 0;
  // out = concatenation over r of rank r's `in`; bytes[r] = length of rank r's span.
  // `in` may be out's own slice.
  virtual void allgather(const void* in, void* out, const std::vector<int64_t>& bytes) = 0;
  // In place. root is a rank within this transport.
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  // in = concatenation by destination (send_bytes), out = concatenation by source (recv_bytes).
  virtual void alltoall(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                        const std::vector<int64_t>& recv_bytes) = 0;
  // in = concatenation of counts[0..P) elements; out = this rank's counts[rank] elements, reduced.
  virtual void reduce_scatter(const Reduction& reduction, const void* in, void* out,
                              const std::vector<int64_t>& counts) = 0;
  virtual void barrier() = 0;

  // From any thread, at any time, also concurrently with a running collective: that one and every
  // later call throws TransportError(why) promptly. Idempotent: the first reason stays.
  virtual void abort(const std::string& why) noexcept = 0;
};

}  // namespace hvdtorch
