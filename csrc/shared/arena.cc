#include "shared/arena.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "core/log.h"

namespace hvdtorch {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLargestStep = 64 << 20;  // by which the arena grows ahead of need

int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

SharedArena::SharedArena(Offer* offers) : offers_(offers), pid_(getpid()), regions_(kRegions) {}

SharedArena::~SharedArena() { close(); }

// Keeps the arena, and with it the region, alive.
struct SharedArena::Block {
  std::shared_ptr<SharedArena> arena;
  int slot;
  int64_t offset, bytes;
  void operator()(std::byte*) const noexcept { arena->give_back(slot, offset, bytes); }
};

std::shared_ptr<std::byte> SharedArena::allocate(int64_t bytes) {
  const int64_t length = align_up(std::max<int64_t>(bytes, 1), kAlignment);
  std::string why;
  {
    std::lock_guard lock(mutex_);
    for (int slot = 0; slot < kRegions; ++slot) {
      if (auto block = take(slot, length)) return block;
    }
    if (offers_ != nullptr) {
      why = add_region(length);
      for (int slot = 0; slot < kRegions && why.empty(); ++slot) {
        if (auto block = take(slot, length)) return block;
      }
    }
  }
  auto* own = static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(length)));
  if (own == nullptr) throw std::bad_alloc();
  if (!why.empty() && !warned_.exchange(true)) {
    log_line(LogLevel::kWarning, "arena.cc",
             "cannot share another " + std::to_string(bytes) +
                 " bytes of memory with the other ranks of this host (" + why +
                 "): tensors there are copied, which is slower");
  }
  return {own, [](std::byte* data) { std::free(data); }};
}

// With the lock held; null if it does not fit. First fit.
std::shared_ptr<std::byte> SharedArena::take(int slot, int64_t bytes) {
  Region& region = regions_[static_cast<size_t>(slot)];
  const auto hole = std::find_if(region.free.begin(), region.free.end(),
                                 [&](const auto& each) { return each.second >= bytes; });
  if (hole == region.free.end()) return nullptr;
  const auto [offset, length] = *hole;
  region.free.erase(hole);
  if (length > bytes) region.free.emplace(offset + bytes, length - bytes);
  region.used += bytes;
  return {region.segment->data() + offset, Block{shared_from_this(), slot, offset, bytes}};
}

// With the lock held. Empty, or why there is none.
std::string SharedArena::add_region(int64_t bytes) {
  const auto free_slot = std::find_if(regions_.begin(), regions_.end(),
                                      [](const Region& region) { return !region.segment; });
  if (free_slot == regions_.end()) {
    return "all " + std::to_string(kRegions) + " regions are in use";
  }
  const auto slot = static_cast<int>(free_slot - regions_.begin());
  const int64_t size = align_up(std::max(bytes, next_region_bytes_), kPage);
  try {
    free_slot->segment = Segment::create(static_cast<size_t>(size), "shared memory for tensors");
  } catch (const SharedMemoryError& error) {
    return error.what();
  }
  next_region_bytes_ = std::min(2 * next_region_bytes_, kLargestStep);
  free_slot->id = ++last_id_;
  free_slot->free = {{0, size}};
  free_slot->used = 0;
  offers_[slot].fd.store(free_slot->segment->fd());
  offers_[slot].bytes.store(static_cast<uint64_t>(size));
  offers_[slot].id.store(free_slot->id, std::memory_order_release);
  return "";
}

void SharedArena::give_back(int slot, int64_t offset, int64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  Region& region = regions_[static_cast<size_t>(slot)];
  region.used -= bytes;
  auto next = region.free.lower_bound(offset);
  if (next != region.free.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = region.free.erase(next);
  }
  if (next != region.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      bytes = 0;
    }
  }
  if (bytes > 0) region.free.emplace(offset, bytes);
  if (region.used > 0) return;
  // One unused region is kept for the next block; so are all of them in a forked child, whose
  // parent may use them.
  const bool another = std::any_of(regions_.begin(), regions_.end(), [&](const Region& each) {
    return &each != &region && each.segment && each.used == 0;
  });
  if ((another || offers_ == nullptr) && getpid() == pid_) withdraw(slot);
}

void SharedArena::withdraw(int slot) noexcept {
  Region& region = regions_[static_cast<size_t>(slot)];
  if (offers_ != nullptr) offers_[slot].id.store(0, std::memory_order_release);
  region.segment->discard();
  region = {};
}

std::optional<SharedArena::Place> SharedArena::place_of(const void* data, int64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(mutex_);
  if (offers_ == nullptr) return std::nullopt;
  for (size_t slot = 0; slot < regions_.size(); ++slot) {
    const Region& region = regions_[slot];
    if (!region.segment) continue;
    const auto begin = reinterpret_cast<uintptr_t>(region.segment->data());
    if (address < begin || address + static_cast<uintptr_t>(bytes) > begin + region.segment->size())
      continue;
    return Place{region.id, static_cast<uint32_t>(slot), static_cast<int64_t>(address - begin)};
  }
  return std::nullopt;
}

void SharedArena::close() noexcept {
  std::lock_guard lock(mutex_);
  if (offers_ == nullptr) return;
  for (int slot = 0; slot < kRegions && getpid() == pid_; ++slot) {
    Region& region = regions_[static_cast<size_t>(slot)];
    if (!region.segment) continue;
    offers_[slot].id.store(0, std::memory_order_release);
    region.segment->close_fd();
    if (region.used == 0) region = {};
  }
  offers_ = nullptr;
}

}  // namespace hvdtorch
