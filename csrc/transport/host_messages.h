// What the files of HostCollectives share: spans of bytes, tags, the messages of a running
// collective, and the frame that every collective runs in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <utility>

#include "transport/host_collectives.h"

namespace hvdtorch {

// A tag is 2 * (number of the collective, modulo kCalls) + phase. A rank can be one collective
// ahead of another, never more than a few, so that a number is long out of use when it comes again.
inline constexpr int kPhases = 2;
inline constexpr int kCalls = HostCollectives::kTags / kPhases;
inline constexpr int kFirstPhase = 0;   // contributions, scattered slices, all of one phase
inline constexpr int kSecondPhase = 1;  // results, slices passed on

struct ByteSpan {
  std::byte* data;
  int64_t bytes;
};

// Posted messages of the running collective, which are waited for in order of posting. Those that
// were not waited for, after a failure, are aborted before the memory they use can go. Messages of
// no bytes are not sent: both sides know the length.
class HostCollectives::Messages {
 public:
  explicit Messages(HostCollectives& owner) : owner_(owner) {}
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;
  ~Messages() {
    for (auto& request : posted_) {
      request->abort();
      owner_.live_.remove(request.get());
    }
  }

  void send(const ByteSpan& span, int to, int phase) {
    if (span.bytes > 0) keep(owner_.link_->send(span.data, span.bytes, to, owner_.tag_ + phase));
  }
  void recv(const ByteSpan& span, int from, int phase) {
    if (span.bytes > 0) keep(owner_.link_->recv(span.data, span.bytes, from, owner_.tag_ + phase));
  }

  void wait_for_first() {
    posted_.front()->wait();
    owner_.live_.remove(posted_.front().get());
    posted_.pop_front();
  }
  void wait() {
    while (!posted_.empty()) wait_for_first();
  }

 private:
  void keep(std::unique_ptr<PointToPoint::Request> request) {
    posted_.push_back(std::move(request));
    owner_.live_.add(posted_.back().get());
  }

  HostCollectives& owner_;
  std::deque<std::unique_ptr<PointToPoint::Request>> posted_;
};

// Every collective runs in here. Whatever goes wrong in it is the end of this transport: peers are
// left in the middle of the collective, so no later message could be told from a lost one.
template <typename Body>
void HostCollectives::run(Body&& body) {
  live_.throw_if_aborted();
  tag_ = (tag_ + kPhases) % (kCalls * kPhases);
  try {
    body();
  } catch (const std::exception& error) {
    live_.abort(error.what());
  }
  live_.throw_if_aborted();
}

}  // namespace hvdtorch
