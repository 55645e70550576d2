// Every level's collectives are called in the same order on all ranks that take part in them. A
// rank that is no leader sees the local steps of an operation only.
#include "transport/hierarchical.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "transport/staged_allreduce.h"

namespace hvdtorch {
namespace {

constexpr int kLeader = 0;  // in every local transport
constexpr int64_t kStageMultiple = 64;

// Who is where. Hosts are numbered by their leaders' ranks.
struct HostLayout {
  HostLayout(const std::vector<int>& hosts, int rank) {
    std::vector<int> seen;
    for (int r = 0; r < static_cast<int>(hosts.size()); ++r) {
      const auto it = std::find(seen.begin(), seen.end(), hosts[r]);
      host_of.push_back(static_cast<int>(it - seen.begin()));
      if (it == seen.end()) {
        seen.push_back(hosts[r]);
        members.emplace_back();
      }
      local_rank_of.push_back(static_cast<int>(members[host_of[r]].size()));
      members[host_of[r]].push_back(r);
    }
    own = host_of[rank];
    by_rank = std::is_sorted(host_of.begin(), host_of.end());
  }
  int hosts() const { return static_cast<int>(members.size()); }

  std::vector<std::vector<int>> members;  // by host: ranks, ascending
  std::vector<int> host_of, local_rank_of;
  int own;       // this rank's host
  bool by_rank;  // ranks host by host are all ranks in order
};

class Hierarchical final : public Transport {
 public:
  Hierarchical(HostLayout layout, std::shared_ptr<Transport> local,
               std::shared_ptr<HostCollectives> cross, std::shared_ptr<Transport> flat,
               const HierarchicalSizes& sizes)
      : layout_(std::move(layout)),
        local_(std::move(local)),
        cross_(std::move(cross)),
        flat_(std::move(flat)),
        sizes_(sizes) {}

  const char* name() const noexcept override { return "hierarchical"; }
  int rank() const noexcept override { return flat_->rank(); }
  int size() const noexcept override { return flat_->size(); }

