// Rings in memory that forked processes share, for tests of the channel and of whole jobs.
#pragma once

#include <sys/mman.h>

#include "channel/shared.h"
#include "check.h"

namespace hvdtorch::test {

struct Rings {
  Mailboxes mailboxes;
  std::shared_ptr<std::byte> pages;
};

// Of a host that has ranks 0 to `ranks` - 1.
inline Rings make_rings(int ranks) {
  const size_t bytes = kMailboxBytes * static_cast<size_t>(ranks);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(pages != MAP_FAILED);
  Rings rings;
  rings.pages = {static_cast<std::byte*>(pages), [bytes](std::byte* p) { munmap(p, bytes); }};
  for (int rank = 0; rank < ranks; ++rank) {
    std::byte* memory = rings.pages.get() + static_cast<size_t>(rank) * kMailboxBytes;
    rings.mailboxes.push_back({rank, {memory, kMailboxBytes}});
  }
  return rings;
}

inline std::unique_ptr<Channel> over_rings(int rank, const std::vector<int>& fds,
                                           const Rings& rings) {
  return make_shared_channel(rank, fds, rings.mailboxes, rings.pages);
}

}  // namespace hvdtorch::test
