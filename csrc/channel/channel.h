// Channel: moves control frames between the coordinator (rank 0) and the other ranks, and notices
// when a peer is gone. It interprets nothing it carries.
//
// The control thread sleeps in sleep(), one blocking call: nothing to do means no wake-up. Whoever
// has the control role (Note [Leader] in core/leader.cc) calls send() and take().
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvdtorch {

class Channel {
 public:
  using Clock = std::chrono::steady_clock;

  struct Event {
    enum class Kind { kFrame, kLost };
    Kind kind;
    int rank;          // the peer
    std::string data;  // a whole frame, or why the peer is lost
  };

  virtual ~Channel() = default;

  // Queues a frame for `rank` (rank 0 for everyone but rank 0). Never blocks. Frames to a lost
  // peer are dropped.
  virtual void send(int rank, std::string_view frame) = 0;

  // The events that are there, and moves queued output on. Never blocks.
  virtual std::vector<Event> take() = 0;

  // Waits until take() has something to do, wake() or the deadline, whichever is first. The control
  // thread only, which needs no role for it.
  virtual void sleep(std::optional<Clock::time_point> deadline) = 0;

  std::vector<Event> wait(std::optional<Clock::time_point> deadline) {
    sleep(deadline);
    return take();
  }

  // From any thread: the current sleep(), or the next one, returns.
  virtual void wake() noexcept = 0;

  // A thread that leads looks after the channel itself, so that the control thread can sleep on.
  // Between look() and look_away(), peers need wake nobody. sleep() looks away meanwhile.
  virtual void look() noexcept {}
  // False if take() has something to do that nobody was told of.
  virtual bool look_away() noexcept { return true; }
  // Whether take() has something to do that only those who look are told of.
  virtual bool news() const noexcept { return false; }
  // A thread that looks sleeps until news(), rouse(), a signal or the deadline, but not if done():
  // whoever makes it so calls rouse() afterwards. kUnable: the channel has no such sleep, or
  // another thread is in it.
  enum class Doze { kUnable, kWoken, kInterrupted };
  virtual Doze doze(const std::function<bool()>& done, Clock::time_point deadline) {
    static_cast<void>(done), static_cast<void>(deadline);
    return Doze::kUnable;
  }
  // From any thread.
  virtual void rouse() noexcept {}
  // In the control role: from hold_bells(true) to hold_bells(false), send() wakes no control thread
  // of a peer. Its leader may be about to look, which is cheaper for both. ring_bells() wakes those
  // that have not looked since.
  virtual void hold_bells(bool hold) { static_cast<void>(hold); }
  virtual void ring_bells() {}

  // The control thread, alone: sends what is queued, tells the peers that no more will come, waits
  // until they have closed too or `linger` has passed, and closes.
  virtual void close(std::chrono::milliseconds linger) noexcept = 0;

  // In a forked child: drop every descriptor without a word to the peers (async-signal-safe).
  virtual void abandon_in_child() noexcept = 0;
};

}  // namespace hvdtorch
