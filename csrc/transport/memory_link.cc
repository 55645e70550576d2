#include "transport/memory_link.h"

#include <algorithm>
#include <compare>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace hvdtorch {
namespace {

struct Route {
  int from, to, tag;
  auto operator<=>(const Route&) const = default;
};

// One side of a message: where its bytes are read from or written to.
struct Side {
  bool sends;
  const void* source;  // of a send
  void* target;        // of a receive
  size_t bytes;
  bool done = false;
  std::string error = {};  // not empty: failed
};

class Hub {
 public:
  explicit Hub(int size) : gone_(size, false) {}

  void post(const Route& route, const std::shared_ptr<Side>& side) {
    std::lock_guard lock(mutex_);
    for (int rank : {route.from, route.to}) {
      if (gone_[rank]) return fail(*side, "rank " + std::to_string(rank) + " is gone");
    }
    Queues& queues = queues_[route];
    auto& own = side->sends ? queues.sends : queues.receives;
    auto& others = side->sends ? queues.receives : queues.sends;
    if (!own.empty() || others.empty() || !others.front()->error.empty()) {
      own.push_back(side);
      return;
    }
    const std::shared_ptr<Side> other = others.front();
    others.pop_front();
    match(route, side->sends ? *side : *other, side->sends ? *other : *side);
  }

  void wait(const Side& side) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return side.done || !side.error.empty(); });
    if (!side.error.empty()) throw TransportError(side.error);
  }

  // A side that failed keeps its place in the queue: messages are in order, so that none may take
  // the place of one that was lost.
  void withdraw(Side& side, const char* why) {
    std::lock_guard lock(mutex_);
    if (!side.done && side.error.empty()) fail(side, why);
  }

  void leave(int rank) {
    std::lock_guard lock(mutex_);
    gone_[rank] = true;
    for (auto& [route, queues] : queues_) {
      if (route.from != rank && route.to != rank) continue;
      for (auto* sides : {&queues.sends, &queues.receives}) {
        for (const auto& side : *sides) {
          if (side->error.empty()) fail(*side, "rank " + std::to_string(rank) + " is gone");
        }
      }
    }
  }

  int size() const noexcept { return static_cast<int>(gone_.size()); }

 private:
  struct Queues {  // of sides that were not matched
    std::deque<std::shared_ptr<Side>> sends, receives;
  };

  void match(const Route& route, Side& send, Side& receive) {
    if (send.bytes != receive.bytes) {
      const std::string why = "message from rank " + std::to_string(route.from) + " to rank " +
                              std::to_string(route.to) + ", tag " + std::to_string(route.tag) +
                              ": " + std::to_string(send.bytes) + " bytes were sent and " +
                              std::to_string(receive.bytes) + " were expected";
      fail(send, why);
      return fail(receive, why);
    }
    if (send.bytes > 0) std::memcpy(receive.target, send.source, send.bytes);
    send.done = receive.done = true;
    changed_.notify_all();
  }

  void fail(Side& side, const std::string& why) {
    side.error = why;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Route, Queues> queues_;
  std::vector<bool> gone_;
};

class MemoryRequest final : public PointToPoint::Request {
 public:
  MemoryRequest(std::shared_ptr<Hub> hub, const Route& route, std::shared_ptr<Side> side)
      : hub_(std::move(hub)), side_(std::move(side)) {
    hub_->post(route, side_);
  }
  ~MemoryRequest() override { hub_->withdraw(*side_, "destroyed"); }

  void wait() override { hub_->wait(*side_); }
  void abort() noexcept override { hub_->withdraw(*side_, "aborted"); }

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Side> side_;
};

class MemoryLink final : public PointToPoint {
 public:
  MemoryLink(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~MemoryLink() override { hub_->leave(rank_); }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return hub_->size(); }

  std::unique_ptr<Request> send(const void* data, size_t bytes, int to, int tag) override {
    return post({rank_, to, tag}, {true, data, nullptr, bytes});
  }
  std::unique_ptr<Request> recv(void* data, size_t bytes, int from, int tag) override {
    return post({from, rank_, tag}, {false, nullptr, data, bytes});
  }

 private:
  std::unique_ptr<Request> post(const Route& route, Side side) {
    return std::make_unique<MemoryRequest>(hub_, route, std::make_shared<Side>(std::move(side)));
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<PointToPoint>> make_memory_links(int size) {
  auto hub = std::make_shared<Hub>(size);
  std::vector<std::shared_ptr<PointToPoint>> links;
  for (int rank = 0; rank < size; ++rank) links.push_back(std::make_shared<MemoryLink>(hub, rank));
  return links;
}

}  // namespace hvdtorch
