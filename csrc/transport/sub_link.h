// A link among some of the ranks of another link. Links of different channels are used at the same
// time without mixing up their messages.
#pragma once

#include <memory>
#include <vector>

#include "transport/point_to_point.h"

namespace hvdtorch {

// Among `ranks` of `base` (ascending, this rank included), which are numbered anew. Tags from 0 up
// to `tags_per_channel` (not included) can be used on it.
std::shared_ptr<PointToPoint> make_sub_link(std::shared_ptr<PointToPoint> base,
                                            std::vector<int> ranks, int channel,
                                            int tags_per_channel);

}  // namespace hvdtorch
