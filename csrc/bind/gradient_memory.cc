#include "bind/gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/job.h"

namespace hvdtorch {
namespace {

using Block = std::shared_ptr<std::byte>;

// The blocks of one number of bytes.
struct Shelf {
  int wanted = 0;  // at a time
  int taken = 0;
  std::vector<Block> free;
};

std::mutex mutex;  // of all that follows
std::map<size_t, Shelf>& shelves() {
  static auto* all = new std::map<size_t, Shelf>;  // tensors outlive static destruction
  return *all;
}
int job = 0;  // counts resets

thread_local bool serving = false;

bool in_forked_child() {
  static const pid_t owner = getpid();  // first called when the first block is lent
  return getpid() != owner;
}

// A block that is in use.
struct Loan {
  Block block;
  size_t bytes;
  int job;
};
// By address, which is all that the raw interface of allocators hands back.
std::unordered_map<void*, Loan>& loans() {
  static auto* all = new std::unordered_map<void*, Loan>;
  return *all;
}

// Whether the memory was lent from here.
bool give_back(void* data) {
  Block block;  // let go after the lock
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) {
    // In a forked child it may be held by a thread that is not there: nothing is freed then.
    if (in_forked_child()) return true;
    lock.lock();
  }
  const auto found = loans().find(data);
  if (found == loans().end()) return false;
  const auto [bytes, of_job] = std::pair(found->second.bytes, found->second.job);
  block = std::move(found->second.block);
  loans().erase(found);
  if (of_job != job || in_forked_child()) return true;
  Shelf& shelf = shelves()[bytes];
  --shelf.taken;
  if (static_cast<int>(shelf.free.size()) + shelf.taken < shelf.wanted) {
    shelf.free.push_back(std::move(block));
  }
  return true;
}

// Null if there is none for a tensor of that size.
void* take(size_t bytes) {
  if (in_forked_child()) return nullptr;  // it would write to its parent's memory
  const std::lock_guard lock(mutex);
  const auto found = shelves().find(bytes);
  if (found == shelves().end() || found->second.taken >= found->second.wanted) return nullptr;
  Shelf& shelf = found->second;
  Block block;
  if (shelf.free.empty()) {
    block = Job::instance().allocate(static_cast<int64_t>(bytes));
  } else {
    block = std::move(shelf.free.back());
    shelf.free.pop_back();
  }
  void* data = block.get();
  loans().emplace(data, Loan{std::move(block), bytes, job});
  ++shelf.taken;
  return data;
}

c10::Allocator* others = nullptr;  // the allocator that was there before

void release(void* data) {
  if (!give_back(data)) others->raw_deleter()(data);
}

class ServingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (serving && Job::instance().running()) {
      try {
        // The context is the address: what raw_allocate(), by which libraries ask, insists on.
        if (void* data = take(bytes)) return {data, data, &release, at::kCPU};
      } catch (const std::exception&) {
        // No memory to share, or no job any more.
      }
    }
    return others->allocate(bytes);
  }
  // For either's memory.
  c10::DeleterFnPtr raw_deleter() const override {
    return others->raw_deleter() == nullptr ? nullptr : &release;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    others->copy_data(to, from, count);
  }
};

}  // namespace

void GradientMemory::want(size_t bytes) {
  static const bool installed = [] {
    others = c10::GetCPUAllocator();
    // Never destroyed, like the one before it.
    c10::SetCPUAllocator(new ServingAllocator, /*priority=*/255);
    return true;
  }();
  static_cast<void>(installed);
  const std::lock_guard lock(mutex);
  ++shelves()[bytes].wanted;
}

void GradientMemory::unwant(size_t bytes) noexcept {
  std::vector<Block> freed;  // after the lock is let go
  const std::lock_guard lock(mutex);
  Shelf& shelf = shelves()[bytes];
  if (--shelf.wanted < static_cast<int>(shelf.free.size())) {
    freed.push_back(std::move(shelf.free.back()));
    shelf.free.pop_back();
  }
}

void GradientMemory::begin() noexcept { serving = true; }
void GradientMemory::end() noexcept { serving = false; }

void GradientMemory::reset() noexcept {
  const std::lock_guard lock(mutex);
  ++job;
  for (auto& [bytes, shelf] : shelves()) {
    shelf.taken = 0;
    shelf.free.clear();
  }
}

}  // namespace hvdtorch
