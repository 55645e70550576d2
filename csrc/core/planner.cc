#include "core/planner.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce_by_host.h"

namespace hvdtorch {
namespace {

std::string concatenate(const std::vector<std::string>& parts) {
  std::string all;
  for (const auto& part : parts) all += part;
  return all;
}

}  // namespace

bool may_inline(const OpDesc& desc, int64_t inline_limit, int set_size) noexcept {
  if (desc.device.kind != DeviceKind::kCpu || set_size < 2) return false;
  // The coordinator receives one payload per rank: bound the sum as well.
  constexpr int64_t kMaxTotal = 512 * 1024;
  const int64_t limit = std::min(inline_limit, kMaxTotal / set_size);
  switch (desc.kind) {
    case OpKind::kAllreduce:
      return desc.op != ReduceOp::kAdasum && desc.bytes() <= limit;
    case OpKind::kAllgather:
    case OpKind::kBroadcast:
      return desc.bytes() <= limit;
    default:
      return false;
  }
}

Layout layout_of(const Launch& launch) {
  Layout layout;
  layout.offsets.reserve(launch.items.size());
  for (const LaunchItem& item : launch.items) {
    layout.offsets.push_back(layout.bytes);
    layout.bytes += (item.desc->bytes() + kAlignment - 1) / kAlignment * kAlignment;
  }
  return layout;
}

std::optional<Launch> Planner::add(Decision decision) {
  Launch inlined;
  inlined.inlined = true;
  for (Agreement& agreement : decision.agreed) {
    const OpDesc& desc = *agreement.desc;
    LaunchItem item{agreement.desc, std::move(agreement.numbers), {}};
    const auto& payloads = agreement.payloads;
    if (desc.kind >= OpKind::kBarrier) {
      // Nothing but the fact that all are here.
    } else if (payloads.empty()) {
      queued_bytes_ += desc.bytes();
      queue_.push_back({std::move(item), std::move(agreement.absent)});
      continue;
    } else if (desc.kind == OpKind::kBroadcast) {
      item.result = payloads[static_cast<size_t>(desc.root)];
    } else if (desc.kind == OpKind::kAllgather) {
      item.result = concatenate(payloads);
    } else {
      const Reduction reduction{
          desc.dtype, desc.op, desc.prescale, desc.postscale,
          average_divisor(size_, agreement.absent, options_.average_over_active)};
      std::vector<const void*> sources;
      std::vector<int> hosts;
      for (size_t i = 0; i < payloads.size(); ++i) {
        if (!std::binary_search(agreement.absent.begin(), agreement.absent.end(), i)) {
          sources.push_back(payloads[i].data());
          hosts.push_back(options_.hosts.empty() ? 0 : options_.hosts[i]);
        }
      }
      item.result.resize(static_cast<size_t>(desc.bytes()));
      reduce_by_host(reduction, item.result.data(), sources, hosts, desc.numel());
    }
    inlined.absent = agreement.absent;  // the members of a group were submitted by the same ranks
    inlined.items.push_back(std::move(item));
  }
  if (inlined.items.empty()) return std::nullopt;
  return inlined;
}

bool Planner::fusable(const Launch& launch, const Queued& queued) const {
  const OpDesc& a = *launch.items.front().desc;
  const OpDesc& b = *queued.item.desc;
  // To copy a larger tensor into the fusion buffer and back takes longer than a launch of its own.
  constexpr int64_t kWorthPacking = 1 << 20;
  if (std::max(a.bytes(), b.bytes()) > kWorthPacking) return false;
  if (a.kind != b.kind || !(a.device == b.device) || launch.absent != queued.absent) return false;
  if (!options_.group_fusion && a.group != b.group) return false;
  switch (a.kind) {
    case OpKind::kAllreduce:
      return a.dtype == b.dtype && a.op == b.op && same_factor(a.prescale, b.prescale) &&
             same_factor(a.postscale, b.postscale);
    case OpKind::kBroadcast:  // bytes are bytes
      return a.root == b.root;
    default:
      return false;
  }
}

std::vector<Launch> Planner::plan() {
  std::vector<Launch> launches;
  std::vector<int64_t> bytes;
  // How many open launches a tensor is compared with: bounds the work when nothing fits together.
  constexpr size_t kLookBack = 8;
  for (Queued& queued : queue_) {
    const int64_t size = queued.item.desc->bytes();
    size_t home = launches.size();
    const size_t oldest = launches.size() > kLookBack ? launches.size() - kLookBack : 0;
    for (size_t i = oldest; i < launches.size(); ++i) {
      if (bytes[i] + size <= options_.fusion_threshold && fusable(launches[i], queued)) {
        home = i;
        break;
      }
    }
    if (home == launches.size()) {
      launches.emplace_back().absent = std::move(queued.absent);
      bytes.push_back(0);
    }
    bytes[home] += size;
    launches[home].items.push_back(std::move(queued.item));
  }
  queue_.clear();
  queued_bytes_ = 0;
  return launches;
}

}  // namespace hvdtorch
