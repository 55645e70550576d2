// What becomes of collectives that cannot go on: aborted, left alone by a peer, or mismatched.
#include <atomic>
#include <future>
#include <thread>

#include "check.h"
#include "simulated_job.h"

namespace hvdtorch::test {
namespace {

using Body = std::function<void(Transport&)>;

// Each blocks for ever on rank 0 when rank 1 takes no part.
const std::vector<Body> kBlocking = {
    [](Transport& transport) {
      Bytes data(64);
      transport.allreduce({DataType::kUInt8, ReduceOp::kSum}, data.data(), 64);
    },
    [](Transport& transport) {
      Bytes data(100000);
      transport.allreduce({DataType::kUInt8, ReduceOp::kSum}, data.data(), 100000);
    },
    [](Transport& transport) {
      Bytes in(20000), out(10000);
      transport.reduce_scatter({DataType::kUInt8, ReduceOp::kSum}, in.data(), out.data(),
                               {10000, 10000});
    },
    [](Transport& transport) {
      Bytes in(10), out(20);
      transport.allgather(in.data(), out.data(), {10, 10});
    },
    [](Transport& transport) {
      Bytes data(10);
      transport.broadcast(data.data(), 10, 1);
    },
    [](Transport& transport) {
      Bytes in(20), out(20);
      transport.alltoall(in.data(), {10, 10}, out.data(), {10, 10});
    },
    [](Transport& transport) { transport.barrier(); },
};

const Case aborted("abort() from another thread ends a blocked collective with its reason", [] {
  for (Medium medium : kMedia) {
    for (const Body& body : kBlocking) {
      Job job(2, medium);
      Transport& transport = *job.transports[0];
      std::promise<void> started;
      auto blocked = std::async(std::launch::async, [&] {
        started.set_value();
        return check_throws<TransportError>([&] { body(transport); });
      });
      started.get_future().wait();
      transport.abort("rank 1 was lost");
      transport.abort("a later reason");
      check_eq(blocked.get(), std::string("rank 1 was lost"));
      for (const Body& later : kBlocking) {
        check_eq(check_throws<TransportError>([&] { later(transport); }),
                 std::string("rank 1 was lost"));
      }
    }
  }
});

// abort() at any moment of running collectives: what the thread sanitizer is to look at.
const Case racing("abort() at any time, of ranks that are busy", [] {
  for (int round = 0; round < 80; ++round) {
    Job job(3, kMedia[round % 2]);
    std::atomic<int> rounds{0};
    std::jthread aborter([&](const std::stop_token& stop) {
      while (rounds < 3 * round && !stop.stop_requested()) std::this_thread::yield();
      for (auto& transport : job.transports) transport->abort("stop");
    });
    job.run([&](Transport& transport) {
      Bytes data(6000);
      const std::string why = check_throws<TransportError>([&] {
        for (;;) {
          ++rounds;
          transport.allreduce({DataType::kInt16, ReduceOp::kSum}, data.data(), 3000);
          transport.broadcast(data.data(), 3000, 2);
        }
      });
      check_eq(why, std::string("stop"));
    });
  }
});

const Case vanished("a peer that vanishes fails the collective, and all later ones alike", [] {
  for (const Body& body : kBlocking) {
    Job job(2, Medium::kLinks);
    Transport& transport = *job.transports[0];
    auto blocked = std::async(
        std::launch::async, [&] { return check_throws<TransportError>([&] { body(transport); }); });
    job.transports[1].reset();
    job.links[1].reset();
    const std::string why = blocked.get();
    check_eq(why, std::string("rank 1 is gone"));
    check_eq(check_throws<TransportError>([&] { transport.barrier(); }), why);
  }
});

const Case mismatch("lengths that differ fail on both ranks", [] {
  Job job(2, Medium::kLinks);
  job.run([](Transport& transport) {
    Bytes data(20);
    const int64_t length = 10 + transport.rank();
    const std::string why = check_throws<TransportError>(
        [&] { transport.allreduce({DataType::kUInt8, ReduceOp::kSum}, data.data(), length); });
    check_contains(why, "bytes were sent");
  });
});

}  // namespace
}  // namespace hvdtorch::test
