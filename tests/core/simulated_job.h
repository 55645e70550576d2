// Host collectives between simulated ranks: threads of this process over in-memory links.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "check.h"
#include "collective_checks.h"
#include "transport/host_collectives.h"
#include "transport/memory_link.h"

namespace hvdtorch::test {

// Small enough that a few KB are many chunks.
inline constexpr CollectiveSizes kSmall = {
    .direct_allreduce = 512, .tree_broadcast = 256, .least_chunk = 128, .largest_chunk = 512};

struct Job {
  explicit Job(int ranks, const CollectiveSizes& sizes = kSmall) : links(make_memory_links(ranks)) {
    for (auto& link : links) transports.push_back(std::make_unique<HostCollectives>(link, sizes));
  }

  int size() const { return static_cast<int>(links.size()); }
  // body(transport) on every rank; a rank that fails takes the others down with it.
  void run(const std::function<void(HostCollectives&)>& body) {
    run_ranks(
        size(), [&](int rank) { body(*transports[rank]); },
        [&] {
          for (auto& transport : transports) transport->abort("another rank failed");
        });
  }

  std::vector<std::shared_ptr<PointToPoint>> links;
  std::vector<std::unique_ptr<HostCollectives>> transports;
};

}  // namespace hvdtorch::test
