// HostGroup: the ranks of a job that run on one host and share memory. It holds one base segment,
// made by the lowest of them, in which each has a record of what memory it offers to the others
// (publications and the regions of its arena) and a mailbox for the control channel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "shared/arena.h"
#include "shared/segment.h"

namespace hvdtorch {

class HostGroup {
 public:
  static constexpr size_t kMailboxBytes = 128 << 10;

  // What the others need to find a base segment.
  struct Address {
    int pid = 0;
    int fd = -1;
    uint64_t nonce = 0;  // proves that they found the right one
  };

  // Makes the base segment; this rank is number 0 of `size`. SharedMemoryError if it cannot be.
  static std::shared_ptr<HostGroup> create(int size);
  // Opens it as number `index`. SharedMemoryError if it cannot be.
  static std::shared_ptr<HostGroup> open(int index, int size, const Address& address);
  ~HostGroup();

  Address address() const noexcept;
  int index() const noexcept { return index_; }
  int size() const noexcept { return size_; }

  // Zero-filled, at a 64-byte boundary, written by nobody but the control channel.
  std::span<std::byte> mailbox(int index) const noexcept;
  // Of the process that is number `index`; 0 until it has opened the group.
  int pid(int index) const noexcept;

  // Memory that the other ranks can read and write where it is.
  const std::shared_ptr<SharedArena>& shared_arena() const noexcept { return arena_; }
  SharedArena& arena() const noexcept { return *arena_; }
  // Where place `place` of rank `index` is in this process. SharedMemoryError if it is not.
  std::byte* at(int index, const SharedArena::Place& place);

  // A segment for the ranks that all know `key`, which is used once: one of them makes it, and
  // takes it back when it destroys it; the others open it.
  class Publication {
   public:
    ~Publication();
    std::byte* data() const noexcept { return segment_->data(); }

   private:
    friend class HostGroup;
    std::shared_ptr<HostGroup> group_;
    std::unique_ptr<Segment> segment_;
    int slot_ = -1;  // in the maker's record
  };
  std::unique_ptr<Publication> publish(uint64_t key, size_t bytes);
  // Waits until rank `maker` has published it; null if `aborted()` turns true before.
  std::unique_ptr<Publication> find(int maker, uint64_t key, size_t bytes,
                                    const std::function<bool()>& aborted);

 private:
  struct Record;
  struct Header;
  HostGroup(std::unique_ptr<Segment> base, int index, int size);
  static size_t base_bytes(int size);
  Record& record(int index) const noexcept;
  Header& header() const noexcept;
  std::shared_ptr<HostGroup> self() { return self_.lock(); }

  struct Mapped {
    uint64_t id = 0;
    std::unique_ptr<Segment> segment;
  };

  const std::unique_ptr<Segment> base_;
  const int index_, size_;
  const int pid_;
  std::weak_ptr<HostGroup> self_;
  std::shared_ptr<SharedArena> arena_;
  std::mutex mutex_;                                    // guards the rest
  std::map<std::pair<int, uint32_t>, Mapped> regions_;  // of the others' arenas, by rank and slot
};

}  // namespace hvdtorch
