// Shared memory: segments, the arena, the ranks of a host, and what the transport makes of them
// beyond what every transport must do (collectives_test.cc). Also between real processes.
#include "transport/shared_memory.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <random>

#include "check.h"
#include "simulated_job.h"

namespace hvdtorch::test {
namespace {

// --- segments ---

const Case segments("a segment is one memory, however it was opened", [] {
  const auto made = Segment::create(8192, "test");
  const auto opened = Segment::open(getpid(), made->fd(), 8192, "test");
  check(made->data() != opened->data());
  std::memcpy(made->data() + 5000, "hello", 5);
  check_eq(std::memcmp(opened->data() + 5000, "hello", 5), 0);
  check_eq(opened->fd(), -1);
});

const Case strangers("what is not the segment asked for is refused, with the reason", [] {
  const auto made = Segment::create(8192, "test");
  const auto open = [](int pid, int fd, size_t bytes) {
    return check_throws<SharedMemoryError>([&] { Segment::open(pid, fd, bytes, "memory of x"); });
  };
  check_contains(open(getpid(), made->fd(), 4096), "is something else");
  check_contains(open(getpid(), 999999, 4096), "memory of x: opening /proc/");
  check_contains(open(0x7ffffff0, 3, 4096), "No such file");
  check_contains(check_throws<SharedMemoryError>([] { Segment::create(size_t{1} << 60, "much"); }),
                 "much: ");
  const auto group = HostGroup::create(2);
  HostGroup::Address address = group->address();
  ++address.nonce;
  check_contains(check_throws<SharedMemoryError>([&] { HostGroup::open(1, 2, address); }),
                 "is another one here");
});

// --- the arena ---

const Case blocks("blocks are aligned, apart, reused and given back", [] {
  const auto groups = make_host_groups(1);
  SharedArena& arena = groups[0]->arena();
  std::mt19937 random(7);
  std::vector<std::pair<std::shared_ptr<std::byte>, int64_t>> held;
  for (int round = 0; round < 3000; ++round) {
    if (held.size() > 40 || (!held.empty() && random() % 2 == 0)) {
      const size_t victim = random() % held.size();
      const auto& [block, bytes] = held[victim];
      const auto fill = static_cast<std::byte>(bytes % 251);
      check(std::all_of(block.get(), block.get() + bytes, [&](std::byte b) { return b == fill; }),
            "another block's writes");
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
      continue;
    }
    const auto bytes = static_cast<int64_t>(random() % 300000);
    auto block = arena.allocate(bytes);
    check_eq(reinterpret_cast<uintptr_t>(block.get()) % 64, uintptr_t{0});
    check(arena.place_of(block.get(), bytes).has_value());
    std::fill_n(block.get(), bytes, static_cast<std::byte>(bytes % 251));
    held.emplace_back(std::move(block), bytes);
  }
  held.clear();
  // All of it is one hole again: the largest block that ever fitted fits where the first one was.
  const auto first = arena.allocate(1);
  const auto* begin = first.get();
  check_eq(static_cast<const void*>(arena.allocate(1).get()), static_cast<const void*>(begin + 64));
});

const Case places("bytes that are not wholly in the arena have no place there", [] {
  const auto groups = make_host_groups(1);
  SharedArena& arena = groups[0]->arena();
  const auto block = arena.allocate(4 << 20);  // a whole region
  const auto place = arena.place_of(block.get() + 128, 64);
  check(place && place->offset == 128);
  check(!arena.place_of(block.get() + 128, 4 << 20));
  check(!arena.place_of(block.get() - 1, 1));
  const int local = 0;
  check(!arena.place_of(&local, sizeof local));
});

const Case remapped("a region that took another's place is mapped anew", [] {
  const auto groups = make_host_groups(2);
  SharedArena& arena = groups[0]->arena();
  const auto kept = arena.allocate(4 << 20);
  for (int round = 0; round < 5; ++round) {
    // Two unused regions at a time: one of them is withdrawn.
    auto big = arena.allocate((8 << 20) + round * 4096);
    std::memset(big.get(), round + 1, 4096);
    const auto place = arena.place_of(big.get(), 4096);
    const std::byte* theirs = groups[1]->at(0, *place);
    check_eq(static_cast<int>(theirs[100]), round + 1);
    auto bigger = arena.allocate((40 << 20) + round * 4096);
    big.reset();
    bigger.reset();
  }
  SharedArena::Place gone = *arena.place_of(kept.get(), 1);
  gone.region += 1000;
  check_contains(check_throws<SharedMemoryError>([&] { groups[1]->at(0, gone); }), "withdrawn");
});

const Case outlived("blocks outlive their group", [] {
  std::shared_ptr<std::byte> block;
  {
    const auto groups = make_host_groups(2);
    block = groups[1]->arena().allocate(100000);
  }
  std::memset(block.get(), 1, 100000);
});

// --- the transport, with data in the arena ---

template <typename T>
std::shared_ptr<T> in_arena(HostGroup& group, int64_t count) {
  const auto block = group.arena().allocate(count * static_cast<int64_t>(sizeof(T)));
  return {block, reinterpret_cast<T*>(block.get())};
}

const Case direct("allreduce of tensors in the arena, of all, some, or no ranks", [] {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int shared = 0; shared < 1 << ranks; ++shared) {
      Job job(ranks, Medium::kSharedMemory);
      job.run([&](Transport& transport) {
        const int rank = transport.rank();
        for (int64_t count : {1, 127, 128, 129, 130, 255, 257, 1000, 4999}) {
          std::vector<float> own(static_cast<size_t>(count));
          auto block = in_arena<float>(*job.groups[rank], count + 3);
          // Also at an odd place in it.
          float* data = (shared >> rank & 1) != 0 ? block.get() + count % 3 : own.data();
          for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>((rank + 1) * i);
          transport.allreduce({DataType::kFloat32, ReduceOp::kSum}, data, count);
          for (int64_t i = 0; i < count; ++i) {
            check_eq(data[i], static_cast<float>(ranks * (ranks + 1) / 2 * i));
          }
        }
      });
    }
  }
});

