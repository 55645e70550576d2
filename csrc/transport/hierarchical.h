// The collectives of ranks on several hosts, in two levels: inside each host, and between one
// leader per host, so that data crosses the slow link between hosts once per host and not once per
// rank. It owns no algorithm of either level: it composes a transport among the ranks of this host
// (shared memory, where it can be had), host collectives among the leaders, and a flat transport
// among all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/host_collectives.h"
#include "transport/transport.h"

namespace hvdtorch {

// In bytes of partial results. All ranks must use the same.
struct HierarchicalSizes {
  // allreduce: up to here, the leaders exchange the whole at once: fewest messages.
  int64_t whole = 256 << 10;
  // Above, it goes in stages, of which each leader reduces so much.
  int64_t share = 1 << 20;
};

// hosts[r] is equal for ranks on one host; what numbers stand for hosts does not matter. The leader
// of a host is its lowest rank.
//   local  among the ranks of this host, in rank order (of one rank, if it is alone there)
//   cross  among the leaders, in rank order; null on all other ranks
//   flat   among all ranks
//
// allreduce: the ranks of a host reduce to their leader, the leaders reduce among each other, and
// hand the result out. Partial results of floats narrower than 32 bits are float32, and are rounded
// once. Sums of floats are thus associated by host, (host A) + (host B) + ..., each in rank order:
// the same bits on all ranks and in all runs, but not those of the flat order. Everything else is
// exact in either order. Reductions that have no partial results (partial_type) are flat.
// broadcast, allgather, barrier: in two levels.
// reduce_scatter, alltoall, adasum: flat.
//
// A failure at any level ends all three; its text names the step that it happened in.
std::shared_ptr<Transport> make_hierarchical(const std::vector<int>& hosts,
                                             std::shared_ptr<Transport> local,
                                             std::shared_ptr<HostCollectives> cross,
                                             std::shared_ptr<Transport> flat,
                                             const HierarchicalSizes& sizes = {});

}  // namespace hvdtorch
