// Channels: frames arrive whole and in order whatever the socket does, a peer that goes is noticed
// once and after what it said, no wake-up is lost, and waiting costs nothing.
#include "channel/channel.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "channel/local.h"
#include "channel/tcp.h"
#include "check.h"
#include "rings.h"
#include "samples.h"
#include "thread_watch.h"

namespace hvdtorch::test {
namespace {

using Kind = Channel::Event::Kind;
using Channels = std::vector<std::unique_ptr<Channel>>;
using std::chrono::hours;
using std::chrono::milliseconds;

// A test that waits longer has found a hang.
constexpr std::chrono::seconds kHang{60};

Channel::Clock::time_point in(std::chrono::nanoseconds span) {
  return Channel::Clock::now() + span;
}

// --- ways to connect ------------------------------------------------------------------------

using Sockets = std::array<int, 2>;

Sockets unix_pair() {
  Sockets fds;
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
  return fds;
}

// The kernel's smallest buffers: nearly every write is partial.
Sockets tiny_pair() {
  const Sockets fds = unix_pair();
  for (int fd : fds) {
    const int least = 1;
    check(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof least) == 0);
    check(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &least, sizeof least) == 0);
  }
  return fds;
}

Sockets tcp_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  check(bind(listener, raw, length) == 0 && listen(listener, 1) == 0);
  check(getsockname(listener, raw, &length) == 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  check(connect(client, raw, length) == 0);
  const int server = accept(listener, nullptr, nullptr);
  check(server >= 0);
  close(listener);
  return {server, client};
}

using Make = std::function<std::unique_ptr<Channel>(int rank, const std::vector<int>& fds)>;

Channels over(Sockets (*pair)(), int size = 2, const Make& make = make_tcp_channel) {
  std::vector<int> fds = {-1};
  Channels channels(size);
  for (int rank = 1; rank < size; ++rank) {
    const Sockets ends = pair();
    fds.push_back(ends[0]);
    channels[rank] = make(rank, {ends[1]});
  }
  channels[0] = make(0, fds);
  return channels;
}

// Ranks 0 to `local` - 1 are on one host.
Channels over_mailboxes(int size, int local) {
  const Rings rings = make_rings(local);
  return over(unix_pair, size, [&](int rank, const std::vector<int>& fds) {
    return rank < local ? over_rings(rank, fds, rings) : make_tcp_channel(rank, fds);
  });
}

struct Kindred {
  const char* name;
  std::function<Channels(int size)> make;
};
const std::vector<Kindred>& sockets() {
  static const std::vector<Kindred> all = {
      {"unix", [](int size) { return over(unix_pair, size); }},
      {"tiny", [](int size) { return over(tiny_pair, size); }},
      {"tcp", [](int size) { return over(tcp_pair, size); }},
      {"rings", [](int size) { return over_mailboxes(size, size); }},
      {"rings and sockets", [](int size) { return over_mailboxes(size, std::max(2, size - 1)); }},
  };
  return all;
}
std::vector<Kindred> all_channels() {
  std::vector<Kindred> all = sockets();
  all.push_back({"local", [](int size) { return make_local_channels(size); }});
  return all;
}

// --- waiting --------------------------------------------------------------------------------

// Waits until `count` events are there.
std::vector<Channel::Event> receive(Channel& channel, size_t count = 1) {
  std::vector<Channel::Event> events;
  const auto hang = in(kHang);
  while (events.size() < count) {
    check(Channel::Clock::now() < hang, "no event came");
    for (auto& event : channel.wait(hang)) events.push_back(std::move(event));
  }
  return events;
}

void check_frame(const Channel::Event& event, int rank, const std::string& data) {
  check(event.kind == Kind::kFrame, "lost: " + event.data);
  check_eq(event.rank, rank);
  check(event.data == data, "a frame of " + std::to_string(event.data.size()) +
                                " bytes differs from one of " + std::to_string(data.size()));
}

void check_lost(const Channel::Event& event, int rank) {
  check(event.kind == Kind::kLost, "a frame: " + event.data);
  check_eq(event.rank, rank);
  check(!event.data.empty(), "no reason given");
}

// Nothing happens for a moment: wait() returns empty, at the deadline.
void check_silence(Channel& channel) {
  const auto deadline = in(milliseconds(20));
  int wakes = 0;
  while (Channel::Clock::now() < deadline) {
    for (const auto& event : channel.wait(deadline)) fail("unexpected event: " + event.data);
    ++wakes;
  }
  check(wakes <= 3, "wait() returned " + std::to_string(wakes) + " times for nothing");
}

// --- frames ---------------------------------------------------------------------------------

