// Words. P is the number of ranks. A *step* is one meeting of all of them: each says that it has
// come so far, then waits until all others have. A rank's *stage* has two halves, which take turns.
//
// The one rule that makes this safe: what is written for step s goes into half s mod 2 before the
// step, and is read after it and before the reader's next one. So when a rank has passed step s,
// nobody reads what was written for step s - 1 any more, and the half is free for step s + 1.
//
// Ranks combine values in rank order whoever does it, so all hold identical bits.
#include "transport/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "transport/adasum.h"

namespace hvdtorch {
namespace {

constexpr int64_t kLine = 64;  // bytes: a cache line, and a multiple of every dtype's size

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t align_up(int64_t bytes) { return divide_up(bytes, kLine) * kLine; }

// What is left of `total` from `begin` on, `most` at most.
int64_t length_at(int64_t begin, int64_t total, int64_t most) {
  return std::clamp<int64_t>(total - begin, 0, most);
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets(lengths.size());
  std::exclusive_scan(lengths.begin(), lengths.end(), offsets.begin(), int64_t{0});
  return offsets;
}

// Bytes of half a stage: together the stages should stay in the cache, and a step should be worth
// its price.
int64_t stage_for(int ranks) {
  return std::clamp<int64_t>((4 << 20) / ranks, 128 << 10, 512 << 10);
}

}  // namespace

// What a rank tells the others with a step, besides what is in its stage.
struct SharedMemoryTransport::Note {
  SharedArena::Place place;
  int64_t number;
};

// A rank's lines of the shared memory.
struct alignas(64) SharedMemoryTransport::Seat {
  std::atomic<uint64_t> step;
  alignas(64) Bell bell;
  alignas(64) Note notes[2];
};

SharedMemoryTransport::SharedMemoryTransport(std::shared_ptr<HostGroup> group,
                                             std::vector<int> members, uint64_t key,
                                             SharedMemoryOptions options)
    : group_(std::move(group)),
      members_(std::move(members)),
      size_(static_cast<int>(members_.size())),
      key_(key),
      options_(options),
      stage_bytes_(align_up(options.stage != 0 ? options.stage : stage_for(size_))),
      waiter_(options.spin, options.limit) {
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), group_->index()) -
                           members_.begin());
}

SharedMemoryTransport::~SharedMemoryTransport() = default;

// --- the frame of every collective ---

// Whatever goes wrong in a collective is the end of this transport: the ranks are out of step.
template <typename Body>
void SharedMemoryTransport::run(Body&& body) {
  throw_if_aborted();
  try {
    if (!memory_ && size_ > 1) open();
    body();
  } catch (const std::exception& error) {
    abort(error.what());
  }
  throw_if_aborted();
}

void SharedMemoryTransport::throw_if_aborted() const {
  if (!waiter_.aborted()) return;
  std::lock_guard lock(mutex_);
  if (why_) throw TransportError(*why_);
}

void SharedMemoryTransport::abort(const std::string& why) noexcept {
  std::lock_guard lock(mutex_);
  if (why_) return;
  why_ = why;
  waiter_.abort(bell_);
}

void SharedMemoryTransport::open() {
  const size_t bytes = static_cast<size_t>(size_) * (sizeof(Seat) + 2 * stage_bytes_);
  memory_ = rank_ == 0
                ? group_->publish(key_, bytes)
                : group_->find(members_[0], key_, bytes, [this] { return waiter_.aborted(); });
  if (!memory_) return throw_if_aborted();
  std::lock_guard lock(mutex_);
  bell_ = &seat(rank_).bell;
}

SharedMemoryTransport::Seat& SharedMemoryTransport::seat(int rank) const noexcept {
  return reinterpret_cast<Seat*>(memory_->data())[rank];
}

std::byte* SharedMemoryTransport::stage(int rank, uint64_t step) const noexcept {
  return memory_->data() + size_ * sizeof(Seat) +
         (2 * rank + static_cast<int>(step % 2)) * stage_bytes_;
}

SharedMemoryTransport::Note& SharedMemoryTransport::next_note() const noexcept {
  return seat(rank_).notes[(step_ + 1) % 2];
}

const SharedMemoryTransport::Note& SharedMemoryTransport::note(int rank) const noexcept {
  return seat(rank).notes[step_ % 2];
}

int64_t SharedMemoryTransport::part() const noexcept {
  return stage_bytes_ / size_ / kLine * kLine;
}

// One step.
void SharedMemoryTransport::sync() {
  ++step_;
  Seat& mine = seat(rank_);
  mine.step.store(step_, std::memory_order_seq_cst);
  for (int i = 1; i < size_; ++i) seat((rank_ + i) % size_).bell.ring_if_awaited(rank_);
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    const std::atomic<uint64_t>& theirs = seat(peer).step;
    const auto result = waiter_.wait(
        mine.bell, peer, [&] { return theirs.load(std::memory_order_seq_cst) >= step_; });
    if (result == Waiter::Result::kReady) continue;
    throw TransportError(result == Waiter::Result::kAborted
                             ? "aborted"
                             : "another rank of this host did not come within the operation "
                               "timeout (HVDTORCH_OPERATION_TIMEOUT)");
  }
}

