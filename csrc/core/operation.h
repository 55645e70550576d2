// Operation: one tensor that one rank has submitted, from the call until its result is in place.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/completion.h"
#include "core/types.h"

namespace hvdtorch {

// What a rank says of a tensor: all that the ranks have to agree on, and what differs by design
// (rows of an allgather, splits of an alltoall, the line that submitted it).
struct OpDesc {
  uint32_t process_set = 0;
  OpKind kind = OpKind::kAllreduce;
  DataType dtype = DataType::kFloat32;
  Device device;
  ReduceOp op = ReduceOp::kSum;
  int32_t root = 0;  // broadcast: rank within the process set
  double prescale = 1.0;
  double postscale = 1.0;
  std::string name;  // full name, unique among the set's operations in flight
  std::vector<int64_t> shape;
  std::string group;       // full name of the group, "" if alone
  int32_t group_size = 1;  // members that are launched together
  std::string site;        // "train.py:31", for error texts; never compared
  bool remembered = true;  // false: a name that will not come back (unnamed operations)

  int64_t numel() const noexcept {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  int64_t bytes() const noexcept { return numel() * size_of(dtype); }
  // Elements of one row (dim 0 apart), for the collectives that split or join rows.
  int64_t row_numel() const noexcept {
    int64_t n = 1;
    for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
    return n;
  }
};

// Shared: the tables of the control plane, the log and the operation itself all refer to one.
using Desc = std::shared_ptr<const OpDesc>;

// Equal, or both not a number (which compares unequal to itself).
bool same_factor(double, double) noexcept;

// True if both say the same of the tensor (site apart): the later one need not be sent in full.
bool same_statement(const OpDesc&, const OpDesc&) noexcept;

struct Operation {
  Desc desc;
  const void* input = nullptr;  // contiguous, desc->bytes() long
  void* output = nullptr;  // contiguous; null until `allocate` is called for kinds that need it
  // Makes the output once its shape is known (allgather, alltoall, reducescatter).
  std::function<void*(const std::vector<int64_t>& shape)> allocate;
  // Runs when the result is in place, before completion (copies back into a strided tensor).
  std::function<void()> finish;
  std::vector<int64_t> splits;  // alltoall: rows to each rank
  // What the result is besides a tensor, valid when complete. allgather and alltoall: rows from
  // each rank; join: the last rank; adding a process set: its id.
  std::vector<int64_t> numbers;
  std::shared_ptr<Completion> completion;
  std::shared_ptr<void> keepalive;  // whatever owns input and output
};

}  // namespace hvdtorch
