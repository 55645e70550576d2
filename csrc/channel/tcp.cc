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
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include "channel/frames.h"

namespace hvdtorch {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;

std::system_error system_error(const char* what) { return {errno, std::generic_category(), what}; }

// What the kernel takes at once, without a copy of the frame; 0 on any failure, which flush() will
// meet again.
size_t send_now(int fd, std::array<char, sizeof(uint32_t)>& header, std::string_view frame) {
  iovec parts[2] = {{header.data(), header.size()},
                    {const_cast<char*>(frame.data()), frame.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  return static_cast<size_t>(std::max<ssize_t>(::sendmsg(fd, &message, MSG_NOSIGNAL), 0));
}

}  // namespace

void Fd::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

TcpChannel::TcpChannel(int rank, const std::vector<int>& fds)
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

void TcpChannel::send(int rank, std::string_view frame) {
  Peer& peer = peers_[rank];
  if (peer.fd.get() < 0) return;
  auto header = frame_header(frame);
  const size_t sent = peer.out.empty() ? send_now(peer.fd.get(), header, frame) : 0;
  if (sent == header.size() + frame.size()) return;
  if (sent < header.size()) peer.out.append(header.data() + sent, header.size() - sent);
  peer.out.append(frame.substr(sent < header.size() ? 0 : sent - header.size()));
  flush(rank);
}

void TcpChannel::sleep(std::optional<Clock::time_point> deadline) {
  int timeout_ms = -1;
  if (deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - Clock::now());
    timeout_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000'000));
  }
  epoll_event ready[64];
  const int n = epoll_wait(epoll_.get(), ready, 64, timeout_ms);
  if (n < 0 && errno != EINTR) throw system_error("epoll_wait");
  std::lock_guard lock(ready_mutex_);
  for (int i = 0; i < n; ++i) {
    if (ready[i].data.u64 != kWakeTag) {
      ready_.push_back(ready[i]);
      continue;
    }
    uint64_t count;
    // Drained first: a wake() in between is served by this very return. The other way round its
    // count would be drained with its flag still set, and all later ones would be dropped.
    [[maybe_unused]] const auto drained = ::read(wake_.get(), &count, sizeof count);
    woken_.store(false, std::memory_order_seq_cst);
  }
}

std::vector<Channel::Event> TcpChannel::take() {
  std::vector<epoll_event> ready;
  {
    std::lock_guard lock(ready_mutex_);
    ready.swap(ready_);
  }
  std::vector<Event> events;
  for (const epoll_event& one : ready) {
    const auto rank = static_cast<int>(one.data.u64);
    if (peers_[rank].fd.get() < 0) continue;  // closed since
    if (one.events & EPOLLOUT) flush(rank);
    if (one.events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) receive(rank, events);
  }
  return events;
}

void TcpChannel::wake() noexcept {
  // One write per wake-up is enough.
  if (woken_.exchange(true, std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

bool TcpChannel::finish() noexcept {
  bool open = false;
  for (Peer& peer : peers_) {
    if (peer.fd.get() < 0) continue;
    open = true;
    if (peer.out.empty() && !std::exchange(peer.finished, true)) {
      ::shutdown(peer.fd.get(), SHUT_WR);
    }
  }
  return open;
}

void TcpChannel::close(std::chrono::milliseconds linger) noexcept {
  const auto deadline = Clock::now() + linger;
  try {
    // Reads on, so that the peer is not reset; the end of its stream closes.
    while (Clock::now() < deadline && finish()) wait(deadline);
  } catch (...) {  // out of memory: closing is what is left to do
  }
  for (Peer& peer : peers_) peer.fd.reset();
}

void TcpChannel::abandon_in_child() noexcept {
  // The child shares the descriptors' files: as long as it held them, the peers would not see this
  // process die. The epoll set is shared too and must not be edited; close() alone is safe.
  for (Peer& peer : peers_) peer.fd.reset();
  epoll_.reset();
  wake_.reset();
}

void TcpChannel::drop(int rank) noexcept {
  // Taken out of the set by hand: closing does not, as long as a forked child has not closed its
  // copy, and the end of the stream would be reported for ever.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peers_[rank].fd.get(), nullptr);
  peers_[rank].fd.reset();
}

void TcpChannel::add(int fd, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = tag;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) < 0) throw system_error("epoll_ctl");
}

void TcpChannel::flush(int rank) {
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
      break;
    }
  }
  peer.out.clear();
  peer.out_begin = 0;
  watch_writable(rank, false);
}

void TcpChannel::watch_writable(int rank, bool on) {
  Peer& peer = peers_[rank];
  if (peer.wants_write == on) return;
  peer.wants_write = on;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0u);
  event.data.u64 = static_cast<uint64_t>(rank);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.fd.get(), &event);
}

void TcpChannel::receive(int rank, std::vector<Event>& events) {
  Peer& peer = peers_[rank];
  char chunk[64 * 1024];
  for (;;) {
    const auto n = ::recv(peer.fd.get(), chunk, sizeof chunk, 0);
    if (n > 0) {
      peer.in.append(chunk, static_cast<size_t>(n));
      if (!split_frames(peer.in, rank, events)) {
        lose(rank, "sent a frame of an impossible length", events);
        return;
      }
      if (static_cast<size_t>(n) < sizeof chunk) return;
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      lose(rank, n == 0 ? "connection closed" : std::strerror(errno), events);
      return;
    }
  }
}

void TcpChannel::lose(int rank, std::string why, std::vector<Event>& events) {
  drop(rank);
  events.push_back({Event::Kind::kLost, rank, std::move(why)});
}

std::unique_ptr<Channel> make_tcp_channel(int rank, const std::vector<int>& fds) {
  return std::make_unique<TcpChannel>(rank, fds);
}

}  // namespace hvdtorch