// A step. Where all ranks' data is, by rank, if all of it can be reached from here.
std::optional<std::vector<std::byte*>> SharedMemoryTransport::places(const void* data,
                                                                     int64_t bytes) {
  next_note().place = group_->arena().place_of(data, bytes).value_or(SharedArena::Place{});
  sync();
  std::vector<std::byte*> all;
  for (int r = 0; r < size_; ++r) {
    if (note(r).place.region == 0) return std::nullopt;
  }
  for (int r = 0; r < size_; ++r) {
    all.push_back(r == rank_ ? static_cast<std::byte*>(const_cast<void*>(data))
                             : group_->at(members_[r], note(r).place));
  }
  return all;
}

// --- reductions ---

void SharedMemoryTransport::allreduce(const Reduction& reduction, void* data, int64_t count) {
  run([&] {
    if (count == 0) return;
    auto* const bytes = static_cast<std::byte*>(data);
    const int64_t length = count * size_of(reduction.dtype);
    if (size_ == 1) {
      reduce(reduction, data, &data, 1, count);
    } else if (length <= std::min(options_.one_step, stage_bytes_)) {
      allreduce_at_once(reduction, bytes, count);
    } else if (const auto all = places(data, length)) {
      allreduce_in_place(reduction, *all, count);
    } else {
      allreduce_staged(reduction, bytes, count);
    }
  });
}

// Everybody reduces everything. 1 step.
void SharedMemoryTransport::allreduce_at_once(const Reduction& reduction, std::byte* data,
                                              int64_t count) {
  copy_bytes(next_stage(), data, count * size_of(reduction.dtype));
  sync();
  std::vector<const void*> srcs;
  for (int r = 0; r < size_; ++r) srcs.push_back(stage(r, step_));
  srcs[rank_] = data;
  reduce(reduction, data, srcs.data(), size_, count);
}

// Each rank reduces its slice where it is, and writes the result to all. 1 step, after the one that
// told where.
void SharedMemoryTransport::allreduce_in_place(const Reduction& reduction,
                                               const std::vector<std::byte*>& all, int64_t count) {
  const int64_t element = size_of(reduction.dtype);
  const int64_t slice = align_up(divide_up(count * element, size_));
  const int64_t begin = rank_ * slice;
  const int64_t bytes = length_at(begin, count * element, slice);
  std::vector<void*> mine;
  for (std::byte* data : all) mine.push_back(data + begin);
  if (bytes > 0) reduce_to_all(reduction, mine.data(), size_, mine.data(), size_, bytes / element);
  sync();
}

// Chunk by chunk: a chunk has a part for each rank to reduce. For step t a rank stages what it has
// of the others' parts of chunk t, reduces its own part of chunk t - 1 from what was staged for the
// step before, and puts the result where its own part of chunk t has no need to be. After the step
// it takes the others' results. As many steps as chunks and one.
void SharedMemoryTransport::allreduce_staged(const Reduction& reduction, std::byte* data,
                                             int64_t count) {
  const int64_t element = size_of(reduction.dtype);
  const int64_t total = count * element;
  const int64_t part = std::min(this->part(), align_up(divide_up(total, size_)));
  const int64_t chunks = divide_up(total, part * size_);
  const auto begin = [&](int64_t chunk, int rank) { return (chunk * size_ + rank) * part; };
  const auto length = [&](int64_t chunk, int rank) {
    return length_at(begin(chunk, rank), total, part);
  };
  for (int64_t t = 0; t <= chunks; ++t) {
    std::byte* const next = next_stage();
    for (int i = 1; i < size_ && t < chunks; ++i) {
      const int r = (rank_ + i) % size_;
      copy_bytes(next + r * part, data + begin(t, r), length(t, r));
    }
    if (t > 0 && length(t - 1, rank_) > 0) {
      std::byte* const own = data + begin(t - 1, rank_);
      std::vector<const void*> srcs;
      for (int r = 0; r < size_; ++r) srcs.push_back(stage(r, step_) + rank_ * part);
      srcs[rank_] = own;
      void* dsts[] = {own, next + rank_ * part};
      reduce_to_all(reduction, dsts, 2, srcs.data(), size_, length(t - 1, rank_) / element);
    }
    sync();
    for (int i = 1; i < size_ && t > 0; ++i) {
      const int r = (rank_ + i) % size_;
      copy_bytes(data + begin(t - 1, r), stage(r, step_) + r * part, length(t - 1, r));
    }
  }
}

