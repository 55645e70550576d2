// A job on several hosts: simulated ranks with the hierarchical transport, every level of it over
// in-memory links.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "simulated_job.h"
#include "transport/hierarchical.h"
#include "transport/sub_link.h"

namespace hvdtorch::test {

// Small enough that a few KB are several stages.
inline constexpr HierarchicalSizes kSmallStages = {.whole = 600, .share = 512};

struct HostedJob {
  // hosts[r]: where rank r is.
  explicit HostedJob(const std::vector<int>& hosts) : links(make_memory_links(hosts.size())) {
    std::map<int, std::vector<int>> on_host;
    for (size_t r = 0; r < hosts.size(); ++r) on_host[hosts[r]].push_back(static_cast<int>(r));
    std::vector<int> all, leaders;
    for (size_t r = 0; r < hosts.size(); ++r) {
      all.push_back(static_cast<int>(r));
      if (on_host[hosts[r]].front() == static_cast<int>(r)) leaders.push_back(all.back());
    }
    for (int r : all) {
      const auto among = [&](const std::vector<int>& ranks, int channel) {
        return std::make_shared<HostCollectives>(
            make_sub_link(links[r], ranks, channel, HostCollectives::kTags), kSmall);
      };
      flat.push_back(among(all, 0));
      const bool leads = on_host[hosts[r]].front() == r;
      cross.push_back(leads ? among(leaders, 1) : nullptr);
      local.push_back(among(on_host[hosts[r]], 2));
      transports.push_back(make_hierarchical(hosts, local[r], cross[r], flat[r], kSmallStages));
    }
  }

  int size() const { return static_cast<int>(links.size()); }
  // body(transport) on every rank; a rank that fails takes the others down with it.
  void run(const std::function<void(Transport&)>& body) {
    run_ranks(
        size(), [&](int rank) { body(*transports[rank]); },
        [&] {
          for (auto& transport : transports) transport->abort("another rank failed");
        });
  }

  std::vector<std::shared_ptr<PointToPoint>> links;
  std::vector<std::shared_ptr<HostCollectives>> flat, cross, local;  // by rank
  std::vector<std::shared_ptr<Transport>> transports;
};

}  // namespace hvdtorch::test
