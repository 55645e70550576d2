#include "bind/gradient_bucket.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bind/gradient_hooks.h"
#include "bind/gradient_memory.h"
#include "core/planner.h"

namespace hvdtorch {
namespace {

at::TensorOptions options_of(at::ScalarType type) {
  return at::TensorOptions(type).device(at::kCPU);
}

// Strides of dimensions of size 1 mean nothing.
bool same_strides(at::IntArrayRef sizes, at::IntArrayRef one, at::IntArrayRef other) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (one[i] != other[i] && sizes[i] != 1) return false;
  }
  return true;
}

// Its bytes are what they seem: nothing is to be conjugated or negated when they are read.
bool plain(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

// Nothing but the parameter refers to its gradient (apart from a wrapper of Python's that nobody
// refers to).
bool unshared(const at::Tensor& gradient) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return torch::autograd::impl::is_tensor_stealable(gradient, 1);
#else
  return gradient.use_count() <= 1;
#endif
}

}  // namespace

uint8_t& GradientSlot::mark() const {
  static uint8_t nobodys;
  return hooks != nullptr ? hooks->mark(index) : nobodys;
}

const at::Tensor& GradientBucket::Member::grad() const {
  static const at::Tensor none;
  return slot->parameter.defined() ? slot->parameter.grad() : none;
}

GradientBucket::GradientBucket(std::vector<std::shared_ptr<GradientSlot>> slots,
                               std::vector<std::vector<int64_t>> sizes,
                               std::vector<std::vector<int64_t>> strides, at::ScalarType type,
                               GradientReduction reduction)
    : type_(type),
      element_(static_cast<int64_t>(c10::elementSize(type))),
      reduction_(std::move(reduction)) {
  const int64_t step = std::max<int64_t>(kAlignment / element_, 1);
  for (size_t i = 0; i < slots.size(); ++i) {
    Member member;
    member.slot = std::move(slots[i]);
    member.sizes = std::move(sizes[i]);
    member.strides = std::move(strides[i]);
    member.numel = c10::multiply_integers(member.sizes);
    member.offset = numel_;
    numel_ += (member.numel + step - 1) / step * step;
    member.slot->bucket = this;
    member.slot->member = i;
    members_.push_back(std::move(member));
  }
  if (members_.size() == 1) GradientMemory::want(bytes_of_one());
  recount();
}

GradientBucket::~GradientBucket() {
  retire();
  if (members_.size() == 1) GradientMemory::unwant(bytes_of_one());
}

size_t GradientBucket::bytes_of_one() const {
  return static_cast<size_t>(members_.front().numel * element_);
}

void GradientBucket::retire() {
  for (Member& member : members_) {
    if (member.slot->bucket == this) member.slot->bucket = nullptr;
  }
}

void GradientBucket::recount() {
  missing_ = 0;
  for (const Member& member : members_) missing_ += member.slot->mark() != kWaiting;
}

bool GradientBucket::in_order(const Member& member) {
  int64_t expected = 1;
  for (size_t i = member.sizes.size(); i-- > 0;) {
    if (member.sizes[i] != 1 && member.strides[i] != expected) return false;
    expected *= member.sizes[i];
  }
  return true;
}

bool GradientBucket::fits(const Member& member, const at::Tensor& gradient) const {
  return gradient.defined() && gradient.layout() == at::kStrided && gradient.device().is_cpu() &&
         gradient.scalar_type() == type_ && gradient.sizes() == at::IntArrayRef(member.sizes) &&
         !gradient.unsafeGetTensorImpl()->is_python_dispatch() &&
         (gradient.is_non_overlapping_and_dense() ||
          at::has_internal_overlap(gradient) == at::MemOverlap::No);
}

bool GradientBucket::placed(const Member& member, const at::Tensor& gradient) {
  return member.place.defined() && gradient.defined() && gradient.has_storage() &&
         gradient.storage().is_alias_of(member.place.storage()) && gradient.storage_offset() == 0 &&
         gradient.sizes() == at::IntArrayRef(member.sizes) &&
         same_strides(member.sizes, gradient.strides(), member.strides) &&
         !gradient.requires_grad();
}

// Whether the memory cannot be written to: there is none, or somebody looks at an older gradient.
bool GradientBucket::must_move() const {
  return !memory_.defined() ||
         std::any_of(members_.begin(), members_.end(), [](const Member& member) {
           return member.place.storage().use_count() > 1 && !placed(member, member.grad());
         });
}

void GradientBucket::take_memory() {
  const std::shared_ptr<std::byte> block = Job::instance().allocate(numel_ * element_);
  // The gaps between members are reduced along: keep them tame.
  std::memset(block.get(), 0, static_cast<size_t>(numel_ * element_));
  const auto keep = [block](void*) {};
  memory_ = at::from_blob(block.get(), {numel_}, keep, options_of(type_));
  for (Member& member : members_) {
    member.place = at::from_blob(block.get() + member.offset * element_, member.sizes,
                                 member.strides, keep, options_of(type_));
  }
}

