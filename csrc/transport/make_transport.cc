#include "transport/make_transport.h"

#include <algorithm>
#include <map>
#include <utility>

#include "transport/hierarchical.h"
#include "transport/host_collectives.h"
#include "transport/sub_link.h"

namespace hvdtorch {
namespace {

// The links that a process set may use at the same time.
enum Level : uint32_t { kFlat, kCross, kLocal, kLevels };

std::shared_ptr<HostCollectives> over_network(const TransportSources& sources, uint32_t process_set,
                                              Level level, const std::vector<int>& ranks) {
  const auto channel = static_cast<int>(process_set * kLevels + level);
  return std::make_shared<HostCollectives>(
      make_sub_link(sources.network, ranks, channel, HostCollectives::kTags));
}

std::shared_ptr<Transport> inside_host(const TransportSources& sources, uint32_t process_set,
                                       const std::vector<int>& ranks) {
  if (sources.local && ranks.size() > 1) return sources.local(process_set, ranks);
  return over_network(sources, process_set, kLocal, ranks);
}

}  // namespace

std::shared_ptr<Transport> make_transport(const TransportSources& sources, uint32_t process_set,
                                          const std::vector<int>& ranks) {
  std::vector<int> hosts, leaders;
  std::map<int, std::vector<int>> on_host;
  for (int rank : ranks) {
    hosts.push_back(sources.hosts[rank]);
    std::vector<int>& there = on_host[hosts.back()];
    if (there.empty()) leaders.push_back(rank);
    there.push_back(rank);
  }
  if (on_host.size() == 1) return inside_host(sources, process_set, ranks);
  auto flat = over_network(sources, process_set, kFlat, ranks);
  if (on_host.size() == ranks.size()) return flat;

  const int self = sources.network->rank();
  const std::vector<int>& here = on_host[sources.hosts[self]];
  std::shared_ptr<HostCollectives> cross;
  if (here.front() == self) cross = over_network(sources, process_set, kCross, leaders);
  return make_hierarchical(hosts, inside_host(sources, process_set, here), std::move(cross),
                           std::move(flat));
}

}  // namespace hvdtorch
