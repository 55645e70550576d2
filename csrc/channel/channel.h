// Channel: moves control frames between the coordinator (rank 0) and the other ranks, and notices
// when a peer is gone. It interprets nothing it carries.
//
// One thread, the control thread, owns a channel and calls everything but wake(). Waiting is one
// blocking call: nothing to do means no wake-up.
#pragma once

#include <chrono>
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

  // Waits for events, wake() or the deadline, whichever is first; empty after the last two, and
  // when queued output moved on.
  virtual std::vector<Event> wait(std::optional<Clock::time_point> deadline) = 0;

  // From any thread: the current wait(), or the next one, returns.
  virtual void wake() noexcept = 0;

  // Sends what is queued, tells the peers that no more will come, waits until they have closed too
  // or `linger` has passed, and closes.
  virtual void close(std::chrono::milliseconds linger) noexcept = 0;

  // In a forked child: drop every descriptor without a word to the peers (async-signal-safe).
  virtual void abandon_in_child() noexcept = 0;
};

}  // namespace hvdtorch
