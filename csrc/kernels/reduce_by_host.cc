#include "kernels/reduce_by_host.h"

#include <algorithm>
#include <cstddef>

namespace hvdtorch {

void reduce_by_host(const Reduction& reduction, void* dst, const std::vector<const void*>& srcs,
                    const std::vector<int>& hosts, int64_t count) {
  std::vector<int> order;  // of hosts
  for (int host : hosts) {
    if (std::find(order.begin(), order.end(), host) == order.end()) order.push_back(host);
  }
  const bool in_rank_order = order.size() == 1 || order.size() == srcs.size();
  if (in_rank_order || !partial_type(reduction)) {
    return reduce(reduction, dst, srcs.data(), static_cast<int>(srcs.size()), count);
  }
  const Reduction combining = combine_partials(reduction);
  std::vector<std::vector<std::byte>> partials;
  std::vector<const void*> hosts_srcs;
  for (int host : order) {
    std::vector<const void*> of_host;
    for (size_t r = 0; r < srcs.size(); ++r) {
      if (hosts[r] == host) of_host.push_back(srcs[r]);
    }
    partials.emplace_back(count * size_of(combining.dtype));
    hosts_srcs.push_back(partials.back().data());
    reduce_partial(reduction, partials.back().data(), of_host.data(),
                   static_cast<int>(of_host.size()), count);
  }
  reduce(combining, partials.front().data(), hosts_srcs.data(), static_cast<int>(hosts_srcs.size()),
         count);
  finish_partial(reduction, dst, partials.front().data(), count);
}

}  // namespace hvdtorch
