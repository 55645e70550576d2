// Transports between simulated ranks, which are threads of this process: over in-memory links, or
// in shared memory, which each of them has mapped for itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "check.h"
#include "shared/host_group.h"
#include "transport/host_collectives.h"
#include "transport/memory_link.h"
#include "transport/shared_memory.h"

namespace hvdtorch::test {

using Bytes = std::vector<uint8_t>;

enum class Medium { kLinks, kSharedMemory };
inline constexpr Medium kMedia[] = {Medium::kLinks, Medium::kSharedMemory};

// Small enough that a few KB are many chunks.
inline constexpr CollectiveSizes kSmall = {
    .direct_allreduce = 512, .tree_broadcast = 256, .least_chunk = 128, .largest_chunk = 512};
inline constexpr SharedMemoryOptions kSmallStage = {
    .spin = {}, .limit = {}, .stage = 640, .one_step = 512};

inline std::vector<std::shared_ptr<HostGroup>> make_host_groups(int ranks) {
  std::vector<std::shared_ptr<HostGroup>> groups = {HostGroup::create(ranks)};
  for (int rank = 1; rank < ranks; ++rank) {
    groups.push_back(HostGroup::open(rank, ranks, groups[0]->address()));
  }
  return groups;
}

struct Job {
  Job(int ranks, Medium medium) : Job(ranks, medium, kSmall, kSmallStage) {}
  Job(int ranks, Medium medium, const CollectiveSizes& sizes, const SharedMemoryOptions& options) {
    if (medium == Medium::kLinks) {
      links = make_memory_links(ranks);
      for (auto& link : links) transports.push_back(std::make_shared<HostCollectives>(link, sizes));
    } else {
      groups = make_host_groups(ranks);
      std::vector<int> members;
      for (int rank = 0; rank < ranks; ++rank) members.push_back(rank);
      for (auto& group : groups) {
        transports.push_back(
            std::make_shared<SharedMemoryTransport>(group, members, 0x1234, options));
      }
    }
  }

  int size() const { return static_cast<int>(transports.size()); }
  // body(transport) on every rank; a rank that fails takes the others down with it.
  void run(const std::function<void(Transport&)>& body) {
    run_ranks(
        size(), [&](int rank) { body(*transports[rank]); },
        [&] {
          for (auto& transport : transports) transport->abort("another rank failed");
        });
  }

  std::vector<std::shared_ptr<PointToPoint>> links;
  std::vector<std::shared_ptr<HostGroup>> groups;
  std::vector<std::shared_ptr<Transport>> transports;
};

}  // namespace hvdtorch::test
