#include "channel/shared.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <ctime>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "channel/frames.h"
#include "channel/ring.h"
#include "channel/tcp.h"

namespace hvdtorch {
namespace {

// Note [Bell]
// A rank that sleeps says so in its bell, a word that its peers see; a peer that has put something
// into one of its rings then wakes it, and only then. Everything is sequentially consistent: either
// the sleeper, which looks at its rings once more after saying so, sees the bytes, or the writer
// sees that it sleeps.
//
// The two low bits say how it sleeps, the others count how often rouse() was called, so that a
// sleeper that missed the call finds another word than it expected.
struct alignas(64) Doorbell {
  static constexpr uint32_t kState = 3, kRouse = 4;
  enum State : uint32_t {
    kAwake = 0,   // somebody looks
    kEpoll = 1,   // the control thread sleeps on its sockets: an empty frame wakes it
    kDozing = 2,  // a leader sleeps on this word
    kRung = 3,    // a peer has seen to it
  };
  std::atomic<uint32_t> word;

  void set(State state) noexcept {
    uint32_t old = word.load();
    while (!word.compare_exchange_weak(old, (old & ~kState) | state)) {
    }
  }
};

long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

// A mailbox: how to wake its rank, and the rings between it and rank 0 (which needs none to
// itself).
struct Contents {
  Doorbell bell;
  Ring to_zero, from_zero;
};

Contents& contents_of(const Mailbox& mailbox) {
  if (mailbox.memory.size() < sizeof(Contents)) {
    throw std::logic_error("a mailbox is too small");
  }
  return *reinterpret_cast<Contents*>(mailbox.memory.data());
}

class SharedChannel final : public Channel {
 public:
  SharedChannel(int rank, const std::vector<int>& fds, const Mailboxes& mailboxes,
                std::shared_ptr<void> keepalive)
      : tcp_(rank, fds), keepalive_(std::move(keepalive)) {
    Contents* own = nullptr;
    Contents* zero = nullptr;
    for (const Mailbox& mailbox : mailboxes) {
      if (mailbox.rank == rank) own = &contents_of(mailbox);
      if (mailbox.rank == 0) zero = &contents_of(mailbox);
    }
    if (own == nullptr || zero == nullptr) {
      throw std::logic_error("mailboxes of a host that rank 0 or this rank is not on");
    }
    own_ = &own->bell;
    if (rank != 0) {
      peers_.emplace_back(0, zero->bell, own->to_zero, own->from_zero);
    } else {
      for (const Mailbox& mailbox : mailboxes) {
        if (mailbox.rank == 0) continue;
        Contents& theirs = contents_of(mailbox);
        peers_.emplace_back(mailbox.rank, theirs.bell, theirs.from_zero, theirs.to_zero);
      }
    }
    look();  // the control thread is awake
  }

  void send(int rank, std::string_view frame) override {
    Peer* peer = peer_of(rank);
    if (peer == nullptr) {
      tcp_.send(rank, frame);
      return;
    }
    const auto header = frame_header(frame);
    if (!peer->live) return;
    peer->out.append(header.data(), header.size());
    peer->out.append(frame);
    flush(*peer);
  }

  std::vector<Event> take() override {
    // First: what a peer put into its ring before its connection ended is then there to be read.
    std::vector<Event> carried = tcp_.take();
    std::vector<Event> events = std::exchange(lost_, {});
    has_lost_ = false;
    for (Peer& peer : peers_) {
      if (!peer.live) continue;
      if (!peer.out.empty()) flush(peer);
      receive(peer, events);
    }
    for (Event& event : carried) {
      Peer* peer = peer_of(event.rank);
      if (peer == nullptr) {
        events.push_back(std::move(event));
      } else if (event.kind == Event::Kind::kLost && peer->live) {
        forget(*peer);
        events.push_back(std::move(event));
      }
    }
    std::move(lost_.begin(), lost_.end(), std::back_inserter(events));
    lost_.clear();
    has_lost_ = false;
    return events;
  }

  void sleep(std::optional<Clock::time_point> deadline) override {
    if (look_away()) tcp_.sleep(deadline);
    look();
  }

  void wake() noexcept override { tcp_.wake(); }

  void close(std::chrono::milliseconds linger) noexcept override {
    const auto deadline = Clock::now() + linger;
    try {
      // Reads on, so that a peer that closes as well gets rid of what it has queued.
      while (Clock::now() < deadline) {
        const bool queued = std::any_of(peers_.begin(), peers_.end(),
                                        [](const Peer& peer) { return !peer.out.empty(); });
        if (!queued && !tcp_.finish()) break;
        wait(deadline);
      }
    } catch (...) {  // out of memory: closing is what is left to do
    }
    tcp_.close(std::chrono::milliseconds(0));
  }

  void abandon_in_child() noexcept override { tcp_.abandon_in_child(); }

  void look() noexcept override {
    std::lock_guard lock(look_mutex_);
    ++lookers_;
    say();
  }

  bool look_away() noexcept override {
    {
      std::lock_guard lock(look_mutex_);
      --lookers_;
      say();
    }
    return !news();
  }

  bool news() const noexcept override {
    if (has_lost_) return true;
    return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.live &&
             (peer.reader.ring().has_bytes() || (peer.queued && peer.writer.ring().has_room()));
    });
  }

