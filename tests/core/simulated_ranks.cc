// How simulated ranks are wired, and how one is made to die.
#include "simulated_ranks.h"

#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "channel/local.h"
#include "channel/tcp.h"
#include "rings.h"
#include "transport/sub_link.h"

namespace hvdtorch::test {

std::vector<std::unique_ptr<Channel>> make_channels(Wire wire, int size) {
  if (wire == Wire::kLocal || size == 1) return make_local_channels(size);
  const Rings rings = make_rings(size);
  const auto make = [&](int rank, const std::vector<int>& fds) {
    return wire == Wire::kRings ? over_rings(rank, fds, rings) : make_tcp_channel(rank, fds);
  };
  std::vector<std::unique_ptr<Channel>> channels(size);
  std::vector<int> fds = {-1};
  for (int rank = 1; rank < size; ++rank) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    fds.push_back(ends[0]);
    channels[rank] = make(rank, {ends[1]});
  }
  channels[0] = make(0, fds);
  return channels;
}

RuntimeOptions quick(int64_t inline_limit) {
  RuntimeOptions options;
  options.inline_limit = inline_limit;
  options.cause_grace = std::chrono::milliseconds(400);
  options.leave_grace = std::chrono::milliseconds(100);
  return options;
}

std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// --- operations -----------------------------------------------------------------------------

Submission::Submission(OpDesc desc, std::string input, std::shared_ptr<Completion> completion)
    : operation_(std::make_shared<Operation>()), memory_(std::make_shared<Memory>()) {
  Memory* memory = memory_.get();
  memory->in = std::move(input);
  operation_->input = memory->in.data();
  if (desc.kind == OpKind::kAllreduce || desc.kind == OpKind::kBroadcast) {
    memory->out.resize(static_cast<size_t>(desc.bytes()));
    operation_->output = memory->out.data();
  }
  const int64_t element = size_of(desc.dtype);
  operation_->allocate = [memory, element](const std::vector<int64_t>& shape) -> void* {
    int64_t bytes = element;
    for (int64_t dim : shape) bytes *= dim;
    memory->out.assign(static_cast<size_t>(bytes), '?');
    return memory->out.data();
  };
  operation_->finish = [memory] { ++memory->finished; };
  operation_->desc = std::make_shared<const OpDesc>(std::move(desc));
  operation_->completion = completion ? std::move(completion) : std::make_shared<Completion>(1);
  operation_->keepalive = memory_;
}

std::string Submission::wait(Runtime* rank) const {
  Completion& completion = *operation_->completion;
  const auto hang = Completion::Clock::now() + kHang;
  if (rank == nullptr) rank = rank_;
  // Once it is complete, the rank may be gone.
  const auto result =
      rank != nullptr && !completion.done() ? rank->wait(completion, hang) : completion.wait(hang);
  check(result == Completion::WaitResult::kDone, operation_->desc->name + " hangs");
  return completion.error();
}

// --- ranks that die -------------------------------------------------------------------------

// Ends without a word when told to, as the kernel ends a killed process's connections.
class SimulatedRanks::MortalChannel final : public Channel {
 public:
  explicit MortalChannel(std::unique_ptr<Channel> inner) : inner_(std::move(inner)) {}

  void die() {
    std::unique_lock lock(mutex_);
    dying_ = true;
    inner_->wake();
    changed_.wait(lock, [this] { return inner_ == nullptr; });
  }

  // `inner_` is changed by the thread that calls these only, under the mutex.
  void send(int rank, std::string_view frame) override {
    if (inner_) inner_->send(rank, frame);
  }
  std::vector<Event> take() override { return inner_ ? inner_->take() : std::vector<Event>(); }
  void sleep(std::optional<Clock::time_point> deadline) override {
    if (inner_) inner_->sleep(deadline);
    std::unique_lock lock(mutex_);
    if (dying_ && inner_) {
      inner_.reset();
      changed_.notify_all();
    }
    if (inner_) return;
    changed_.wait(lock, [this] { return woken_; });
    woken_ = false;
  }
  void wake() noexcept override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
    if (inner_) inner_->wake();
  }
  void close(std::chrono::milliseconds linger) noexcept override {
    if (inner_) inner_->close(linger);
  }
  void abandon_in_child() noexcept override {}

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Channel> inner_;
  bool dying_ = false;
  bool woken_ = false;
};