  void allreduce(const Reduction& reduction, void* data, int64_t count) override;
  void allgather(const void* in, void* out, const std::vector<int64_t>& bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void barrier() override;

  void adasum(const Reduction& reduction, void* data, const std::vector<Span>& tensors) override {
    run([&] { flat_->adasum(reduction, data, tensors); });
  }
  void alltoall(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                const std::vector<int64_t>& recv_bytes) override {
    run([&] { flat_->alltoall(in, send_bytes, out, recv_bytes); });
  }
  void reduce_scatter(const Reduction& reduction, const void* in, void* out,
                      const std::vector<int64_t>& counts) override {
    run([&] { flat_->reduce_scatter(reduction, in, out, counts); });
  }

  void abort(const std::string& why) noexcept override;

 private:
  bool leads() const { return cross_ != nullptr; }

  template <typename Body>
  void run(Body&& body);
  template <typename Body>
  void step(const char* name, Body&& body);

  void allreduce_whole(const Reduction& reduction, std::byte* data, int64_t count);
  void allreduce_staged(const Reduction& reduction, std::byte* data, int64_t count);
  void reduce_to_leader(const Reduction& reduction, const void* mine, void* partial, int64_t count);
  void hand_out(void* data, int64_t bytes);
  std::byte* scratch(int64_t bytes);

  const HostLayout layout_;
  const std::shared_ptr<Transport> local_;
  const std::shared_ptr<HostCollectives> cross_;  // leaders only
  const std::shared_ptr<Transport> flat_;
  const HierarchicalSizes sizes_;
  std::vector<std::byte> scratch_;
  std::string step_;  // "": flat
  std::mutex mutex_;
  std::optional<std::string> why_;  // aborted
};

// --- failures ---

void Hierarchical::abort(const std::string& why) noexcept {
  std::string first;
  {
    std::lock_guard lock(mutex_);
    if (!why_) why_ = why;
    first = *why_;
  }
  if (cross_) cross_->abort(first);
  local_->abort(first);
  flat_->abort(first);
}

// Every collective runs in here: what goes wrong at one level must end the others, and the text
// that the caller gets is that of abort(), if it was first.
template <typename Body>
void Hierarchical::run(Body&& body) {
  step_.clear();
  try {
    {
      std::lock_guard lock(mutex_);
      if (why_) throw TransportError(*why_);
    }
    body();
  } catch (const std::exception& error) {
    abort(step_.empty() ? error.what() : step_ + ": " + error.what());
    std::lock_guard lock(mutex_);
    throw TransportError(*why_);
  }
}

// A step may have steps in it: the name that stays is that of the innermost that failed.
template <typename Body>
void Hierarchical::step(const char* name, Body&& body) {
  std::string outer = std::exchange(step_, name);
  body();
  step_ = std::move(outer);
}

// --- allreduce ---

void Hierarchical::allreduce(const Reduction& reduction, void* data, int64_t count) {
  run([&] {
    if (count == 0) return;
    const auto partial = partial_type(reduction);
    if (!partial) {
      flat_->allreduce(reduction, data, count);
    } else if (count * size_of(*partial) <= sizes_.whole) {
      allreduce_whole(reduction, static_cast<std::byte*>(data), count);
    } else {
      allreduce_staged(reduction, static_cast<std::byte*>(data), count);
    }
  });
}

// Leader: partial = the reduction of what the ranks of this host have. Others may give any pointer.
void Hierarchical::reduce_to_leader(const Reduction& reduction, const void* mine, void* partial,
                                    int64_t count) {
  step("reducing on this host", [&] {
    const Reduction combining = combine_partials(reduction);
    if (combining.dtype != reduction.dtype || reduction.prescale != 1.0) {
      void* const own = leads() ? partial : scratch(count * size_of(combining.dtype));
      reduce_partial(reduction, own, &mine, 1, count);
      mine = own;
    }
    if (local_->size() == 1) return;  // partial is, or already holds, what `mine` does
    std::vector<int64_t> counts(local_->size(), 0);
    counts[kLeader] = count;
    local_->reduce_scatter(combining, mine, partial, counts);
  });
}

void Hierarchical::hand_out(void* data, int64_t bytes) {
  if (bytes == 0) return;
  step("handing the result out on this host", [&] { local_->broadcast(data, bytes, kLeader); });
}

// 2 local steps and one between the hosts; a leader sends n (H-1) bytes, H being the hosts.
void Hierarchical::allreduce_whole(const Reduction& reduction, std::byte* data, int64_t count) {
  const Reduction combining = combine_partials(reduction);
  const bool in_data = combining.dtype == reduction.dtype;
  std::byte* const partial = in_data || !leads() ? data : scratch(count * size_of(combining.dtype));
  reduce_to_leader(reduction, data, partial, count);
  if (leads()) {
    step("exchanging between the hosts", [&] {
      cross_->allreduce(in_data ? without_prescale(reduction) : combining, partial, count);
    });
    if (!in_data) finish_partial(reduction, data, partial, count);
  }
  hand_out(data, count * size_of(reduction.dtype));
}

// The local steps of one stage overlap with the transfers of its neighbours (staged_allreduce.h). A
// leader sends 2 n (H-1) / H bytes.
void Hierarchical::allreduce_staged(const Reduction& reduction, std::byte* data, int64_t count) {
  const int64_t element = size_of(reduction.dtype);
  const int64_t share = sizes_.share / size_of(combine_partials(reduction).dtype);
  const int64_t least = std::max<int64_t>(1, share / kStageMultiple);
  const Stages stages(count, least * kStageMultiple * layout_.hosts());
  const auto start = [&](const Span& stage, void* partial) {
    reduce_to_leader(reduction, data + stage.offset * element, partial, stage.count);
  };
  const auto finish = [&](const Span& stage) {
    hand_out(data + stage.offset * element, stage.count * element);
  };
  if (leads()) {
    step("exchanging between the hosts",
         [&] { cross_->allreduce_in_stages({reduction, data, stages, start, finish}); });
  } else {
    stages.run([&](int64_t i) { start(stages[i], data); }, [](int64_t) {},
               [&](int64_t i) { finish(stages[i]); });
  }
}

std::byte* Hierarchical::scratch(int64_t bytes) {
  if (static_cast<int64_t>(scratch_.size()) < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

// --- data movement ---

// The ranks of the root's host have the data from the root itself, all others from their leader.
void Hierarchical::broadcast(void* data, int64_t bytes, int root) {
  run([&] {
    if (bytes == 0) return;
    const int host = layout_.host_of[root], local_root = layout_.local_rank_of[root];
    const auto inside = [&] {
      if (layout_.own != host) return hand_out(data, bytes);
      step("broadcasting on this host", [&] { local_->broadcast(data, bytes, local_root); });
    };
    // The leader needs it first, but the transfer between the hosts should not wait for others.
    const bool leader_has_it = layout_.own != host || local_root == kLeader;
    if (!leader_has_it) inside();
    if (leads()) {
      step("broadcasting between the hosts", [&] { cross_->broadcast(data, bytes, host); });
    }
    if (leader_has_it) inside();
  });
}

// Gathered host by host: first the parts of this host, then those of the others.
void Hierarchical::allgather(const void* in, void* out, const std::vector<int64_t>& bytes) {
  run([&] {
    const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    if (total == 0) return;
    std::vector<int64_t> of_host(layout_.hosts(), 0), of_member;
    for (int r = 0; r < size(); ++r) of_host[layout_.host_of[r]] += bytes[r];
    for (int r : layout_.members[layout_.own]) of_member.push_back(bytes[r]);
    const int64_t before =
        std::accumulate(of_host.begin(), of_host.begin() + layout_.own, int64_t{0});
    const int64_t after = before + of_host[layout_.own];

    std::byte* const gathered = layout_.by_rank ? static_cast<std::byte*>(out) : scratch(total);
    step("gathering on this host", [&] { local_->allgather(in, gathered + before, of_member); });
    if (leads()) {
      step("gathering between the hosts",
           [&] { cross_->allgather(gathered + before, gathered, of_host); });
    }
    hand_out(gathered, before);
    hand_out(gathered + after, total - after);
    if (layout_.by_rank) return;

    std::vector<int64_t> place(size());
    std::exclusive_scan(bytes.begin(), bytes.end(), place.begin(), int64_t{0});
    const std::byte* from = gathered;
    for (const std::vector<int>& ranks : layout_.members) {
      for (int r : ranks) {
        if (bytes[r] > 0) std::memcpy(static_cast<std::byte*>(out) + place[r], from, bytes[r]);
        from += bytes[r];
      }
    }
  });
}

// All of this host are here; all hosts are; all may go.
void Hierarchical::barrier() {
  run([&] {
    step("meeting on this host", [&] { local_->barrier(); });
    if (leads()) step("meeting between the hosts", [&] { cross_->barrier(); });
    step("meeting on this host", [&] { local_->barrier(); });
  });
}

}  // namespace

std::shared_ptr<Transport> make_hierarchical(const std::vector<int>& hosts,
                                             std::shared_ptr<Transport> local,
                                             std::shared_ptr<HostCollectives> cross,
                                             std::shared_ptr<Transport> flat,
                                             const HierarchicalSizes& sizes) {
  HostLayout layout(hosts, flat->rank());
  return std::make_shared<Hierarchical>(std::move(layout), std::move(local), std::move(cross),
                                        std::move(flat), sizes);
}

}  // namespace hvdtorch
