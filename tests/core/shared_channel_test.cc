// Rings in shared memory and the channel over them: what is particular to them. That the channel
// keeps the promises of all channels is tested with the others (channel_test.cc).
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include "channel/ring.h"
#include "channel/shared.h"
#include "channel/tcp.h"
#include "check.h"
#include "rings.h"
#include "samples.h"
#include "thread_watch.h"

namespace hvdtorch::test {
namespace {

using Kind = Channel::Event::Kind;
using std::chrono::hours;
using std::chrono::milliseconds;

constexpr std::chrono::seconds kHang{60};

Channel::Clock::time_point hang() { return Channel::Clock::now() + kHang; }

// --- one ring -------------------------------------------------------------------------------

// An empty ring whose next byte lies at `offset`.
struct RingAt {
  explicit RingAt(uint64_t offset) : writer(*ring), reader(*ring) {
    check_eq(writer.write(std::string(offset, 'x')), offset);
    writer.publish();
    std::string skipped;
    reader.read(skipped);
  }
  std::unique_ptr<Ring> ring = std::make_unique<Ring>();
  RingWriter writer;
  RingReader reader;
};

const Case wraps("bytes come out as they went in wherever the ring ends in them", [] {
  Random random(1);
  for (uint64_t before = 0; before <= 40; ++before) {
    RingAt at(Ring::kBytes - before);
    const std::string bytes = random_bytes(random, 40);
    check_eq(at.writer.write(bytes), bytes.size());
    std::string seen;
    at.reader.read(seen);
    check(seen.empty(), "bytes came before they were published");
    at.writer.publish();
    at.reader.read(seen);
    check(seen == bytes);
  }
});

const Case fills("a ring takes what fits, and goes on when there is room", [] {
  for (uint64_t offset : {uint64_t{0}, uint64_t{1}, Ring::kBytes / 2, Ring::kBytes - 1}) {
    RingAt at(offset);
    Random random(2);
    const std::string bytes = random_bytes(random, Ring::kBytes + 5);
    check_eq(at.writer.write(bytes), Ring::kBytes);
    check_eq(at.writer.write("more"), 0u);
    at.writer.publish();
    check(!at.ring->has_room() && at.ring->has_bytes());
    at.ring->full = 1;
    std::string seen;
    check(at.reader.read(seen), "the writer waits for room");
    check(!at.reader.read(seen), "it was told");
    check(at.ring->has_room() && !at.ring->has_bytes());
    check_eq(at.writer.write(std::string_view(bytes).substr(Ring::kBytes)), 5u);
    at.writer.publish();
    at.reader.read(seen);
    check(seen == bytes);
  }
});

const Case streams("a writer and a reader that run at the same time", [] {
  const auto ring = std::make_unique<Ring>();
  Random random(3);
  const std::string bytes = random_bytes(random, rounds(40) * 100'000);
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      RingWriter writer(*ring);
      Random sizes(4);
      for (size_t sent = 0; sent < bytes.size();) {
        const auto piece = std::string_view(bytes).substr(sent, 1 + sizes.below(70'000));
        const size_t taken = writer.write(piece);
        sent += taken;
        writer.publish();
        if (taken == 0) std::this_thread::yield();
      }
    } else {
      RingReader reader(*ring);
      std::string seen;
      const auto end = hang();
      while (seen.size() < bytes.size() && Channel::Clock::now() < end) {
        const size_t before = seen.size();
        reader.read(seen);
        if (seen.size() == before) std::this_thread::yield();
      }
      check(seen == bytes);
    }
  });
});

const Case damaged("positions that cannot be are refused", [] {
  for (uint64_t wrong : {Ring::kBytes + 11, uint64_t{9}, UINT64_MAX}) {
    RingAt at(10);
    at.ring->written = wrong;
    std::string seen;
    check_throws<RingDamaged>([&] { at.reader.read(seen); });
  }
  for (uint64_t wrong : {uint64_t{11}, 10 - (Ring::kBytes + 1)}) {
    RingAt at(10);
    at.ring->read = wrong;
    check_throws<RingDamaged>([&] { at.writer.write("x"); });
    std::string seen;
    check_throws<RingDamaged>([&] { at.reader.read(seen); });
  }
});

// --- the channel ----------------------------------------------------------------------------

std::array<int, 2> socket_pair() {
  std::array<int, 2> fds;
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
  return fds;
}

// Ranks 0 and 1, and the rings between them.
struct Two {
  Two() : rings(make_rings(2)) {
    const auto fds = socket_pair();
    ranks[0] = over_rings(0, {-1, fds[0]}, rings);
    ranks[1] = over_rings(1, {fds[1]}, rings);
  }
  // To and from rank 0. (What precedes them in rank 1's mailbox is a bell of 64 bytes.)
  Ring& ring(int index) {
    std::byte* memory = rings.mailboxes[1].memory.data();
    return *reinterpret_cast<Ring*>(memory + 64 + index * sizeof(Ring));
  }
  Rings rings;
  std::array<std::unique_ptr<Channel>, 2> ranks;
};

std::vector<Channel::Event> receive(Channel& channel) {
  const auto end = hang();
  for (;;) {
    auto events = channel.wait(end);
    if (!events.empty()) return events;
    check(Channel::Clock::now() < end, "no event came");
  }
}

void check_frame(const std::vector<Channel::Event>& events, const std::string& data) {
  check_eq(events.size(), 1u);
  check(events[0].kind == Kind::kFrame, "lost: " + events[0].data);
  check(events[0].data == data, "another frame: " + events[0].data);
}

void check_lost(const std::vector<Channel::Event>& events, int rank, const std::string& why) {
  check_eq(events.size(), 1u);
  check(events[0].kind == Kind::kLost, "a frame: " + events[0].data);
  check_eq(events[0].rank, rank);
  check_contains(events[0].data, why);
}

const Case layout("the rings lie where the tests damage them", [] {
  Two two;
  two.ranks[1]->send(0, "abc");
  check_eq(two.ring(0).written.load(), 7u);
  two.ranks[0]->send(1, "abcd");
  check_eq(two.ring(1).written.load(), 8u);
});

const Case damaged_in("a damaged ring is a lost peer, at both ends", [] {
  Two two;
  two.ring(0).written = 1'000'000;
  check_lost(receive(*two.ranks[0]), 1, "is damaged");
  check_lost(receive(*two.ranks[1]), 0, "connection closed");
  two.ranks[0]->send(1, "dropped");
  check(two.ranks[0]->take().empty());
  check(two.ranks[1]->take().empty());
});

const Case damaged_out("so is one whose reader makes no sense", [] {
  Two two;
  two.ring(1).read = 1'000'000;
  two.ranks[0]->send(1, "x");
  check_lost(receive(*two.ranks[0]), 1, "is damaged");
  check_lost(receive(*two.ranks[1]), 0, "");
});

const Case damaged_full("also while more waits for room", [] {
  Two two;
  two.ranks[0]->send(1, std::string(2 * Ring::kBytes, 'x'));
  two.ring(1).read = UINT64_MAX;
  check_lost(receive(*two.ranks[0]), 1, "is damaged");
});

const Case bad_length("an impossible length is a lost peer", [] {
  Two two;
  RingWriter writer(two.ring(0));
  writer.write("\xff\xff\xff\xff");
  writer.publish();
  check_lost(receive(*two.ranks[0]), 1, "impossible length");
  check_lost(receive(*two.ranks[1]), 0, "connection closed");
});

const Case wrong_host("mailboxes are those of rank 0's host, and large enough", [] {
  const Rings rings = make_rings(2);
  const auto refused = [](const Mailboxes& mailboxes) {
    const auto fds = socket_pair();
    check_throws<std::logic_error>([&] { make_shared_channel(1, {fds[0]}, mailboxes, nullptr); });
    close(fds[1]);
  };
  refused({});
  refused({rings.mailboxes[0]});
  refused({rings.mailboxes[1]});
  refused({rings.mailboxes[0], {1, rings.mailboxes[1].memory.first(kMailboxBytes - 1)}});
});

const Case killed("a killed process is noticed after what it said, with its ring full", [] {
  const Rings rings = make_rings(2);
  const auto fds = socket_pair();
  const std::string frame(3 * Ring::kBytes, 'y');
  const pid_t child = fork();
  if (child == 0) {
    close(fds[0]);
    const auto channel = over_rings(1, {fds[1]}, rings);
    channel->send(0, "hello");
    channel->send(0, frame);  // the rest of it waits for room
    for (;;) {
      for (const auto& event : channel->wait(std::nullopt)) {
        if (event.kind == Kind::kLost) _exit(1);  // the test failed
        if (event.data == "die") kill(getpid(), SIGKILL);
        channel->send(0, event.data);
      }
    }
  }
  check(child > 0);
  close(fds[1]);
  const auto channel = over_rings(0, {-1, fds[0]}, rings);
  check_frame(receive(*channel), "hello");
  check_frame(receive(*channel), frame);
  for (int i = 0; i < rounds(500); ++i) {
    channel->send(1, std::to_string(i));
    check_frame(receive(*channel), std::to_string(i));
  }
  channel->send(1, "die");
  channel->send(1, frame);
  check_lost(receive(*channel), 1, "");
  waitpid(child, nullptr, 0);
});

// --- threads that lead ----------------------------------------------------------------------

// A control thread that only sleeps, and counts how often it was woken.
struct Control {
  explicit Control(Channel& its_channel)
      : channel(its_channel), thread([this] {
          tid = static_cast<int>(syscall(SYS_gettid));
          while (!stopping) {
            channel.sleep(std::nullopt);
            ++wakes;
          }
        }) {
    while (tid == 0) std::this_thread::yield();
    check_asleep({tid});
  }
  ~Control() {
    stopping = true;
    channel.wake();
    thread.join();
  }
  Channel& channel;
  std::atomic<int> tid{0}, wakes{0};
  std::atomic<bool> stopping{false};
  std::thread thread;
};

const auto never = [] { return false; };

const Case leads("a leader that looks or dozes gets the frames, and the control thread sleeps on",
                 [] {
                   Two two;
                   Control control(*two.ranks[0]);
                   Channel& leader = *two.ranks[0];
                   leader.look();
                   two.ranks[1]->send(0, "looked for");
                   check(leader.news());
                   check_frame(leader.take(), "looked for");
                   for (int i = 0; i < rounds(200); ++i) {
                     std::thread peer([&] { two.ranks[1]->send(0, "dozed for"); });
                     while (!leader.news()) {
                       check(leader.doze(never, hang()) == Channel::Doze::kWoken);
                     }
                     check_frame(leader.take(), "dozed for");
                     peer.join();
                   }
                   check_eq(control.wakes.load(), 0);
                   check(leader.look_away());
                   two.ranks[1]->send(0, "nobody looks");
                   while (control.wakes == 0) std::this_thread::yield();
                   check_frame(leader.take(), "nobody looks");
                 });

const Case looks_away("what comes just before a leader looks away is not lost", [] {
  Two two;
  Control control(*two.ranks[0]);
  two.ranks[0]->look();
  two.ranks[1]->send(0, "late");
  check(!two.ranks[0]->look_away());
  check_frame(two.ranks[0]->take(), "late");
});

const Case roused("doze() ends for rouse(), the deadline, and at once if it is done", [] {
  Two two;
  Channel& leader = *two.ranks[0];
  leader.look();
  check(leader.doze([] { return true; }, hang()) == Channel::Doze::kWoken);
  check(leader.doze(never, Channel::Clock::now() - hours(1)) == Channel::Doze::kWoken);
  check(leader.doze(never, Channel::Clock::now() + milliseconds(5)) == Channel::Doze::kWoken);
  const auto end = hang();
  for (int i = 0; i < rounds(500); ++i) {
    std::atomic<bool> done{false};
    std::thread other([&] {
      done = true;
      leader.rouse();
    });
    while (!done) leader.doze([&] { return done.load(); }, end);
    check(Channel::Clock::now() < end, "rouse() was lost");
    other.join();
  }
});

const Case one_dozes("only one thread at a time can doze", [] {
  Two two;
  Channel& channel = *two.ranks[0];
  std::atomic<bool> dozing{false}, done{false};
  channel.look();
  std::thread first([&] {
    channel.look();
    const auto is_done = [&] {
      dozing = true;
      return done.load();
    };
    while (!done) channel.doze(is_done, hang());
    channel.look_away();
  });
  while (!dozing) std::this_thread::yield();
  check(channel.doze(never, hang()) == Channel::Doze::kUnable);
  done = true;
  channel.rouse();
  first.join();
});

const Case held("a peer that sleeps is left alone until the bells ring, one that dozes is not", [] {
  Two two;
  Channel& channel = *two.ranks[1];
  {
    Control control(*two.ranks[0]);
    channel.hold_bells(true);
    channel.send(0, "held");
    channel.hold_bells(false);
    check_asleep({control.tid});
    check_eq(control.wakes.load(), 0);
    channel.ring_bells();
    while (control.wakes == 0) std::this_thread::yield();
  }
  check_frame(two.ranks[0]->take(), "held");
  two.ranks[0]->look();
  std::thread peer([&] {
    channel.hold_bells(true);
    channel.send(0, "a leader's");
    channel.hold_bells(false);
  });
  while (!two.ranks[0]->news()) two.ranks[0]->doze(never, hang());
  check_frame(two.ranks[0]->take(), "a leader's");
  peer.join();
});

}  // namespace
}  // namespace hvdtorch::test