const Case scattered("reduce_scatter of tensors in the arena leaves them as they are", [] {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    Job job(ranks, Medium::kSharedMemory);
    job.run([&](Transport& transport) {
      const int rank = transport.rank();
      std::vector<int64_t> counts;
      for (int r = 0; r < ranks; ++r) counts.push_back(r * 700);
      const int64_t total = 700 * ranks * (ranks - 1) / 2, begin = 700 * rank * (rank - 1) / 2;
      const auto block = in_arena<int32_t>(*job.groups[rank], total);
      for (int64_t i = 0; i < total; ++i) block.get()[i] = static_cast<int32_t>(i * (rank + 1));
      std::vector<int32_t> out(static_cast<size_t>(counts[rank]));
      transport.reduce_scatter({DataType::kInt32, ReduceOp::kSum}, block.get(), out.data(), counts);
      for (size_t i = 0; i < out.size(); ++i) {
        check_eq(out[i],
                 static_cast<int32_t>((begin + static_cast<int64_t>(i)) * ranks * (ranks + 1) / 2));
      }
      transport.barrier();
      for (int64_t i = 0; i < total; ++i)
        check_eq(block.get()[i], static_cast<int32_t>(i * (rank + 1)));
    });
  }
});

const Case subsets("transports of subsets, at the same time, again and again", [] {
  const auto groups = make_host_groups(4);
  const std::vector<std::vector<int>> sets = {{0, 1, 2, 3}, {1, 3}, {0, 2, 3}, {1, 2}};
  run_ranks(4, [&](int rank) {
    for (uint64_t round = 1; round <= 10; ++round) {
      std::vector<std::future<void>> running;
      for (size_t s = 0; s < sets.size(); ++s) {
        if (std::find(sets[s].begin(), sets[s].end(), rank) == sets[s].end()) continue;
        running.push_back(std::async(std::launch::async, [&, s] {
          SharedMemoryTransport transport(groups[rank], sets[s], 100 * round + s, kSmallStage);
          std::vector<int32_t> data(900);
          for (int i = 0; i < 5; ++i) {
            std::fill(data.begin(), data.end(), rank + 1);
            transport.allreduce({DataType::kInt32, ReduceOp::kSum}, data.data(), 900);
            int32_t sum = 0;
            for (int member : sets[s]) sum += member + 1;
            check_eq(data[899], sum);
          }
        }));
      }
      for (auto& each : running) each.get();
    }
  });
});