void SharedMemoryTransport::reduce_scatter(const Reduction& reduction, const void* in, void* out,
                                           const std::vector<int64_t>& counts) {
  run([&] {
    const int64_t element = size_of(reduction.dtype);
    const int64_t longest = *std::max_element(counts.begin(), counts.end()) * element;
    if (longest == 0) return;
    if (size_ == 1) return reduce(reduction, out, &in, 1, counts[0]);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const auto* const data = static_cast<const std::byte*>(in);
    const int64_t own = counts[rank_] * element, own_offset = offsets[rank_] * element;
    const int64_t all = (offsets.back() + counts.back()) * element;
    if (longest * size_ > options_.one_step) {
      if (const auto everywhere = places(in, all)) {
        std::vector<const void*> srcs;
        for (const std::byte* each : *everywhere) srcs.push_back(each + own_offset);
        if (own > 0) reduce(reduction, out, srcs.data(), size_, counts[rank_]);
        return sync();
      }
    }
    const int64_t part = std::min(this->part(), align_up(longest));
    for (int64_t begin = 0; begin < longest; begin += part) {
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        copy_bytes(next_stage() + r * part, data + offsets[r] * element + begin,
                   length_at(begin, counts[r] * element, part));
      }
      sync();
      const int64_t bytes = length_at(begin, own, part);
      if (bytes == 0) continue;
      std::vector<const void*> srcs;
      for (int r = 0; r < size_; ++r) srcs.push_back(stage(r, step_) + rank_ * part);
      srcs[rank_] = data + own_offset + begin;
      reduce(reduction, static_cast<std::byte*>(out) + begin, srcs.data(), size_, bytes / element);
    }
  });
}

void SharedMemoryTransport::adasum(const Reduction& reduction, void* data,
                                   const std::vector<Span>& tensors) {
  run([&] {
    adasum_by_doubling(
        rank_, size_, reduction, data, tensors,
        [this](int64_t bytes) {
          if (static_cast<int64_t>(scratch_.size()) < bytes) {
            scratch_.resize(static_cast<size_t>(bytes));
          }
          return scratch_.data();
        },
        [this](const std::byte* sent, int to, std::byte* received, int from, int64_t bytes) {
          for (int64_t begin = 0; begin < bytes; begin += stage_bytes_) {
            const int64_t length = length_at(begin, bytes, stage_bytes_);
            if (to >= 0) copy_bytes(next_stage(), sent + begin, length);
            sync();
            if (from >= 0) copy_bytes(received + begin, stage(from, step_), length);
          }
        });
  });
}

// --- data movement: as many steps as half-stages that the longest part fills ---

void SharedMemoryTransport::allgather(const void* in, void* out,
                                      const std::vector<int64_t>& bytes) {
  run([&] {
    const std::vector<int64_t> offsets = offsets_of(bytes);
    const auto* const mine = static_cast<const std::byte*>(in);
    auto* const all = static_cast<std::byte*>(out);
    copy_bytes(all + offsets[rank_], mine, bytes[rank_]);
    if (size_ == 1) return;
    const int64_t longest = *std::max_element(bytes.begin(), bytes.end());
    for (int64_t begin = 0; begin < longest; begin += stage_bytes_) {
      const auto length = [&](int r) { return length_at(begin, bytes[r], stage_bytes_); };
      copy_bytes(next_stage(), mine + begin, length(rank_));
      sync();
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        copy_bytes(all + offsets[r] + begin, stage(r, step_), length(r));
      }
    }
  });
}

void SharedMemoryTransport::broadcast(void* data, int64_t bytes, int root) {
  run([&] {
    if (size_ == 1) return;
    auto* const all = static_cast<std::byte*>(data);
    for (int64_t begin = 0; begin < bytes; begin += stage_bytes_) {
      const int64_t length = length_at(begin, bytes, stage_bytes_);
      if (rank_ == root) copy_bytes(next_stage(), all + begin, length);
      sync();
      if (rank_ != root) copy_bytes(all + begin, stage(root, step_), length);
    }
  });
}

// No rank knows how long the longest part of all is, so each tells its own with the first step.
void SharedMemoryTransport::alltoall(const void* in, const std::vector<int64_t>& send_bytes,
                                     void* out, const std::vector<int64_t>& recv_bytes) {
  run([&] {
    const std::vector<int64_t> from = offsets_of(send_bytes), to = offsets_of(recv_bytes);
    const auto* const sent = static_cast<const std::byte*>(in);
    auto* const received = static_cast<std::byte*>(out);
    copy_bytes(received + to[rank_], sent + from[rank_], send_bytes[rank_]);
    if (size_ == 1) return;
    const int64_t part = this->part();
    int64_t longest = 1;
    for (int64_t begin = 0; begin < longest; begin += part) {
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        copy_bytes(next_stage() + r * part, sent + from[r] + begin,
                   length_at(begin, send_bytes[r], part));
      }
      next_note().number = *std::max_element(send_bytes.begin(), send_bytes.end());
      sync();
      for (int r = 0; r < size_; ++r) longest = std::max(longest, note(r).number);
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        copy_bytes(received + to[r] + begin, stage(r, step_) + rank_ * part,
                   length_at(begin, recv_bytes[r], part));
      }
    }
  });
}

void SharedMemoryTransport::barrier() {
  run([&] {
    if (size_ > 1) sync();
  });
}

}  // namespace hvdtorch