const Case sizes("frames of every size arrive whole and in order, in both directions", [] {
  for (const auto& [name, make] : all_channels()) {
    Random random(1);
    std::vector<std::string> frames;
    for (int n : {0, 1, 3, 4, 5, 0, 65'535, 65'536, 65'537, 131'072 - 4, 7, 3'000'000, 2}) {
      frames.push_back(random_bytes(random, n));
    }
    auto channels = make(2);
    run_ranks(2, [&](int rank) {
      Channel& channel = *channels[rank];
      for (const auto& frame : frames) channel.send(1 - rank, frame);
      const auto events = receive(channel, frames.size());
      for (size_t i = 0; i < frames.size(); ++i) check_frame(events[i], 1 - rank, frames[i]);
      // The peer may have closed already.
      for (size_t i = frames.size(); i < events.size(); ++i) check_lost(events[i], 1 - rank);
      channel.close(hours(1));  // what is still queued here is sent
    });
  }
});

const Case many("many small frames, from and to several ranks at once", [] {
  for (const auto& [name, make] : all_channels()) {
    constexpr int kRanks = 4;
    const int count = rounds(5000);
    auto channels = make(kRanks);
    run_ranks(kRanks, [&](int rank) {
      Channel& channel = *channels[rank];
      std::vector<int> next(kRanks, 0);
      int open = rank == 0 ? kRanks - 1 : 1, sent = 0, received = 0;
      const int expected = open * count;
      while (sent < count || received < expected) {
        if (sent < count) {
          for (int peer = 0; peer < kRanks; ++peer) {
            if ((rank == 0) == (peer == 0)) continue;
            channel.send(peer, std::string(sent % 50, 'x') + std::to_string(sent));
          }
          ++sent;
        }
        const auto hang = in(kHang);
        const auto events = channel.wait(sent < count ? in(-hours(1)) : hang);
        check(Channel::Clock::now() < hang, "no event came");
        for (const auto& event : events) {
          if (event.kind == Kind::kLost) {  // it had its share already, and closed
            check_eq(next[event.rank], count);
            continue;
          }
          const int i = next[event.rank]++;
          check_frame(event, event.rank, std::string(i % 50, 'x') + std::to_string(i));
          ++received;
        }
      }
      channel.close(hours(1));
    });
  }
});

const Case dribble("a frame that comes byte by byte is one frame", [] {
  const Sockets ends = unix_pair();
  auto channel = make_tcp_channel(1, {ends[0]});
  const std::string raw("\3\0\0\0abc\0\0\0\0\2\0\0\0de", 17);
  std::vector<Channel::Event> events;
  for (char c : raw) {
    check(write(ends[1], &c, 1) == 1);
    for (auto& event : channel->wait(in(kHang))) events.push_back(std::move(event));
  }
  check_eq(events.size(), 3u);
  check_frame(events[0], 0, "abc");
  check_frame(events[1], 0, "");
  check_frame(events[2], 0, "de");
  close(ends[1]);
});

const Case bad_length("an impossible length is a lost peer, and nothing is allocated for it", [] {
  const Sockets ends = unix_pair();
  auto channel = make_tcp_channel(1, {ends[0]});
  const std::string raw("\1\0\0\0a\xff\xff\xff\xff", 9);
  check(write(ends[1], raw.data(), raw.size()) == static_cast<ssize_t>(raw.size()));
  const auto events = receive(*channel, 2);
  check_frame(events[0], 0, "a");
  check_lost(events[1], 0);
  check_contains(events[1].data, "impossible length");
  check_silence(*channel);
  close(ends[1]);
});

const Case too_long("a frame that the peer would refuse is not sent", [] {
  const size_t size = (256u << 20) + 1;
  void* pages = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check(pages != MAP_FAILED);
  auto channels = over(unix_pair);
  check_throws<std::length_error>(
      [&] { channels[0]->send(1, std::string_view(static_cast<const char*>(pages), size)); });
  munmap(pages, size);
});

// --- peers that go --------------------------------------------------------------------------

const Case lost("a peer that goes is noticed once, after all that it said", [] {
  for (const auto& [name, make] : all_channels()) {
    auto channels = make(3);
    channels[2]->send(0, "last words");
    channels[2].reset();
    const auto events = receive(*channels[0], 2);
    check_frame(events[0], 2, "last words");
    check_lost(events[1], 2);
    channels[0]->send(2, "dropped");
    check_silence(*channels[0]);
    // The others are still there.
    channels[0]->send(1, "hello");
    check_frame(receive(*channels[1])[0], 0, "hello");
    channels[0].reset();
    check_lost(receive(*channels[1])[0], 0);
  }
});

const Case unread("a peer that goes with data unread is still heard to its end", [] {
  for (const auto& [name, make] : sockets()) {
    auto channels = make(2);
    // More than the socket holds: sending goes on, and fails, after the peer has gone.
    channels[0]->send(1, std::string(8'000'000, 'x'));
    channels[1]->send(0, "goodbye");
    channels[1].reset();
    channels[0]->send(1, "more");
    const auto events = receive(*channels[0], 2);
    check_frame(events[0], 1, "goodbye");
    check_lost(events[1], 1);
    check_silence(*channels[0]);
  }
});

