// Point-to-point messages between ranks that are threads of one process: what tests simulate a job
// with, and the link of a job of one rank.
#pragma once

#include <memory>
#include <vector>

#include "transport/point_to_point.h"

namespace hvdtorch {

// links[r] is rank r's end. A send rendezvouses with its receive, as over a real network: its
// wait() returns when the receive was posted and the bytes were copied. A pair whose lengths differ
// fails on both sides. Nothing overtakes a message that was aborted: its tag is dead. Destroying a
// link is the death of its rank: what others have outstanding with it fails, and so does what they
// post later.
std::vector<std::shared_ptr<PointToPoint>> make_memory_links(int size);

}  // namespace hvdtorch
