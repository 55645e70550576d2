// Which transport the ranks of a process set get, by where they are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transport/point_to_point.h"
#include "transport/transport.h"

namespace hvdtorch {

// What transports of a job are made of.
struct TransportSources {
  std::shared_ptr<PointToPoint> network;  // among all ranks of the job
  std::vector<int> hosts;                 // by rank: equal for ranks on one host
  // Makes a transport among ranks of one host: two or more, global, ascending, this one included.
  // Null: over the network.
  std::function<std::shared_ptr<Transport>(uint32_t process_set, const std::vector<int>& ranks)>
      local;
};

// Among `ranks` (global, ascending, this one included):
//   all on one host                        the local transport
//   every rank on a host of its own        host collectives over the network
//   else                                   hierarchical, of these two
std::shared_ptr<Transport> make_transport(const TransportSources& sources, uint32_t process_set,
                                          const std::vector<int>& ranks);

}  // namespace hvdtorch
