#include "channel/tcp.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace hvdtorch {
namespace {

// A frame is a batch of small records; anything longer is not one of ours.
constexpr uint32_t kMaxFrame = 256u << 20;

std::system_error system_error(const char* what) { return {errno, std::generic_category(), what}; }

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
  void reset() noexcept {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

struct Peer {
  Fd fd;
  std::string in;        // received, not yet a whole frame
  std::string out;       // accepted by send(), not yet by the kernel
  size_t out_begin = 0;  // of `out`: what the kernel has taken
  bool wants_write = false;
  bool finished = false;  // told the peer that no more will come
};

class TcpChannel final : public Channel {
 public:
  TcpChannel(int rank, const std::vector<int>& fds)
      : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    peers_.resize(fds.size());
    for (size_t peer = 0; peer < fds.size(); ++peer) {
      if (rank == 0 && peer == 0) continue;
      peers_[peer].fd = Fd(fds[peer]);
    }
    if (epoll_.get() < 0 || wake_.get() < 0) throw system_error("epoll_create1 or eventfd");
    add(wake_.get(), kWakeTag);
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      const int fd = peers_[peer].fd.get();
      if (fd < 0) continue;
      if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0) throw system_error("fcntl");
      const int one = 1;  // fails harmlessly on sockets that are not TCP
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      add(fd, peer);
    }
  }

  void send(int rank, std::string_view frame) override {
    Peer& peer = peers_[rank];
    if (peer.fd.get() < 0) return;
    if (frame.size() > kMaxFrame) throw std::length_error("a control frame is too long");
    const auto length = static_cast<uint32_t>(frame.size());
    char header[sizeof length];
    std::memcpy(header, &length, sizeof length);
    const size_t sent = peer.out.empty() ? send_now(peer, header, frame) : 0;
    if (sent == sizeof header + frame.size()) return;
    if (sent < sizeof header) peer.out.append(header + sent, sizeof header - sent);
    peer.out.append(frame.substr(sent < sizeof header ? 0 : sent - sizeof header));
    flush(rank);
  }

  std::vector<Event> wait(std::optional<Clock::time_point> deadline) override {
    epoll_event ready[64];
    const int n = wait_for_sockets(ready, 64, deadline);
    for (int i = 0; i < n; ++i) {
      if (ready[i].data.u64 == kWakeTag) {
        uint64_t count;
        // Drained first: a wake() in between is served by this very return. The other way round
        // its count would be drained with its flag still set, and all later ones would be dropped.
        [[maybe_unused]] const auto drained = ::read(wake_.get(), &count, sizeof count);
        woken_.store(false, std::memory_order_seq_cst);
        continue;
      }
      const auto rank = static_cast<int>(ready[i].data.u64);
      if (ready[i].events & EPOLLOUT) flush(rank);
      if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) receive(rank);
    }
    return std::exchange(events_, {});
  }

  void wake() noexcept override {
    // One write per wake-up is enough.
    if (woken_.exchange(true, std::memory_order_seq_cst)) return;
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  }

  void close(std::chrono::milliseconds linger) noexcept override {
    const auto deadline = Clock::now() + linger;
    try {
      while (Clock::now() < deadline) {
        bool open = false;
        for (size_t rank = 0; rank < peers_.size(); ++rank) {
          Peer& peer = peers_[rank];
          if (peer.fd.get() < 0) continue;
          open = true;
          if (peer.out.empty() && !std::exchange(peer.finished, true)) {
            ::shutdown(peer.fd.get(), SHUT_WR);
          }
        }
        if (!open) break;
        wait(deadline);  // reads on, so that the peer is not reset; EOF closes
      }
    } catch (...) {  // out of memory: closing is what is left to do
    }
    for (Peer& peer : peers_) peer.fd.reset();
  }

  void abandon_in_child() noexcept override {
    // The child shares the descriptors' files: as long as it held them, the peers would not see
    // this process die. The epoll set is shared too and must not be edited; close() alone is safe.
    for (Peer& peer : peers_) peer.fd.reset();
    epoll_.reset();
    wake_.reset();
  }

 private:
  static constexpr uint64_t kWakeTag = UINT64_MAX;

  void add(int fd, uint64_t tag) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = tag;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) < 0) throw system_error("epoll_ctl");
  }

  int wait_for_sockets(epoll_event* ready, int capacity,
                       std::optional<Clock::time_point> deadline) {
    if (!events_.empty()) return 0;  // a send() noticed a lost peer: tell at once
    int timeout_ms = -1;
    if (deadline) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - Clock::now());
      timeout_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000'000));
    }
    const int n = epoll_wait(epoll_.get(), ready, capacity, timeout_ms);
    if (n < 0 && errno != EINTR) throw system_error("epoll_wait");
    return std::max(n, 0);
  }

  // What the kernel takes at once, without a copy of the frame; 0 on any failure, which flush()
  // will meet again.
  static size_t send_now(const Peer& peer, char (&header)[sizeof(uint32_t)],
                         std::string_view frame) {
    iovec parts[2] = {{header, sizeof header}, {const_cast<char*>(frame.data()), frame.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    return static_cast<size_t>(
        std::max<ssize_t>(::sendmsg(peer.fd.get(), &message, MSG_NOSIGNAL), 0));
  }

  void flush(int rank) {
    Peer& peer = peers_[rank];
    while (peer.out_begin < peer.out.size()) {
      const auto n = ::send(peer.fd.get(), peer.out.data() + peer.out_begin,
                            peer.out.size() - peer.out_begin, MSG_NOSIGNAL);
      if (n > 0) {
        peer.out_begin += static_cast<size_t>(n);
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        watch_writable(rank, true);
        return;
      } else {
        // What the peer sent before it went may still be unread: receive() reads it first, and
        // reports the loss when it meets the end.
        peer.out.clear();
        peer.out_begin = 0;
        watch_writable(rank, false);
        return;
      }
    }
    peer.out.clear();
    peer.out_begin = 0;
    watch_writable(rank, false);
  }

  void watch_writable(int rank, bool on) {
    Peer& peer = peers_[rank];
    if (peer.wants_write == on) return;
    peer.wants_write = on;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0u);
    event.data.u64 = static_cast<uint64_t>(rank);
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.fd.get(), &event);
  }

  void receive(int rank) {
    Peer& peer = peers_[rank];
    char chunk[64 * 1024];
    for (;;) {
      const auto n = ::recv(peer.fd.get(), chunk, sizeof chunk, 0);
      if (n > 0) {
        peer.in.append(chunk, static_cast<size_t>(n));
        if (!split_frames(rank)) return;
        if (static_cast<size_t>(n) < sizeof chunk) return;
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return;
      } else {
        lose(rank, n == 0 ? "connection closed" : std::strerror(errno));
        return;
      }
    }
  }

  // Moves whole frames from `in` to the events; false if the peer was lost over a bad length.
  bool split_frames(int rank) {
    Peer& peer = peers_[rank];
    size_t at = 0;
    uint32_t length;
    while (peer.in.size() - at >= sizeof length) {
      std::memcpy(&length, peer.in.data() + at, sizeof length);
      if (length > kMaxFrame) {
        lose(rank, "sent a frame of an impossible length");
        return false;
      }
      if (peer.in.size() - at - sizeof length < length) break;
      events_.push_back({Event::Kind::kFrame, rank, peer.in.substr(at + sizeof length, length)});
      at += sizeof length + length;
    }
    peer.in.erase(0, at);
    return true;
  }

  void lose(int rank, std::string why) {
    // Taken out of the set by hand: closing does not, as long as a forked child has not closed its
    // copy, and the end of the stream would be reported for ever.
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peers_[rank].fd.get(), nullptr);
    peers_[rank].fd.reset();
    events_.push_back({Event::Kind::kLost, rank, std::move(why)});
  }

  Fd epoll_;
  Fd wake_;
  std::atomic<bool> woken_{false};
  std::vector<Peer> peers_;
  std::vector<Event> events_;
};

}  // namespace

std::unique_ptr<Channel> make_tcp_channel(int rank, const std::vector<int>& fds) {
  return std::make_unique<TcpChannel>(rank, fds);
}

}  // namespace hvdtorch
