// Segment: memory that several processes of one host map. It is a memfd: it has no name in any file
// system, so nothing can be left behind however its processes die, and /dev/shm's size does not
// limit it. Another process opens it through the maker's /proc/<pid>/fd/<fd>.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace hvdtorch {

// Memory cannot be shared here: the text says why.
struct SharedMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Segment {
 public:
  // Zero-filled, and reserved: no later access can fail for want of memory. `what` is for errors.
  static std::unique_ptr<Segment> create(size_t bytes, const std::string& what);
  // One that process `pid` has made and holds under `fd`.
  static std::unique_ptr<Segment> open(int pid, int fd, size_t bytes, const std::string& what);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  int fd() const noexcept { return fd_; }

  // Nobody can open it any more; who has mapped it keeps the mapping.
  void close_fd() noexcept;
  // Gives the memory back although others may still have it mapped. Only the owner.
  void discard() noexcept;

 private:
  Segment(int fd, size_t bytes, const std::string& what);

  int fd_;
  size_t size_;
  std::byte* data_ = nullptr;
};

}  // namespace hvdtorch