const Case late("a rank that comes late is waited for, and no longer than allowed", [] {
  SharedMemoryOptions options = kSmallStage;
  options.limit = std::chrono::milliseconds(50);
  Job job(2, Medium::kSharedMemory, kSmall, options);
  auto second = std::async(std::launch::async, [&] {
    int32_t one = 1;
    job.transports[1]->allreduce({DataType::kInt32, ReduceOp::kSum}, &one, 1);
    return one;
  });
  int32_t two = 2;
  job.transports[0]->allreduce({DataType::kInt32, ReduceOp::kSum}, &two, 1);
  check_eq(second.get() + two, 6);
  check_contains(check_throws<TransportError>([&] { job.transports[0]->barrier(); }),
                 "operation timeout");
});

// --- real processes ---

// body() in a child process; returns its pid. The child ends without running what this process has
// registered for its own end.
template <typename Body>
pid_t in_child(Body&& body) {
  const pid_t pid = fork();
  check(pid >= 0, "cannot fork");  // kill(-1) would reach every process
  if (pid != 0) return pid;
  int status = 1;
  try {
    body();
    status = 0;
  } catch (const std::exception& error) {
    [[maybe_unused]] const auto n = write(STDERR_FILENO, error.what(), std::strlen(error.what()));
  }
  _exit(status);
}

const Case processes("ranks that are processes of their own; one is killed in a collective", [] {
  const auto group = HostGroup::create(2);
  const HostGroup::Address address = group->address();
  const pid_t child = in_child([&] {
    const auto own = HostGroup::open(1, 2, address);
    SharedMemoryTransport transport(own, {0, 1}, 77, {});
    const auto block = in_arena<float>(*own, 1 << 20);
    for (int round = 0;; ++round) {  // until it is killed
      std::fill_n(block.get(), 1 << 20, static_cast<float>(round));
      transport.allreduce({DataType::kFloat32, ReduceOp::kSum}, block.get(), 1 << 20);
    }
  });
  SharedMemoryTransport transport(group, {0, 1}, 77, {});
  const auto block = in_arena<float>(*group, 1 << 20);
  for (int round = 0; round < 20; ++round) {
    std::fill_n(block.get(), 1 << 20, 1.0f);
    transport.allreduce({DataType::kFloat32, ReduceOp::kSum}, block.get(), 1 << 20);
    check_eq(block.get()[round], static_cast<float>(round + 1));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  auto blocked = std::async(std::launch::async, [&] {
    return check_throws<TransportError>([&] {
      for (;;) transport.barrier();
    });
  });
  transport.abort("rank 1 was killed");
  check_eq(blocked.get(), std::string("rank 1 was killed"));
});

const Case forked("a forked child may let go of blocks without harm to the parent's", [] {
  const auto groups = make_host_groups(2);
  auto block = groups[0]->arena().allocate(100000);
  std::memset(block.get(), 1, 100000);
  const auto place = *groups[0]->arena().place_of(block.get(), 100000);
  const pid_t child = in_child([&] { block.reset(); });
  int status = 0;
  waitpid(child, &status, 0);
  check_eq(status, 0);
  check_eq(static_cast<int>(groups[1]->at(0, place)[99999]), 1);
});

}  // namespace
}  // namespace hvdtorch::test
