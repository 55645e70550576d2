#include "bind/gloo_link.h"

#include <ATen/ops/from_blob.h>

#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace hvdtorch {
namespace {

class GlooRequest final : public PointToPoint::Request {
 public:
  GlooRequest(c10::intrusive_ptr<c10d::Work> work, int peer, bool sending)
      : work_(std::move(work)), peer_(peer), sending_(sending) {}

  void wait() override {
    bool finished = false;
    try {
      finished = work_->wait();
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    }
    if (!finished) fail("aborted");
  }

  void abort() noexcept override {
    try {
      work_->abort();
    } catch (const std::exception&) {  // it failed already: wait() will tell
    }
  }

 private:
  [[noreturn]] void fail(std::string why) const {
    why = why.substr(0, why.find('\n'));
    throw TransportError(std::string(sending_ ? "sending to" : "receiving from") + " rank " +
                         std::to_string(peer_) + " failed: " + why);
  }

  c10::intrusive_ptr<c10d::Work> work_;
  int peer_;
  bool sending_;
};

class GlooLink final : public PointToPoint {
 public:
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  int rank() const noexcept override { return backend_->getRank(); }
  int size() const noexcept override { return backend_->getSize(); }

  std::unique_ptr<Request> send(const void* data, size_t bytes, int to, int tag) override {
    auto span = spans(const_cast<void*>(data), bytes);
    return start(to, true, [&] { return backend_->send(span, to, tag); });
  }
  std::unique_ptr<Request> recv(void* data, size_t bytes, int from, int tag) override {
    auto span = spans(data, bytes);
    return start(from, false, [&] { return backend_->recv(span, from, tag); });
  }

 private:
  static std::vector<at::Tensor> spans(void* data, size_t bytes) {
    return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte))};
  }

  template <typename Call>
  static std::unique_ptr<Request> start(int peer, bool sending, Call&& call) {
    try {
      return std::make_unique<GlooRequest>(call(), peer, sending);
    } catch (const c10::Error& error) {
      throw TransportError("rank " + std::to_string(peer) + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw TransportError("rank " + std::to_string(peer) + ": " + error.what());
    }
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

std::shared_ptr<PointToPoint> make_gloo_link(c10::intrusive_ptr<c10d::Backend> backend) {
  return std::make_shared<GlooLink>(std::move(backend));
}

}  // namespace hvdtorch
