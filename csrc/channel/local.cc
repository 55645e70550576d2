#include "channel/local.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace hvdtorch {

// One mailbox per endpoint, one lock for all: simplicity over speed, this is for tests and size 1.
class LocalHub {
 public:
  explicit LocalHub(int size) : boxes_(size) {}

  void post(int to, Channel::Event event) {
    std::lock_guard lock(mutex_);
    if (boxes_[to].closed) return;
    boxes_[to].events.push_back(std::move(event));
    boxes_[to].arrived.notify_one();
  }

  void wake(int rank) {
    std::lock_guard lock(mutex_);
    boxes_[rank].woken = true;
    boxes_[rank].arrived.notify_one();
  }

  void sleep(int rank, std::optional<Channel::Clock::time_point> deadline) {
    std::unique_lock lock(mutex_);
    Box& box = boxes_[rank];
    const auto due = [&box] { return box.woken || !box.events.empty(); };
    if (deadline) {
      box.arrived.wait_until(lock, *deadline, due);
    } else {
      box.arrived.wait(lock, due);
    }
    box.woken = false;
  }

  std::vector<Channel::Event> take(int rank) {
    std::lock_guard lock(mutex_);
    return std::exchange(boxes_[rank].events, {});
  }

  void close(int rank) {
    std::lock_guard lock(mutex_);
    if (std::exchange(boxes_[rank].closed, true)) return;
    for (int peer = 0; peer < static_cast<int>(boxes_.size()); ++peer) {
      if (peer == rank || (rank != 0 && peer != 0) || boxes_[peer].closed) continue;
      boxes_[peer].events.push_back({Channel::Event::Kind::kLost, rank, "endpoint closed"});
      boxes_[peer].arrived.notify_one();
    }
  }

 private:
  struct Box {
    std::vector<Channel::Event> events;
    std::condition_variable arrived;
    bool woken = false;
    bool closed = false;
  };
  std::mutex mutex_;
  std::deque<Box> boxes_;
};

namespace {

class LocalChannel final : public Channel {
 public:
  LocalChannel(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalChannel() override { hub_->close(rank_); }

  void send(int rank, std::string_view frame) override {
    hub_->post(rank, {Event::Kind::kFrame, rank_, std::string(frame)});
  }
  std::vector<Event> take() override { return hub_->take(rank_); }
  void sleep(std::optional<Clock::time_point> deadline) override { hub_->sleep(rank_, deadline); }
  void wake() noexcept override { hub_->wake(rank_); }
  void close(std::chrono::milliseconds) noexcept override { hub_->close(rank_); }
  void abandon_in_child() noexcept override {}

 private:
  std::shared_ptr<LocalHub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Channel>> make_local_channels(int size) {
  auto hub = std::make_shared<LocalHub>(size);
  std::vector<std::unique_ptr<Channel>> channels;
  for (int rank = 0; rank < size; ++rank) {
    channels.push_back(std::make_unique<LocalChannel>(hub, rank));
  }
  return channels;
}

}  // namespace hvdtorch
