// The reduction of ranks that are on several hosts: as the hierarchical transport associates it,
// for values that reach one rank all at once. The same tensor may travel one way or the other, and
// must come out with the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {

// As reduce(), in two steps: the sources of each host in rank order, then the hosts in the order of
// their lowest ranks. hosts[r] is equal for ranks on one host, srcs.size() of them. Reductions
// without partial_type() are in rank order.
void reduce_by_host(const Reduction& reduction, void* dst, const std::vector<const void*>& srcs,
                    const std::vector<int>& hosts, int64_t count);

}  // namespace hvdtorch
