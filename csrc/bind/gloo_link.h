// PointToPoint over torch's own Gloo process group: its tagged send and receive, called on the
// executor's thread without the interpreter's lock. Gloo's collectives are not used: the
// algorithms and the arithmetic are ours (transport/host_collectives.h).
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/point_to_point.h"

namespace hvdtorch {

std::shared_ptr<PointToPoint> make_gloo_link(c10::intrusive_ptr<c10d::Backend> backend);

}  // namespace hvdtorch
