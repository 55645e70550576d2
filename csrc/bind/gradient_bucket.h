// GradientBucket: gradients that are reduced together, by one operation on one piece of memory.
//
// Every member has a place in the memory. A gradient that autograd has just made is copied there
// while it is in the cache, and `.grad` becomes a view of the place, so that the reduction needs no
// copy in or out, and the next backward() adds to it in place. The memory is used again in the next
// pass, unless somebody still looks at a gradient of this one: then the bucket takes other memory.
// A bucket of a single gradient needs none: it reduces the gradient where autograd has put it.
//
// Where `.grad` cannot be replaced (the user holds it, or it has a graph of its own), its values
// are copied into the place and the result is copied back; such a gradient is called loose here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/job.h"

namespace hvdtorch {

// What became of a gradient on this rank in the pass; the values of gradient_launches.py.
enum GradientMark : uint8_t { kClean = 0, kHeld = 1, kWaiting = 2, kLaunched = 3 };

class GradientBucket;
class GradientHooks;

// A parameter that is reduced.
struct GradientSlot {
  GradientHooks* hooks = nullptr;  // its group's; null once those are gone
  size_t index = 0;                // in the group
  at::Tensor parameter;            // undefined once nobody uses the group any more
  bool fresh = false;              // `.grad` did not exist before this pass
  GradientBucket* bucket = nullptr;
  size_t member = 0;  // of the bucket

  uint8_t& mark() const;
};

// What all of a bucket's reductions have in common.
struct GradientReduction {
  std::string name;
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1.0;
  double postscale = 1.0;
  uint32_t process_set = 0;
};

class GradientBucket {
 public:
  // `sizes` and (dense) `strides`: of the members' gradients, all of which have the dtype `type`.
  GradientBucket(std::vector<std::shared_ptr<GradientSlot>> slots,
                 std::vector<std::vector<int64_t>> sizes, std::vector<std::vector<int64_t>> strides,
                 at::ScalarType type, GradientReduction reduction);
  ~GradientBucket();
  GradientBucket(const GradientBucket&) = delete;
  GradientBucket& operator=(const GradientBucket&) = delete;

  // A member's gradient is ready. With the last one the bucket is launched. False, and nothing
  // happens, if the gradient is not the kind of tensor that the bucket was made for.
  bool offer(size_t member);

  // Reduces what is in the members' `.grad` now, and zeros for a member that has nothing fitting.
  // Throws what Job::submit throws.
  void launch();

  // Takes part with zeros, and touches no gradient.
  void launch_zeros();

  // No gradient is for this bucket any more; what is in flight stays so.
  void retire();

  bool in_flight() const noexcept { return submitted_.has_value(); }
  const Submitted& submitted() const { return submitted_.value(); }
  // What the operation in flight reduces; undefined where it was given zeros.
  std::vector<at::Tensor> gradients() const;
  int64_t launches() const noexcept { return launches_; }  // so far

  // The operation in flight is complete.
  void land();
  // It may never be: the memory it was given is left to it.
  void abandon();

  // At the begin of a pass: counts anew how many members are not ready.
  void recount();

 private:
  struct Member {
    std::shared_ptr<GradientSlot> slot;
    std::vector<int64_t> sizes, strides;
    int64_t numel = 0;
    int64_t offset = 0;   // in the memory, in elements
    at::Tensor place;     // there, with a storage of its own
    at::Tensor gradient;  // while in flight

    // The slot's `.grad`; undefined without a parameter.
    const at::Tensor& grad() const;
  };

  // Whether the agreed strides are those of a contiguous tensor.
  static bool in_order(const Member& member);
  bool fits(const Member& member, const at::Tensor& gradient) const;
  static bool placed(const Member& member, const at::Tensor& gradient);
  bool must_move() const;
  void take_memory();
  void submit(at::Tensor operand, std::function<void()> finish);
  bool put(const Member& member, at::Tensor& gradient) const;
  size_t bytes_of_one() const;
  at::Tensor gather(std::vector<size_t>& loose);
  at::Tensor operand_of_one(std::vector<size_t>& loose);

  std::vector<Member> members_;
  const at::ScalarType type_;
  const int64_t element_;  // bytes
  const GradientReduction reduction_;
  int64_t numel_ = 0;  // of the memory
  at::Tensor memory_;  // all of it, flat; undefined until it is needed
  size_t missing_ = 0;
  int64_t launches_ = 0;
  std::optional<Submitted> submitted_;
};

}  // namespace hvdtorch