  Doze doze(const std::function<bool()>& done, Clock::time_point deadline) override {
    uint32_t word;
    {
      std::lock_guard lock(look_mutex_);
      if (std::exchange(dozing_, true)) return Doze::kUnable;
      --lookers_;
      say();
      word = own_->word;
    }
    // If others look at the moment, they see to what comes, and say that this thread dozes when
    // they look away.
    bool interrupted = false;
    if (!news() && !done()) {
      const auto left = std::chrono::nanoseconds(deadline - Clock::now()).count();
      const timespec span{left / 1'000'000'000, left % 1'000'000'000};
      interrupted = left > 0 && futex(own_->word, FUTEX_WAIT, word, &span) == -1 && errno == EINTR;
    }
    std::lock_guard lock(look_mutex_);
    dozing_ = false;
    ++lookers_;
    say();
    return interrupted ? Doze::kInterrupted : Doze::kWoken;
  }

  void rouse() noexcept override {
    own_->word.fetch_add(Doorbell::kRouse);
    futex(own_->word, FUTEX_WAKE, INT_MAX, nullptr);
  }

  void hold_bells(bool hold) override { hold_bells_ = hold; }

  void ring_bells() override {
    for (Peer& peer : peers_) {
      if (std::exchange(peer.unrung, false) && peer.live && peer.writer.ring().has_bytes()) {
        ring(peer);
      }
    }
  }

 private:
  struct Peer {
    Peer(int its_rank, Doorbell& its_bell, Ring& out_ring, Ring& in_ring)
        : rank(its_rank), bell(its_bell), writer(out_ring), reader(in_ring) {}
    const int rank;
    Doorbell& bell;
    RingWriter writer;
    RingReader reader;
    std::string in;       // received, not yet a whole frame
    std::string out;      // accepted by send(), not yet in the ring
    bool unrung = false;  // see hold_bells()
    std::atomic<bool> live{true};
    std::atomic<bool> queued{false};  // `out` is not empty
  };

  Peer* peer_of(int rank) {
    const auto it = std::find_if(peers_.begin(), peers_.end(),
                                 [rank](const Peer& peer) { return peer.rank == rank; });
    return it == peers_.end() ? nullptr : &*it;
  }

  // Tells the peers how to wake this rank.
  void say() noexcept {
    own_->set(lookers_ > 0 ? Doorbell::kAwake : dozing_ ? Doorbell::kDozing : Doorbell::kEpoll);
  }

  void ring(Peer& peer) {
    std::atomic<uint32_t>& word = peer.bell.word;
    uint32_t old = word.load();
    for (;;) {
      const uint32_t state = old & Doorbell::kState;
      if (state != Doorbell::kEpoll && state != Doorbell::kDozing) return;
      if (state == Doorbell::kEpoll && hold_bells_) {
        peer.unrung = true;
        return;
      }
      if (!word.compare_exchange_weak(old, old | Doorbell::kRung)) continue;
      if (state == Doorbell::kEpoll) {
        tcp_.send(peer.rank, {});
      } else {
        futex(word, FUTEX_WAKE, INT_MAX, nullptr);
      }
      return;
    }
  }

  // Puts what fits of `out` into the ring.
  void flush(Peer& peer) {
    try {
      size_t moved = 0;
      for (;;) {
        moved += peer.writer.write(std::string_view(peer.out).substr(moved));
        if (moved == peer.out.size()) break;
        peer.writer.publish();
        // Said before the last look at the room, so that the reader cannot miss it.
        peer.writer.ring().full = 1;
        if (!peer.writer.ring().has_room()) break;
      }
      peer.writer.publish();
      peer.out.erase(0, moved);
      peer.queued = !peer.out.empty();
      if (moved != 0) ring(peer);
    } catch (const RingDamaged& damage) {
      lose(peer, damage.what());
    }
  }

  void receive(Peer& peer, std::vector<Event>& events) {
    try {
      const bool writer_waits = peer.reader.read(peer.in);
      if (!split_frames(peer.in, peer.rank, events)) {
        lose(peer, "sent a frame of an impossible length");
        return;
      }
      if (writer_waits) ring(peer);
    } catch (const RingDamaged& damage) {
      lose(peer, damage.what());
    }
  }

  void forget(Peer& peer) {
    peer.live = false;
    peer.in = {};
    peer.out = {};
  }

  void lose(Peer& peer, std::string why) {
    forget(peer);
    tcp_.drop(peer.rank);
    lost_.push_back({Event::Kind::kLost, peer.rank, std::move(why)});
    has_lost_ = true;
  }

  TcpChannel tcp_;
  std::shared_ptr<void> keepalive_;
  Doorbell* own_;
  std::deque<Peer> peers_;  // of this host
  std::mutex look_mutex_;
  int lookers_ = 0;      // threads that look at the rings, the control thread included
  bool dozing_ = false;  // a leader sleeps
  bool hold_bells_ = false;
  std::vector<Event> lost_;  // not yet told
  std::atomic<bool> has_lost_{false};
};

}  // namespace

const size_t kMailboxBytes = sizeof(Contents);

std::unique_ptr<Channel> make_shared_channel(int rank, const std::vector<int>& fds,
                                             const Mailboxes& mailboxes,
                                             std::shared_ptr<void> keepalive) {
  return std::make_unique<SharedChannel>(rank, fds, mailboxes, std::move(keepalive));
}

}  // namespace hvdtorch
