// SharedArena: an allocator of blocks that the other ranks of the host can map: what a collective
// finds there it reads and writes directly, without copies. It grows by regions, one segment each,
// whose offers to the others stand in a table in shared memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shared/segment.h"

namespace hvdtorch {

class SharedArena : public std::enable_shared_from_this<SharedArena> {
 public:
  static constexpr int kRegions = 256;
  static constexpr int64_t kAlignment = 64;

  // A region on offer. In shared memory; id 0: none. Ids are never used again.
  struct Offer {
    std::atomic<uint64_t> id;
    std::atomic<int32_t> fd;
    std::atomic<uint64_t> bytes;
  };

  // Where a block lies, for other ranks.
  struct Place {
    uint64_t region = 0;  // id; 0: nowhere
    uint32_t slot = 0;    // of its offer
    int64_t offset = 0;
  };

  // Null: nobody to share with; all blocks are memory of this process alone.
  explicit SharedArena(Offer* offers);
  ~SharedArena();

  // A block of `bytes`, aligned to 64, not initialised. Once the memory cannot be shared (any more)
  // it is memory of this process alone, and a warning is logged once. std::bad_alloc.
  std::shared_ptr<std::byte> allocate(int64_t bytes);

  // Where those bytes are, if all of them are in one region.
  std::optional<Place> place_of(const void* data, int64_t bytes) const;

  // The group has ended: blocks stay valid, but nobody can map them any more.
  void close() noexcept;

 private:
  struct Region {
    uint64_t id = 0;
    std::unique_ptr<Segment> segment;
    std::map<int64_t, int64_t> free;  // length by offset
    int64_t used = 0;
  };
  struct Block;

  std::shared_ptr<std::byte> take(int slot, int64_t bytes);
  std::string add_region(int64_t bytes);
  void give_back(int slot, int64_t offset, int64_t bytes) noexcept;
  void withdraw(int slot) noexcept;

  mutable std::mutex mutex_;
  Offer* offers_;
  const pid_t pid_;  // a forked child must not change what the parent offers
  std::vector<Region> regions_;
  int64_t next_region_bytes_ = 4 << 20;
  uint64_t last_id_ = 0;
  std::atomic<bool> warned_{false};
};

}  // namespace hvdtorch
