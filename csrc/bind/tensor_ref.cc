#include "bind/tensor_ref.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <array>
#include <stdexcept>
#include <utility>

namespace hvdtorch {
namespace {

// One row per dtype that torch can hold and the core can move.
constexpr std::array<std::pair<at::ScalarType, DataType>, kNumDataTypes> kTypes = {{
    {at::kBool, DataType::kBool},
    {at::kByte, DataType::kUInt8},
    {at::kChar, DataType::kInt8},
    {at::kShort, DataType::kInt16},
    {at::kInt, DataType::kInt32},
    {at::kLong, DataType::kInt64},
    {at::kUInt16, DataType::kUInt16},
    {at::kUInt32, DataType::kUInt32},
    {at::kUInt64, DataType::kUInt64},
    {at::kHalf, DataType::kFloat16},
    {at::kBFloat16, DataType::kBFloat16},
    {at::kFloat, DataType::kFloat32},
    {at::kDouble, DataType::kFloat64},
    {at::kComplexFloat, DataType::kComplex64},
    {at::kComplexDouble, DataType::kComplex128},
    {at::kFloat8_e4m3fn, DataType::kFloat8E4M3},
    {at::kFloat8_e5m2, DataType::kFloat8E5M2},
    {at::kFloat8_e4m3fnuz, DataType::kFloat8E4M3Uz},
    {at::kFloat8_e5m2fnuz, DataType::kFloat8E5M2Uz},
}};

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw std::invalid_argument(name + ": " + why);
}

bool plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

std::optional<DataType> data_type_of(at::ScalarType type) noexcept {
  for (const auto& [torch_type, core_type] : kTypes) {
    if (torch_type == type) return core_type;
  }
  return std::nullopt;
}

void check_tensor(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) refuse(name, "the tensor is undefined");
  if (tensor.layout() != at::kStrided) {
    refuse(name,
           "a sparse tensor cannot be passed here: pass tensor.to_dense(), or its indices and "
           "values to two allgathers");
  }
  if (!tensor.device().is_cpu()) {
    refuse(name, "the tensor is on device " + tensor.device().str() +
                     ", and this build of hvdtorch moves CPU tensors only: pass tensor.cpu()");
  }
  if (!data_type_of(tensor.scalar_type())) {
    refuse(name, std::string("tensors of dtype ") + at::toString(tensor.scalar_type()) +
                     " cannot be moved: convert it, or view it as uint8");
  }
}

std::shared_ptr<Member> attach(Operation& operation, const at::Tensor& tensor, bool in_place) {
  const at::NoGradGuard no_grad;
  auto member = std::make_shared<Member>();
  member->given = tensor;
  member->in_place = in_place;
  // A detached view with a version counter of its own: results leave autograd untouched.
  const at::Tensor data = tensor.tensor_data();
  const bool staged = !plain(data);
  if (in_place && staged && at::has_internal_overlap(data) == at::MemOverlap::Yes) {
    refuse(operation.desc->name,
           "elements of this tensor share memory (is it expanded?), so a result cannot be written "
           "into it: pass tensor.contiguous(), or use the out-of-place form");
  }
  member->input = staged ? data.resolve_conj().resolve_neg().contiguous() : data;
  operation.input = member->input.const_data_ptr();
  switch (operation.desc->kind) {
    case OpKind::kAllreduce:
    case OpKind::kBroadcast:
      member->output = in_place ? member->input : at::empty(data.sizes(), data.options());
      operation.output = member->output.mutable_data_ptr();
      break;
    default:
      operation.allocate = [m = member.get()](const std::vector<int64_t>& shape) {
        const at::NoGradGuard no_grad;
        m->output = at::empty(shape, m->input.options());
        return m->output.mutable_data_ptr();
      };
  }
  if (in_place && staged) {
    operation.finish = [m = member.get(), data] {
      const at::NoGradGuard no_grad;
      data.copy_(m->output);
    };
  }
  operation.keepalive = member;
  return member;
}

}  // namespace hvdtorch
