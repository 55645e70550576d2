// Which transport serves which ranks: shared memory among ranks of one host, the network among
// ranks on a host each, and a hierarchy of the two where there are both.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "shared/host_group.h"
#include "transport/point_to_point.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace hvdtorch {

// Where the ranks of a job are.
struct Topology {
  int rank = 0;
  std::vector<int> group_of;         // by rank: the number of its host group; equal: share memory
  std::shared_ptr<HostGroup> group;  // of this rank; null if it shares memory with nobody
  // Links all ranks; null if they are all in one group.
  std::shared_ptr<PointToPoint> network;
};

// Makes a transport among `ranks` (global, ascending, this one included). Transports of different
// process sets are used at the same time. Any thread.
using TransportFactory =
    std::function<std::shared_ptr<Transport>(uint32_t process_set, const std::vector<int>& ranks)>;

// `shared`: for every transport in shared memory.
TransportFactory make_transport_factory(Topology topology, SharedMemoryOptions shared);

}  // namespace hvdtorch
