#include "shared/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>

namespace hvdtorch {
namespace {

[[noreturn]] void fail(const std::string& what, const char* step) {
  throw SharedMemoryError(what + ": " + step + " failed: " + std::strerror(errno));
}

// The number that follows `name` in a file of lines of names and numbers; of a file that is one
// number, with the name "". None if there is no such number ("max" is none).
std::optional<uint64_t> number_in(const char* file, const std::string& name) {
  std::ifstream lines(file);
  std::string word;
  while (name.empty() || lines >> word) {
    if (uint64_t number = 0; word == name && lines >> number) return number;
    if (name.empty()) break;
    lines.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// What could be had, in bytes. Asking for more would not fail: it would call for the kernel to kill
// processes. In a container the limit of its cgroup counts, less what is in use and not just a
// cache of files.
uint64_t available_memory() {
  uint64_t available = UINT64_MAX;
  if (const auto kib = number_in("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  const auto limit = number_in("/sys/fs/cgroup/memory.max", "");
  const auto used = number_in("/sys/fs/cgroup/memory.current", "");
  const auto files = number_in("/sys/fs/cgroup/memory.stat", "inactive_file");
  if (limit && used && files) {
    const uint64_t kept = *used - std::min(*used, *files);
    available = std::min(available, *limit - std::min(*limit, kept));
  }
  return available;
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
  const uint64_t available = available_memory();
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
