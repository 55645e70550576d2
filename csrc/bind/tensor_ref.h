// From a torch tensor to the core's view of it, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "core/operation.h"

namespace hvdtorch {

std::optional<DataType> data_type_of(at::ScalarType type) noexcept;

// The tensors behind one operation. Inputs that are not plainly laid out are staged: a contiguous
// copy takes part, and an in-place result is copied back before the operation is complete.
struct Member {
  at::Tensor given;   // what the user passed; the result of an in-place operation
  at::Tensor input;   // contiguous, what the core reads
  at::Tensor output;  // contiguous, what the core writes (in place: may be `input`)
  const at::Tensor& result() const { return in_place ? given : output; }
  bool in_place = false;
};

// Throws std::invalid_argument (ValueError) with what to do instead if the tensor cannot take part.
void check_tensor(const at::Tensor& tensor, const std::string& name);

// Fills `operation`'s pointers and hooks for a tensor that passed check_tensor; desc must be set.
std::shared_ptr<Member> attach(Operation& operation, const at::Tensor& tensor, bool in_place);

}  // namespace hvdtorch
