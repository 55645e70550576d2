// Channel over stream sockets that are already connected and authenticated (hvdtorch/connect.py
// does both): rank 0 holds one per peer, every other rank one to rank 0. A closed or broken
// connection is a lost peer.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "channel/channel.h"

namespace hvdtorch {

// Owns a descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  int get() const noexcept { return fd_; }
  void reset() noexcept;

 private:
  int fd_;
};

class TcpChannel final : public Channel {
 public:
  // Takes ownership of the descriptors. Rank 0: fds[r] belongs to rank r, fds[0] is ignored.
  // Other ranks: fds[0] belongs to rank 0.
  TcpChannel(int rank, const std::vector<int>& fds);

  void send(int rank, std::string_view frame) override;
  std::vector<Event> take() override;
  void sleep(std::optional<Clock::time_point> deadline) override;
  void wake() noexcept override;
  void close(std::chrono::milliseconds linger) noexcept override;
  void abandon_in_child() noexcept override;

  // The parts of close(). Tells the peers to whom nothing is queued that no more will come; false
  // once all connections are closed.
  bool finish() noexcept;
  // Closes the connection to a peer, without an event here.
  void drop(int rank) noexcept;

 private:
  struct Peer {
    Fd fd;
    std::string in;        // received, not yet a whole frame
    std::string out;       // accepted by send(), not yet by the kernel
    size_t out_begin = 0;  // of `out`: what the kernel has taken
    bool wants_write = false;
    bool finished = false;  // told the peer that no more will come
  };

  void add(int fd, uint64_t tag);
  void flush(int rank);
  void watch_writable(int rank, bool on);
  void receive(int rank, std::vector<Event>& events);
  void lose(int rank, std::string why, std::vector<Event>& events);

  Fd epoll_;
  Fd wake_;
  std::atomic<bool> woken_{false};
  std::mutex ready_mutex_;
  std::vector<epoll_event> ready_;  // what sleep() met and take() has to see to
  std::vector<Peer> peers_;
};

std::unique_ptr<Channel> make_tcp_channel(int rank, const std::vector<int>& fds);

}  // namespace hvdtorch
