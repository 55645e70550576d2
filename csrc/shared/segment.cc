#include "shared/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace hvdtorch {
namespace {

[[noreturn]] void fail(const std::string& what, const char* step) {
  throw SharedMemoryError(what + ": " + step + " failed: " + std::strerror(errno));
}

// What the system says it could hand out, in bytes. Asking for more would not fail: it would call
// for the kernel to kill processes.
size_t available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string line;
  while (std::getline(meminfo, line)) {
    if (line.rfind("MemAvailable:", 0) == 0) return std::stoull(line.substr(13)) * 1024;
  }
  return SIZE_MAX;
}

}  // namespace

Segment::Segment(int fd, size_t bytes, const std::string& what) : fd_(fd), size_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    errno = error;
    fail(what, "mmap");
  }
  data_ = static_cast<std::byte*>(data);
}

std::unique_ptr<Segment> Segment::create(size_t bytes, const std::string& what) {
  const size_t available = available_memory();
  if (bytes > available) {
    throw SharedMemoryError(what + ": " + std::to_string(bytes) + " bytes are needed, " +
                            std::to_string(available) + " are available");
  }
  const int fd = memfd_create("hvdtorch", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail(what, "memfd_create");
  const auto give_up = [&](const char* step) {
    const int error = errno;
    ::close(fd);
    errno = error;
    fail(what, step);
  };
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) give_up("ftruncate");
  // Pages that were never touched would be missed only when they are: by a SIGBUS.
  int reserved;
  do {
    reserved = fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (reserved != 0 && errno == EINTR);
  if (reserved != 0) give_up("reserving memory (fallocate)");
  // A length that cannot change lets no peer take the memory away.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) give_up("sealing");
  return std::unique_ptr<Segment>(new Segment(fd, bytes, what));
}

std::unique_ptr<Segment> Segment::open(int pid, int fd, size_t bytes, const std::string& what) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) fail(what, ("opening " + path).c_str());
  struct stat status{};
  if (fstat(opened, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    ::close(opened);
    throw SharedMemoryError(what + ": " + path + " is something else");
  }
  auto segment = std::unique_ptr<Segment>(new Segment(opened, bytes, what));
  segment->close_fd();
  return segment;
}

Segment::~Segment() {
  munmap(data_, size_);
  close_fd();
}

void Segment::close_fd() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Segment::discard() noexcept {
  if (fd_ >= 0) {
    [[maybe_unused]] const int punched =
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size_));
  }
}

}  // namespace hvdtorch
