// A job on several hosts: simulated ranks with the hierarchical transport. Between hosts there are
// in-memory links, inside each there are others, or shared memory.
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
  explicit HostedJob(const std::vector<int>& hosts, Medium inside = Medium::kLinks)
      : links(make_memory_links(static_cast<int>(hosts.size()))) {
    std::map<int, std::vector<int>> on_host;
    std::map<int, Job> jobs;  // of each host alone
    for (size_t r = 0; r < hosts.size(); ++r) on_host[hosts[r]].push_back(static_cast<int>(r));
    std::vector<int> all, leaders;
    for (size_t r = 0; r < hosts.size(); ++r) {
      all.push_back(static_cast<int>(r));
      if (on_host[hosts[r]].front() == static_cast<int>(r)) leaders.push_back(all.back());
    }
    for (const auto& [host, ranks] : on_host) {
      jobs.try_emplace(host, static_cast<int>(ranks.size()), Medium::kSharedMemory);
    }
    std::map<int, size_t> seated;
    for (int r : all) {
      const auto among = [&](const std::vector<int>& ranks, int channel) {
        return std::make_shared<HostCollectives>(
            make_sub_link(links[r], ranks, channel, HostCollectives::kTags), kSmall);
      };
      flat.push_back(among(all, 0));
      const bool leads = on_host[hosts[r]].front() == r;
      cross.push_back(leads ? among(leaders, 1) : nullptr);
      if (inside == Medium::kLinks) {
        local.push_back(among(on_host[hosts[r]], 2));
      } else {
        local.push_back(jobs.at(hosts[r]).transports[seated[hosts[r]]++]);
      }
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

  // The rank vanishes without a word: nobody owns its link any more.
  void kill(int rank) {
    transports[rank].reset();
    local[rank].reset();
    cross[rank].reset();
    flat[rank].reset();
    links[rank].reset();
  }

  std::vector<std::shared_ptr<PointToPoint>> links;
  std::vector<std::shared_ptr<HostCollectives>> flat, cross;  // by rank
  std::vector<std::shared_ptr<Transport>> local, transports;
};

}  // namespace hvdtorch::test
