// Planner: which agreed tensors share one launch, and where each lies in the fusion buffer.
//
// Fusing is decided at the coordinator, in the order of agreement; the layout of a launch is
// computed by every rank from the log entry alone, so offsets are identical everywhere.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "core/message.h"
#include "core/negotiator.h"

namespace hvdtorch {

// Note [Inline]
// A tensor of at most `inline_limit` bytes (a loss, a metric, a bias) is cheaper to send along
// with its Ready than to announce. When every rank's payload arrived, the coordinator computes the
// result with the same kernels as the transports, in the same order, and the log entry carries it:
// one round trip, no data transport. A barrier is the case of no bytes at all.
//
// A larger one is still faster that way when it is alone, since a transfer takes more steps; but
// many at a time would all pass through rank 0 instead of being fused. So a rank has two limits,
// and the larger one counts for an operation that has nothing beside it on that rank. Ranks may
// judge that differently: then some payload is missing, and the transport is used.

// Whether `desc` sends its payload along.
bool may_inline(const OpDesc& desc, int64_t inline_limit, int set_size) noexcept;

// Where the members of a launch lie in the fusion buffer: each at a 64-byte boundary.
struct Layout {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
};
inline constexpr int64_t kAlignment = 64;
Layout layout_of(const Launch& launch);

// What an Average over a set of `size` ranks divides by when some are absent.
inline int64_t average_divisor(int size, const std::vector<int>& absent,
                               bool average_over_active) noexcept {
  return size - (average_over_active ? static_cast<int64_t>(absent.size()) : 0);
}

// The queue of one process set.
class Planner {
 public:
  struct Options {
    int64_t fusion_threshold = 0;      // bytes; 0 turns fusion off
    bool group_fusion = true;          // false: a group is fused with nothing but itself
    bool average_over_active = false;  // see average_divisor()
    // By rank of the set: equal for ranks on one host. Empty: all are.
    std::vector<int> hosts = {};
  };
  Planner(int size, Options options) : size_(size), options_(std::move(options)) {}

  // Takes an agreement (no error). What needs no data transport (inline results, which are computed
  // here, and barriers) is returned: it is due at once.
  std::optional<Launch> add(Decision decision);

  bool idle() const noexcept { return queue_.empty(); }
  bool full() const noexcept { return queued_bytes_ >= options_.fusion_threshold; }

  // Everything queued, fused under the threshold; looks past members that do not fit, keeping the
  // order among those.
  std::vector<Launch> plan();

 private:
  struct Queued {
    LaunchItem item;
    std::vector<int> absent;
  };
  bool fusable(const Launch& launch, const Queued& queued) const;

  int size_;
  Options options_;
  int64_t queued_bytes_ = 0;
  std::deque<Queued> queue_;
};

}  // namespace hvdtorch
