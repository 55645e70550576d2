#include "shared/host_group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace hvdtorch {
namespace {

constexpr int kPublications = 1024;  // of one rank at a time: a process set takes one
constexpr uint64_t kMagic = 0x68766473686d3031;

struct Published {
  std::atomic<uint64_t> key;  // 0: none
  std::atomic<int32_t> fd;
};

uint64_t fresh_nonce() {
  std::random_device random;
  return (uint64_t{random()} << 32) ^ random();
}

}  // namespace

struct alignas(64) HostGroup::Header {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> nonce;
};

struct alignas(64) HostGroup::Record {
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> changes;  // of the publications; a futex
  SharedArena::Offer offers[SharedArena::kRegions];
  Published published[kPublications];
  alignas(64) std::byte mailbox[kMailboxBytes];
};

size_t HostGroup::base_bytes(int size) {
  return sizeof(Header) + static_cast<size_t>(size) * sizeof(Record);
}

// What a fresh segment holds, zeros, is a valid state of every atomic in it.
HostGroup::Header& HostGroup::header() const noexcept {
  return *reinterpret_cast<Header*>(base_->data());
}

HostGroup::Record& HostGroup::record(int index) const noexcept {
  return reinterpret_cast<Record*>(base_->data() + sizeof(Header))[index];
}

HostGroup::HostGroup(std::unique_ptr<Segment> base, int index, int size)
    : base_(std::move(base)), index_(index), size_(size), pid_(getpid()) {
  record(index).pid.store(pid_, std::memory_order_release);
  arena_ = std::make_shared<SharedArena>(record(index).offers);
}

std::shared_ptr<HostGroup> HostGroup::create(int size) {
  auto base = Segment::create(base_bytes(size), "the memory that the ranks of this host share");
  std::shared_ptr<HostGroup> group(new HostGroup(std::move(base), 0, size));
  group->self_ = group;
  group->header().nonce.store(fresh_nonce());
  group->header().magic.store(kMagic, std::memory_order_release);
  return group;
}

std::shared_ptr<HostGroup> HostGroup::open(int index, int size, const Address& address) {
  const std::string what = "the memory that the ranks of this host share";
  auto base = Segment::open(address.pid, address.fd, base_bytes(size), what);
  const auto* header = reinterpret_cast<const Header*>(base->data());
  if (header->magic.load(std::memory_order_acquire) != kMagic ||
      header->nonce.load() != address.nonce) {
    throw SharedMemoryError(what + ": process " + std::to_string(address.pid) +
                            " is another one here (do the ranks see different processes?)");
  }
  std::shared_ptr<HostGroup> group(new HostGroup(std::move(base), index, size));
  group->self_ = group;
  return group;
}

HostGroup::~HostGroup() { arena_->close(); }

HostGroup::Address HostGroup::address() const noexcept {
  return {pid_, base_->fd(), header().nonce.load()};
}

std::span<std::byte> HostGroup::mailbox(int index) const noexcept {
  return {record(index).mailbox, kMailboxBytes};
}

int HostGroup::pid(int index) const noexcept {
  return record(index).pid.load(std::memory_order_acquire);
}

std::byte* HostGroup::at(int index, const SharedArena::Place& place) {
  const uint32_t slot = place.slot % SharedArena::kRegions;
  const auto& offer = record(index).offers[slot];
  std::lock_guard lock(mutex_);
  Mapped& mapped = regions_[{index, slot}];
  if (mapped.id != place.region) {
    mapped = {};
    if (offer.id.load(std::memory_order_acquire) != place.region) {
      throw SharedMemoryError("a rank of this host has withdrawn memory that is in use");
    }
    mapped.segment = Segment::open(pid(index), offer.fd.load(), offer.bytes.load(),
                                   "memory of rank " + std::to_string(index) + " of this host");
    mapped.id = place.region;
  }
  if (place.offset < 0 || static_cast<size_t>(place.offset) > mapped.segment->size()) {
    throw SharedMemoryError("a rank of this host offers memory that is not there");
  }
  return mapped.segment->data() + place.offset;
}

// --- publications ---

std::unique_ptr<HostGroup::Publication> HostGroup::publish(uint64_t key, size_t bytes) {
  auto publication = std::make_unique<Publication>();
  publication->group_ = self();
  publication->segment_ = Segment::create(bytes, "memory of a process set");
  Record& mine = record(index_);
  std::lock_guard lock(mutex_);
  for (int slot = 0; slot < kPublications; ++slot) {
    Published& entry = mine.published[slot];
    if (entry.key.load(std::memory_order_relaxed) != 0) continue;
    entry.fd.store(publication->segment_->fd());
    entry.key.store(key, std::memory_order_seq_cst);
    publication->slot_ = slot;
    mine.changes.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&mine.changes), FUTEX_WAKE, INT_MAX, nullptr,
            nullptr, 0);
    return publication;
  }
  throw SharedMemoryError("more than " + std::to_string(kPublications) +
                          " process sets at a time share memory on this host");
}

std::unique_ptr<HostGroup::Publication> HostGroup::find(int maker, uint64_t key, size_t bytes,
                                                        const std::function<bool()>& aborted) {
  Record& theirs = record(maker);
  for (;;) {
    const uint32_t changes = theirs.changes.load(std::memory_order_seq_cst);
    for (const Published& entry : theirs.published) {
      if (entry.key.load(std::memory_order_seq_cst) != key) continue;
      auto publication = std::make_unique<Publication>();
      publication->group_ = self();
      publication->segment_ =
          Segment::open(pid(maker), entry.fd.load(), bytes, "memory of a process set");
      return publication;
    }
    if (aborted()) return nullptr;
    // In slices, because nobody wakes this one when the job is aborted; the maker is on its way,
    // so that there is rarely more than one.
    timespec slice{0, 50'000'000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&theirs.changes), FUTEX_WAIT, changes, &slice,
            nullptr, 0);
  }
}

HostGroup::Publication::~Publication() {
  if (slot_ < 0 || getpid() != group_->pid_) return;
  group_->record(group_->index_).published[slot_].key.store(0, std::memory_order_seq_cst);
}

}  // namespace hvdtorch
