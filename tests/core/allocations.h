// The largest single request to operator new on the calling thread: shows that a decoder does not
// believe a length that its input only claims.
#pragma once

#include <cstddef>
#include <functional>

namespace hvdtorch::test {

// Bytes of the largest allocation while `body` runs. Sanitizers bring their own allocator: always
// 0 there.
size_t largest_allocation(const std::function<void()>& body);

}  // namespace hvdtorch::test
