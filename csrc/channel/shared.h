// Channel between rank 0 and the ranks of its own host, through rings in shared memory; ranks of
// other hosts are reached over their sockets, in the same channel. The sockets of the ranks on this
// host stay open: they tell of a peer's death, and an empty frame on one wakes a control thread
// that sleeps.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

// A rank of rank 0's host, and memory for its frames that all of them map: kMailboxBytes that were
// zero before anyone began, at a 64-byte boundary.
struct Mailbox {
  int rank;
  std::span<std::byte> memory;
};
using Mailboxes = std::vector<Mailbox>;
extern const size_t kMailboxBytes;

// As make_tcp_channel(), for a rank that `mailboxes` has; rank 0 is among them. `keepalive` keeps
// them mapped. Throws std::logic_error if they are not as said.
std::unique_ptr<Channel> make_shared_channel(int rank, const std::vector<int>& fds,
                                             const Mailboxes& mailboxes,
                                             std::shared_ptr<void> keepalive);

}  // namespace hvdtorch
