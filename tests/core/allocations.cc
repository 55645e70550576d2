// Counts by replacing operator new, in the plain build only.
#include "allocations.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

thread_local size_t largest = 0;

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

void* operator new(size_t size) {
  largest = std::max(largest, size);
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }

#endif

namespace hvdtorch::test {

size_t largest_allocation(const std::function<void()>& body) {
  largest = 0;
  body();
  return largest;
}

}  // namespace hvdtorch::test
