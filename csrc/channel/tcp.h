// Channel over stream sockets that are already connected and authenticated (hvdtorch/connect.py
// does both): rank 0 holds one per peer, every other rank one to rank 0. Frames are a 4-byte
// length and that many bytes. A closed or broken connection is a lost peer.
#pragma once

#include <memory>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

// Takes ownership of the descriptors. Rank 0: fds[r] belongs to rank r, fds[0] is ignored.
// Other ranks: fds[0] belongs to rank 0.
std::unique_ptr<Channel> make_tcp_channel(int rank, const std::vector<int>& fds);

}  // namespace hvdtorch
