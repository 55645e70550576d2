// What host collectives need from a network: tagged sends and receives of byte spans.
// Implemented over c10d's Gloo backend (bind/gloo_link.cc) and in memory for tests.
#pragma once

#include <cstddef>
#include <memory>

namespace hvdtorch {

class PointToPoint {
 public:
  // One outstanding send or receive. Destroying it without wait() is allowed only after a failure.
  class Request {
   public:
    virtual ~Request() = default;
    virtual void wait() = 0;            // blocks; throws TransportError on failure or abort
    virtual void abort() noexcept = 0;  // any thread; makes wait() throw TransportError
  };

  virtual ~PointToPoint() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  // Messages between one pair with one tag arrive in order and must match in length.
  virtual std::unique_ptr<Request> send(const void* data, size_t bytes, int to, int tag) = 0;
  virtual std::unique_ptr<Request> recv(void* data, size_t bytes, int from, int tag) = 0;
};

}  // namespace hvdtorch
