// Channel within one process: ranks are endpoints of a hub. Size 1 in production; any size in tests
// with simulated ranks.
#pragma once

#include <memory>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

class LocalHub;

// Endpoints of a new hub, one per rank. Closing or destroying one is a lost peer for rank 0, and
// rank 0's for all.
std::vector<std::unique_ptr<Channel>> make_local_channels(int size);

}  // namespace hvdtorch
