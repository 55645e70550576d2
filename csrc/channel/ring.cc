#include "channel/ring.h"

#include <algorithm>
#include <cstring>

namespace hvdtorch {

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "the words of a ring are shared between processes");

size_t RingWriter::write(std::string_view bytes) {
  const uint64_t held = written_ - ring_.read.load();
  if (held > Ring::kBytes) throw RingDamaged();
  const size_t count = std::min<uint64_t>(bytes.size(), Ring::kBytes - held);
  const uint64_t at = written_ % Ring::kBytes;
  const size_t first = std::min<uint64_t>(count, Ring::kBytes - at);
  if (count != 0) {
    std::memcpy(ring_.data + at, bytes.data(), first);
    std::memcpy(ring_.data, bytes.data() + first, count - first);
  }
  written_ += count;
  return count;
}

bool RingReader::read(std::string& bytes) {
  const uint64_t count = ring_.written.load() - read_;
  if (count > Ring::kBytes || ring_.read.load() != read_) throw RingDamaged();
  if (count != 0) {
    const auto* data = reinterpret_cast<const char*>(ring_.data);
    const uint64_t at = read_ % Ring::kBytes;
    const size_t first = std::min(count, Ring::kBytes - at);
    bytes.append(data + at, first);
    bytes.append(data, count - first);
    read_ += count;
    ring_.read.store(read_);
  }
  return ring_.full.load() != 0 && ring_.full.exchange(0) != 0;
}

}  // namespace hvdtorch
