#include "bind/gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <memory>
#include <mutex>
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

// What a tensor holds of its block.
struct Loan {
  Loan(Block block, size_t bytes, int job) : block(std::move(block)), bytes(bytes), job(job) {}
  Block block;
  size_t bytes;
  int job;
};

void give_back(void* context) {
  const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
  // In a forked child the lock may be held by a thread that is not there.
  if (!Job::instance().running()) return;
  const std::lock_guard lock(mutex);
  if (loan->job != job) return;
  Shelf& shelf = shelves()[loan->bytes];
  --shelf.taken;
  if (static_cast<int>(shelf.free.size()) + shelf.taken < shelf.wanted) {
    shelf.free.push_back(std::move(loan->block));
  }
}

// Null if there is none for a tensor of that size.
std::unique_ptr<Loan> take(size_t bytes) {
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
  ++shelf.taken;
  return std::make_unique<Loan>(std::move(block), bytes, job);
}

class ServingAllocator final : public c10::Allocator {
 public:
  explicit ServingAllocator(c10::Allocator* other) : other_(other) {}

  c10::DataPtr allocate(size_t bytes) override {
    // Not in a forked child: it would write to its parent's memory.
    if (serving && Job::instance().running()) {
      try {
        if (auto loan = take(bytes)) {
          std::byte* data = loan->block.get();
          return {data, loan.release(), &give_back, at::kCPU};
        }
      } catch (const std::exception&) {
        // No memory to share, or no job any more.
      }
    }
    return other_->allocate(bytes);
  }
  // Of the other's allocations. A block's context is not its address, by which raw_allocate() sees
  // that it must not be freed like those.
  c10::DeleterFnPtr raw_deleter() const override { return other_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    other_->copy_data(to, from, count);
  }

 private:
  c10::Allocator* other_;
};

}  // namespace

void GradientMemory::want(size_t bytes) {
  static const bool installed = [] {
    // Never destroyed, like the one before it.
    c10::SetCPUAllocator(new ServingAllocator(c10::GetCPUAllocator()), /*priority=*/255);
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