// Copies the gradient to the member's place and, if nobody can tell, makes it a view of that.
// Returns whether it is one now.
bool GradientBucket::put(const Member& member, at::Tensor& gradient) const {
  const bool alike = plain(gradient) && gradient.is_non_overlapping_and_dense() &&
                     same_strides(member.sizes, gradient.strides(), member.strides);
  if (alike) {
    std::memcpy(member.place.mutable_data_ptr(), gradient.const_data_ptr(),
                static_cast<size_t>(member.numel * element_));
  } else {
    const at::NoGradGuard no_grad;
    member.place.copy_(gradient.detach());
  }
  // A gradient that autograd has made in this pass may share a storage (with the tensor it is a
  // transposed view of, say); an older one may be a part of a tensor that the user knows.
  if (!alike || gradient.requires_grad() || !unshared(gradient) ||
      !(member.slot->fresh || gradient.storage().use_count() == 1)) {
    return false;
  }
  gradient = at::Tensor(member.place.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
  return true;
}

bool GradientBucket::offer(size_t index) {
  const Member& member = members_[index];
  at::Tensor& gradient = member.slot->parameter.mutable_grad();
  if (!fits(member, gradient)) return false;
  uint8_t& mark = member.slot->mark();
  if (mark != kWaiting) {
    if (members_.size() > 1) {
      // Only the first member can ask for all; launch() looks again.
      if (!memory_.defined() || (missing_ == members_.size() && must_move())) take_memory();
      if (!placed(member, gradient) && member.place.storage().use_count() == 1) {
        put(member, gradient);
      }
    }
    mark = kWaiting;
    if (missing_ > 0) --missing_;
  }
  if (missing_ == 0) {
    recount();
    if (missing_ == 0) launch();
  }
  return true;
}

// The memory, with all gradients in it. `loose`: the members to copy back from it.
at::Tensor GradientBucket::gather(std::vector<size_t>& loose) {
  if (must_move()) take_memory();
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    if (!fits(member, member.grad())) {
      std::memset(member.place.mutable_data_ptr(), 0, static_cast<size_t>(member.numel * element_));
      continue;
    }
    at::Tensor& gradient = member.slot->parameter.mutable_grad();
    if (!placed(member, gradient) && !put(member, gradient)) loose.push_back(i);
    member.gradient = gradient;
  }
  return memory_;
}

// The same for a bucket of one, in the gradient's own memory if possible.
at::Tensor GradientBucket::operand_of_one(std::vector<size_t>& loose) {
  const at::NoGradGuard no_grad;
  Member& member = members_.front();
  if (fits(member, member.grad())) member.gradient = member.grad();
  const at::Tensor& gradient = member.gradient;
  at::Tensor operand;
  if (gradient.defined() && plain(gradient) && gradient.is_non_overlapping_and_dense() &&
      same_strides(member.sizes, gradient.strides(), member.strides)) {
    operand = gradient.tensor_data();  // the same memory, unseen by autograd
  } else {
    operand = at::empty_strided(member.sizes, member.strides, options_of(type_));
    if (gradient.defined()) {
      operand.copy_(gradient.detach());
      loose.push_back(0);
    } else {
      operand.zero_();
    }
  }
  // Else flat, in the order of its memory. The agreed strides decide, the same on all ranks.
  if (in_order(member)) return operand;
  return at::as_strided(operand, {member.numel}, {1}, operand.storage_offset());
}

void GradientBucket::launch() {
  std::vector<size_t> loose;
  at::Tensor operand = members_.size() > 1 ? gather(loose) : operand_of_one(loose);
  std::function<void()> finish;
  if (!loose.empty()) {
    const at::NoGradGuard no_grad;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // from, to
    for (size_t i : loose) {
      const Member& member = members_[i];
      copies.emplace_back(at::as_strided(operand, member.sizes, member.strides,
                                         operand.storage_offset() + member.offset),
                          member.gradient.tensor_data());
    }
    finish = [copies = std::move(copies)] {
      const at::NoGradGuard no_grad;
      for (const auto& [from, to] : copies) to.copy_(from);
    };
  }
  submit(std::move(operand), std::move(finish));
  ++launches_;
  for (const Member& member : members_) {
    member.slot->mark() = kLaunched;
    member.slot->fresh = false;
  }
}

void GradientBucket::launch_zeros() {
  at::Tensor operand = members_.size() > 1 ? at::zeros({numel_}, options_of(type_))
                                           : at::zeros(members_.front().sizes, options_of(type_));
  if (members_.size() == 1 && !in_order(members_.front())) operand = operand.flatten();
  submit(std::move(operand), nullptr);
}

void GradientBucket::submit(at::Tensor operand, std::function<void()> finish) {
  Request request;
  request.kind = OpKind::kAllreduce;
  request.name = reduction_.name;
  request.tensors = {std::move(operand)};
  request.in_place = true;
  request.op = reduction_.op;
  request.prescale = reduction_.prescale;
  request.postscale = reduction_.postscale;
  request.process_set = reduction_.process_set;
  request.site = GradientHooks::site();
  request.finish = std::move(finish);
  try {
    submitted_ = Job::instance().submit(std::move(request));
  } catch (...) {
    land();
    throw;
  }
}

std::vector<at::Tensor> GradientBucket::gradients() const {
  std::vector<at::Tensor> all;
  for (const Member& member : members_) all.push_back(member.gradient);
  return all;
}

void GradientBucket::land() {
  submitted_.reset();
  for (Member& member : members_) member.gradient.reset();
}

void GradientBucket::abandon() {
  if (submitted_ && !submitted_->completion->done()) {
    memory_.reset();
    for (Member& member : members_) member.place.reset();
  }
  land();
}

}  // namespace hvdtorch
