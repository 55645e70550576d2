// What becomes of hierarchical collectives that cannot go on, whichever step they are in.
#include <atomic>
#include <future>
#include <thread>

#include "check.h"
#include "simulated_hosts.h"

namespace hvdtorch::test {
namespace {

using Body = std::function<void(Transport&)>;

constexpr int64_t kShort = 100, kLong = 9000;  // crosses whole, in stages

void allreduce(Transport& transport, int64_t bytes) {
  Bytes data(bytes);
  transport.allreduce({DataType::kUInt8, ReduceOp::kSum}, data.data(), bytes);
}

// Each blocks for ever on some rank when another takes no part.
const std::vector<Body> kBlocking = {
    [](Transport& transport) { allreduce(transport, kShort); },
    [](Transport& transport) { allreduce(transport, kLong); },
    [](Transport& transport) {
      Bytes in(10), out(10 * transport.size());
      transport.allgather(in.data(), out.data(), std::vector<int64_t>(transport.size(), 10));
    },
    [](Transport& transport) { transport.barrier(); },
};

const std::vector<int> kHosts = {0, 1, 0, 1};  // leaders are ranks 0 and 1

// Ranks 0 and 2 share a host, 1 and 3 the other. Who stays away decides where the others block.
const Case aborted("abort() ends a collective that is blocked at any level, with its reason", [] {
  for (const Body& body : kBlocking) {
    for (int away = 0; away < 8; ++away) {
      HostedJob job(kHosts, kMedia[away / 4]);
      std::vector<std::future<std::string>> blocked;
      std::atomic<int> started{0};
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == away % 4) continue;
        blocked.push_back(std::async(std::launch::async, [&, rank] {
          ++started;
          return check_throws<TransportError>([&] {
            for (;;) body(*job.transports[rank]);
          });
        }));
      }
      while (started < 3) std::this_thread::yield();
      for (auto& transport : job.transports) {
        transport->abort("rank 7 was lost");
        transport->abort("a later reason");
      }
      for (auto& rank : blocked) check_eq(rank.get(), std::string("rank 7 was lost"));
      for (const Body& later : kBlocking) {
        for (auto& transport : job.transports) {
          check_eq(check_throws<TransportError>([&] { later(*transport); }),
                   std::string("rank 7 was lost"));
        }
      }
    }
  }
});

const Case racing("abort() at any time, of ranks that are busy", [] {
  for (int round = 0; round < 40; ++round) {
    HostedJob job(kHosts, kMedia[round % 2]);
    std::atomic<int> rounds{0};
    std::jthread aborter([&](const std::stop_token& stop) {
      while (rounds < 7 * round && !stop.stop_requested()) std::this_thread::yield();
      for (auto& transport : job.transports) transport->abort("stop");
    });
    job.run([&](Transport& transport) {
      const std::string why = check_throws<TransportError>([&] {
        for (;;) {
          ++rounds;
          allreduce(transport, kLong);
          Bytes data(3000);
          transport.broadcast(data.data(), 3000, 2);
        }
      });
      check_eq(why, std::string("stop"));
    });
  }
});

// A failure that nobody announced: the text names the step, and the other levels end too.
std::string failure_of(HostedJob& job, int rank, const Body& body) {
  auto blocked = std::async(std::launch::async, [&] {
    return check_throws<TransportError>([&] { body(*job.transports[rank]); });
  });
  const std::string why = blocked.get();
  for (const Body& later : kBlocking) {
    check_eq(check_throws<TransportError>([&] { later(*job.transports[rank]); }), why);
  }
  check_eq(check_throws<TransportError>([&] { job.flat[rank]->barrier(); }), why);
  return why;
}

const Case local_failure("a rank of this host that vanishes fails the local step by name", [] {
  for (int64_t bytes : {kShort, kLong}) {
    HostedJob job(kHosts);
    job.kill(2);
    check_eq(failure_of(job, 0, [&](Transport& transport) { allreduce(transport, bytes); }),
             std::string("reducing on this host: rank 2 is gone"));
  }
});

const Case cross_failure("a leader that vanishes fails the step between the hosts by name", [] {
  for (int64_t bytes : {kShort, kLong}) {
    HostedJob job({0, 1, 1});
    job.kill(1);
    check_eq(failure_of(job, 0, [&](Transport& transport) { allreduce(transport, bytes); }),
             std::string("exchanging between the hosts: rank 1 is gone"));
    check_eq(failure_of(job, 2, [&](Transport& transport) { allreduce(transport, bytes); }),
             std::string("reducing on this host: rank 1 is gone"));
  }
});

const Case flat_failure("a failure of a flat collective is told as it is", [] {
  HostedJob job({0, 1, 1});
  job.kill(1);
  check_eq(failure_of(job, 0,
                      [](Transport& transport) {
                        Bytes in(30), out(10);
                        transport.reduce_scatter({DataType::kUInt8, ReduceOp::kSum}, in.data(),
                                                 out.data(), {10, 10, 10});
                      }),
           std::string("rank 1 is gone"));
});

}  // namespace
}  // namespace hvdtorch::test
