#include "core/planner.h"

#include <cstring>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {
namespace {

bool fusable(const OpDesc& a, const OpDesc& b) {
  if (a.process_set != b.process_set || a.kind != b.kind || !(a.device == b.device)) return false;
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

void Planner::add(Decision decision, int64_t divisor) {
  if (decision.error) {
    immediate_.emplace_back(std::move(*decision.error));
    return;
  }
  Launch inlined;
  inlined.inlined = true;
  for (Agreement& agreement : decision.agreed) {
    const OpDesc& desc = *agreement.desc;
    LaunchItem item{agreement.desc, std::move(agreement.rows), {}};
    const auto& payloads = agreement.payloads;
    if (desc.kind == OpKind::kBarrier) {
      inlined.items.push_back(std::move(item));
    } else if (payloads.empty()) {
      queued_bytes_ += desc.bytes();
      queue_.push_back(std::move(item));
    } else if (desc.kind == OpKind::kBroadcast) {
      item.result = payloads[static_cast<size_t>(desc.root)];
      inlined.items.push_back(std::move(item));
    } else if (desc.kind == OpKind::kAllgather) {
      item.result = concatenate(payloads);
      inlined.items.push_back(std::move(item));
    } else {
      const auto bytes = static_cast<size_t>(desc.bytes());
      const Reduction reduction{desc.dtype, desc.op, desc.prescale, desc.postscale, divisor};
      std::vector<const void*> sources;
      for (const auto& payload : payloads) {
        sources.push_back(payload.data());
      }
      item.result.resize(bytes);
      reduce(reduction, item.result.data(), sources.data(), static_cast<int>(sources.size()),
             desc.numel());
      inlined.items.push_back(std::move(item));
    }
  }
  if (!inlined.items.empty()) immediate_.emplace_back(std::move(inlined));
}

std::vector<Launch> Planner::plan() {
  std::vector<Launch> launches;
  std::vector<int64_t> bytes;
  // How many open launches a tensor is compared with: bounds the work when nothing fits together.
  constexpr size_t kLookBack = 8;
  for (LaunchItem& item : queue_) {
    const int64_t size = item.desc->bytes();
    size_t home = launches.size();
    const size_t oldest = launches.size() > kLookBack ? launches.size() - kLookBack : 0;
    for (size_t i = oldest; i < launches.size(); ++i) {
      if (bytes[i] + size <= threshold_ && fusable(*launches[i].items.front().desc, *item.desc)) {
        home = i;
        break;
      }
    }
    if (home == launches.size()) {
      launches.emplace_back();
      bytes.push_back(0);
    }
    bytes[home] += size;
    launches[home].items.push_back(std::move(item));
  }
  queue_.clear();
  queued_bytes_ = 0;
  return launches;
}

}  // namespace hvdtorch
