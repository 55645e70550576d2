// Channel between rank 0 and the ranks of its own host, through rings in shared memory; ranks of
// other hosts are reached over their sockets, in the same channel. The sockets of the ranks on this
// host stay open: they tell of a peer's death, and an empty frame on one wakes a control thread that
// sleeps.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

// What the ranks of rank 0's host map.
struct SharedRings {
  std::vector<int> ranks;          // of this host, ascending: 0 and at least one more
  std::byte* memory = nullptr;     // shared_rings_bytes(ranks.size()), zeroed before anyone began
  std::shared_ptr<void> keepalive; // keeps it mapped
};

size_t shared_rings_bytes(size_t ranks);

// As make_tcp_channel(), for a rank of that host.
std::unique_ptr<Channel> make_shared_channel(int rank, const std::vector<int>& fds,
                                             SharedRings rings);

}  // namespace hvdtorch
