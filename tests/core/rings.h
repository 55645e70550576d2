// Rings in memory that forked processes share, for tests of the channel and of whole jobs.
#pragma once

#include <sys/mman.h>

#include <numeric>

#include "channel/shared.h"
#include "check.h"

namespace hvdtorch::test {

// Zeroed pages that a forked child shares, unmapped with the last copy.
inline std::shared_ptr<std::byte> shared_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(pages != MAP_FAILED);
  return {static_cast<std::byte*>(pages), [bytes](std::byte* p) { munmap(p, bytes); }};
}

// Of a host that has ranks 0 to `ranks` - 1.
inline SharedRings make_rings(int ranks) {
  SharedRings rings;
  rings.ranks.resize(static_cast<size_t>(ranks));
  std::iota(rings.ranks.begin(), rings.ranks.end(), 0);
  const auto pages = shared_pages(shared_rings_bytes(rings.ranks.size()));
  rings.memory = pages.get();
  rings.keepalive = pages;
  return rings;
}

}  // namespace hvdtorch::test