const Case shared_socket("a lost peer stays lost while another process holds the socket's file",
                         [] {
                           // As between fork and exec of a child: closing the descriptor here does
                           // not close the file.
                           const Sockets ends = unix_pair();
                           const int elsewhere = dup(ends[0]);
                           auto channel = make_tcp_channel(1, {ends[0]});
                           close(ends[1]);
                           check_lost(receive(*channel)[0], 0);
                           check_silence(*channel);
                           close(elsewhere);
                         });

const Case close_flushes("close() sends what is queued, then waits for the peer to close", [] {
  for (const auto& [name, make] : all_channels()) {
    auto channels = make(2);
    const std::string frame(2'000'000, 'y');
    run_ranks(2, [&](int rank) {
      if (rank == 1) {
        for (int i = 0; i < 2; ++i) channels[1]->send(0, frame);
        channels[1]->close(hours(1));
        return;
      }
      const auto events = receive(*channels[0], 3);
      for (int i = 0; i < 2; ++i) check_frame(events[i], 1, frame);
      check_lost(events[2], 1);
    });
  }
});

const Case close_both("both ends may close at once, with output queued", [] {
  for (const auto& [name, make] : all_channels()) {
    auto channels = make(3);
    run_ranks(3, [&](int rank) {
      for (int peer = 0; peer < 3; ++peer) {
        if ((rank == 0) != (peer == 0)) channels[rank]->send(peer, std::string(1'000'000, 'z'));
      }
      channels[rank]->close(hours(1));
    });
    channels[1]->wake();  // harmless afterwards
  }
});

const Case close_lingers("close() gives up on a peer that stays", [] {
  auto channels = over(unix_pair);
  channels[0]->send(1, std::string(1'000'000, 'z'));
  channels[0]->close(milliseconds(20));
  check_lost(receive(*channels[1])[0], 0);
});

const Case fork_child("a forked child that lives on does not hide this process's death", [] {
  auto channels = over(tcp_pair);
  const pid_t child = fork();
  if (child == 0) {
    for (auto& channel : channels) channel->abandon_in_child();
    for (;;) pause();
  }
  check(child > 0);
  channels[1].reset();
  // The child may not have run yet: then the end of the connection comes when it has.
  std::string failure;
  try {
    check_lost(receive(*channels[0])[0], 1);
  } catch (const CheckFailure& error) {
    failure = error.what();
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  check(failure.empty(), failure);
});

// --- waking and waiting ---------------------------------------------------------------------

const Case wake_first("a wake() before wait() is not lost, and many are one", [] {
  for (const auto& [name, make] : all_channels()) {
    auto channels = make(2);
    for (int i = 0; i < 100; ++i) channels[0]->wake();
    check(channels[0]->wait(in(kHang)).empty());
    check_silence(*channels[0]);
    channels[0]->wake();
    check(channels[0]->wait(std::nullopt).empty());
  }
});

const Case wake_stress("no wake() is lost under stress", [] {
  for (const auto& [name, make] : all_channels()) {
    auto channels = make(2);
    constexpr int kWakers = 3;
    const int items = rounds(20'000);
    std::atomic<int> posted{0}, seen{0};
    std::atomic<bool> failed{false};
    run_ranks(
        kWakers + 1,
        [&](int thread) {
          if (thread < kWakers) {
            for (int i = 0; i < items && !failed; ++i) {
              const int mine = ++posted;
              channels[0]->wake();
              // Sometimes wait until it was noticed, so that the waiter gets to sleep.
              while (i % 8 == 0 && seen < mine && !failed) std::this_thread::yield();
            }
            return;
          }
          while (seen < kWakers * items) {
            const auto hang = in(kHang);
            channels[0]->wait(hang);
            check(Channel::Clock::now() < hang, std::string(name) + ": a wake() was lost");
            seen = posted.load();
          }
        },
        [&] { failed = true; });
  }
});

const Case idle("a waiting thread is not woken", [] {
  for (const auto& make : {all_channels().back().make, sockets().back().make}) {
    auto channels = make(2);
    std::atomic<int> tid{0};
    std::thread waiter([&] {
      tid = static_cast<int>(syscall(SYS_gettid));
      channels[0]->wait(std::nullopt);
    });
    while (tid == 0) std::this_thread::yield();
    std::string failure;
    try {
      check_asleep({tid});
    } catch (const CheckFailure& error) {
      failure = error.what();
    }
    channels[0]->wake();
    waiter.join();
    check(failure.empty(), failure);
  }
});

}  // namespace
}  // namespace hvdtorch::test