// A rank that is killed in the middle of a collective: it takes part, as far as the others can see,
// but never gets anywhere.
class SimulatedRanks::StuckTransport final : public Transport {
 public:
  StuckTransport(int rank, int size) : rank_(rank), size_(size) {}
  const char* name() const noexcept override { return "stuck"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  void allreduce(const Reduction&, void*, int64_t) override { stick(); }
  void adasum(const Reduction&, void*, const std::vector<Span>&) override { stick(); }
  void allgather(const void*, void*, const std::vector<int64_t>&) override { stick(); }
  void broadcast(void*, int64_t, int) override { stick(); }
  void alltoall(const void*, const std::vector<int64_t>&, void*,
                const std::vector<int64_t>&) override {
    stick();
  }
  void reduce_scatter(const Reduction&, const void*, void*, const std::vector<int64_t>&) override {
    stick();
  }
  void barrier() override { stick(); }

  void abort(const std::string& why) noexcept override {
    std::lock_guard lock(mutex_);
    if (!why_) why_ = why;
    changed_.notify_all();
  }

  void wait_until_entered() {
    std::unique_lock lock(mutex_);
    check(changed_.wait_for(lock, kHang, [this] { return entered_; }), "no transfer began");
  }

 private:
  void stick() {
    std::unique_lock lock(mutex_);
    entered_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return why_.has_value(); });
    throw TransportError(*why_);
  }

  const int rank_, size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool entered_ = false;
  std::optional<std::string> why_;
};

// --- the job --------------------------------------------------------------------------------

SimulatedRanks::SimulatedRanks(int size, const Setup& setup)
    : size_(size), links_(make_memory_links(size)), mortal_(size), stuck_(size), ranks_(size) {
  const auto has = [](const std::vector<int>& list, int rank) {
    return std::find(list.begin(), list.end(), rank) != list.end();
  };
  raw_ = make_channels(setup.wire, size);
  for (int rank = 0; rank < size; ++rank) {
    if (has(setup.raw, rank)) continue;
    std::unique_ptr<Channel> channel = std::move(raw_[rank]);
    TransportFactory factory;
    if (has(setup.mortal, rank)) {
      auto wrapped = std::make_unique<MortalChannel>(std::move(channel));
      mortal_[rank] = wrapped.get();
      channel = std::move(wrapped);
      stuck_[rank] = std::make_shared<StuckTransport>(rank, size);
      factory = [stuck = stuck_[rank]](uint32_t, const std::vector<int>&) { return stuck; };
    } else {
      // Small sizes: a few KB take the ways of a few MB.
      const CollectiveSizes sizes{
          .direct_allreduce = 512, .tree_broadcast = 256, .least_chunk = 128, .largest_chunk = 512};
      factory = [this, rank, sizes](uint32_t set, const std::vector<int>& ranks) {
        return std::make_shared<HostCollectives>(
            make_sub_link(links_[rank], ranks, static_cast<int>(set), HostCollectives::kTags),
            sizes);
      };
    }
    RuntimeOptions options = setup.options;
    options.rank = rank;
    options.size = size;
    options.may_spin = rank % 2 == 0;
    for (int r = 0; r < size; ++r) options.hosts.push_back("host" + std::to_string(r));
    ranks_[rank] =
        std::make_unique<Runtime>(std::move(options), std::move(channel), std::move(factory));
  }
}

SimulatedRanks::~SimulatedRanks() { stop(); }

Submission SimulatedRanks::submit(int rank, const OpDesc& desc, std::string input) {
  Submission submission(desc, std::move(input));
  if (mortal_[rank] == nullptr) submission.rank_ = ranks_[rank].get();
  ranks_[rank]->submit({submission.operation()});
  return submission;
}

void SimulatedRanks::stop() {
  std::vector<std::thread> threads;
  for (auto& rank : ranks_) {
    if (rank) threads.emplace_back([&rank] { rank->stop(""); });
  }
  for (std::thread& thread : threads) thread.join();
}

void SimulatedRanks::die(int rank) { mortal_[rank]->die(); }
void SimulatedRanks::cut_link(int rank) { links_[rank].reset(); }
void SimulatedRanks::wait_until_in_transfer(int rank) { stuck_[rank]->wait_until_entered(); }

}  // namespace hvdtorch::test
