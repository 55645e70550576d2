// One direction of a pair of ranks on one host: a ring of bytes in memory that both map, with one
// writer and one reader. It holds no pointer, so that each end may map it anywhere; and each end
// believes of the other's positions only what is possible.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace hvdtorch {

// The other end's positions make no sense: the memory was overwritten.
struct RingDamaged : std::runtime_error {
  RingDamaged() : std::runtime_error("its ring of control frames in shared memory is damaged") {}
};

// All zero is an empty ring. Positions count bytes since the beginning. Each end's word has a cache
// line of its own.
struct Ring {
  static constexpr uint64_t kBytes = (64 << 10) - 256;  // two, and a bell, in 128 KiB

  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  // The writer has more than fits: the reader tells it when there is room.
  alignas(64) std::atomic<uint32_t> full;
  alignas(64) std::byte data[kBytes];

  // Hints for a thread that only looks.
  bool has_bytes() const noexcept { return written.load() != read.load(); }
  bool has_room() const noexcept { return written.load() - read.load() != kBytes; }
};

class RingWriter {
 public:
  explicit RingWriter(Ring& ring) noexcept : ring_(ring) {}
  // Copies what fits, and returns how much that is; the reader sees it after publish().
  size_t write(std::string_view bytes);
  void publish() noexcept { ring_.written.store(written_); }
  Ring& ring() const noexcept { return ring_; }

 private:
  Ring& ring_;
  uint64_t written_ = 0;
};

class RingReader {
 public:
  explicit RingReader(Ring& ring) noexcept : ring_(ring) {}
  // Appends all that is there; true if the writer waits to be told of the room.
  bool read(std::string& bytes);
  Ring& ring() const noexcept { return ring_; }

 private:
  Ring& ring_;
  uint64_t read_ = 0;
};

}  // namespace hvdtorch
