// One collective each, called on every rank of a simulated job and checked there against what its
// definition says. Reductions take any bytes, and the result is that of reduce() in rank order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "transport/transport.h"

namespace hvdtorch::test {

using Bytes = std::vector<uint8_t>;

// What rank `rank` brings to collective `round`: any bytes, the same whenever asked.
Bytes input(uint64_t round, int rank, int64_t bytes);

void check_same(const Bytes& actual, const Bytes& expected, const std::string& what,
                const Where& where = Where::current());

void check_allreduce(Transport& transport, const Reduction& reduction, int64_t count,
                     uint64_t round);
void check_reduce_scatter(Transport& transport, const Reduction& reduction,
                          const std::vector<int64_t>& counts, uint64_t round);
// Out of place and in place.
void check_allgather(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round);
void check_broadcast(Transport& transport, int64_t bytes, int root, uint64_t round);
// bytes[from * P + to]
void check_alltoall(Transport& transport, const std::vector<int64_t>& bytes, uint64_t round);

}  // namespace hvdtorch::test
