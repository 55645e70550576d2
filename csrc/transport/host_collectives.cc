// Words. P is the number of ranks, n the bytes of the data on one rank. A *step* is one message
// time: the messages of one step travel at once. A *slice* is the part of the data that one rank
// reduces for all: P slices of equal length, in whole multiples of 64 bytes but for the last. A
// *chunk* is the part of a slice that is one message. Costs are given as steps, and bytes that one
// rank sends (and receives as many).
//
// Receives are posted before the sends they belong with, always: over Gloo a send waits until its
// receive was announced, so that an early receive saves a round trip.
//
// Ranks combine values in rank order whoever does it, so all hold identical bits.
#include "transport/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "transport/adasum.h"
#include "transport/host_messages.h"

namespace hvdtorch {
namespace {

constexpr int64_t kAlignment = 64;  // bytes: a cache line, and a multiple of every dtype's size

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t align_up(int64_t bytes) { return divide_up(bytes, kAlignment) * kAlignment; }

// Chunk i of a span that is cut into chunks of the given length; empty beyond the span's end.
ByteSpan chunk_at(const ByteSpan& span, int64_t chunk, int64_t i) {
  const int64_t begin = std::min(i * chunk, span.bytes);
  return {span.data + begin, std::min(chunk, span.bytes - begin)};
}

// `total` bytes in P slices.
struct Slices {
  Slices(std::byte* data, int64_t total, int ranks)
      : whole{data, total}, length(align_up(divide_up(total, ranks))) {}
  ByteSpan operator[](int rank) const { return chunk_at(whole, length, rank); }

  ByteSpan whole;
  int64_t length;
};

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets(lengths.size());
  std::exclusive_scan(lengths.begin(), lengths.end(), offsets.begin(), int64_t{0});
  return offsets;
}

std::vector<int> ranks_after(int rank, int size) {
  std::vector<int> ranks;
  for (int i = 1; i < size; ++i) ranks.push_back((rank + i) % size);
  return ranks;
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

// --- requests and their abort ---

void HostCollectives::LiveRequests::add(PointToPoint::Request* request) {
  std::lock_guard lock(mutex_);
  if (why_) throw TransportError(*why_);
  live_.insert(request);
}

void HostCollectives::LiveRequests::remove(PointToPoint::Request* request) noexcept {
  std::lock_guard lock(mutex_);
  live_.erase(request);
}

// Under the lock, so that no request is destroyed while it is told.
void HostCollectives::LiveRequests::abort(const std::string& why) noexcept {
  std::lock_guard lock(mutex_);
  if (why_) return;
  why_ = why;
  for (PointToPoint::Request* request : live_) request->abort();
}

void HostCollectives::LiveRequests::throw_if_aborted() const {
  std::lock_guard lock(mutex_);
  if (why_) throw TransportError(*why_);
}

HostCollectives::HostCollectives(std::shared_ptr<PointToPoint> link, const CollectiveSizes& sizes)
    : link_(std::move(link)),
      rank_(link_->rank()),
      size_(link_->size()),
      sizes_(sizes),
      peers_(ranks_after(rank_, size_)) {}

HostCollectives::~HostCollectives() = default;

void HostCollectives::abort(const std::string& why) noexcept { live_.abort(why); }

int64_t HostCollectives::chunk_of(int64_t message) const {
  const int64_t most = std::max(sizes_.least_chunk, sizes_.largest_chunk / std::max(1, size_ - 1));
  return align_up(std::clamp(divide_up(message, 4), sizes_.least_chunk, most));
}

std::byte* HostCollectives::scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();  // first, so that old and new are not held at once
    scratch_bytes_ = 0;
    scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, align_up(bytes))));
    if (!scratch_) throw std::bad_alloc();
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

// --- reductions ---

// `received` holds what came from peers_[0], peers_[1], ..., each `stride` bytes after the other.
void HostCollectives::reduce_from_peers(const Reduction& reduction, void* dst, const void* mine,
                                        const std::byte* received, int64_t stride,
                                        int64_t bytes) const {
  if (bytes == 0) return;
  std::vector<const void*> srcs(size_);
  srcs[rank_] = mine;
  for (size_t k = 0; k < peers_.size(); ++k) srcs[peers_[k]] = received + k * stride;
  reduce(reduction, dst, srcs.data(), size_, bytes / size_of(reduction.dtype));
}

void HostCollectives::allreduce(const Reduction& reduction, void* data, int64_t count) {
  run([&] {
    if (count == 0) return;
    auto* const bytes = static_cast<std::byte*>(data);
    if (count * size_of(reduction.dtype) * (size_ - 1) <= sizes_.direct_allreduce) {
      allreduce_direct(reduction, bytes, count);
    } else {
      allreduce_sliced(reduction, bytes, count);
    }
  });
}

// Everybody sends everything to everybody and reduces it all: 1 step, n (P-1) bytes.
void HostCollectives::allreduce_direct(const Reduction& reduction, std::byte* data, int64_t count) {
  const int64_t bytes = count * size_of(reduction.dtype);
  const int64_t stride = align_up(bytes);
  std::byte* const received = scratch(stride * (size_ - 1));
  Messages messages(*this);
  for (size_t k = 0; k < peers_.size(); ++k) {
    messages.recv({received + k * stride, bytes}, peers_[k], kFirstPhase);
  }
  for (int peer : peers_) messages.send({data, bytes}, peer, kFirstPhase);
  messages.wait();
  reduce_from_peers(reduction, data, data, received, stride, bytes);
}

// What reduce_pipelined() reduces: this rank's share of it, chunk by chunk.
struct HostCollectives::Pipeline {
  int64_t chunk;                                              // bytes of a chunk
  int64_t chunks;                                             // per share, of the longest
  std::function<ByteSpan(int rank, int64_t i)> contribution;  // to chunk i of that rank's share
  std::function<std::byte*(int64_t i)> result;                // where chunk i of my share goes
  std::function<void(int64_t i)> before;                      // chunk i is posted
  std::function<void(int64_t i)> after;                       // chunk i of my share is reduced
};

// Each rank receives all contributions to its share and reduces them. Two chunks are on their way
// at a time, into two halves of the scratch memory: one is reduced while the next travels.
void HostCollectives::reduce_pipelined(const Reduction& reduction, const Pipeline& pipeline) {
  const int64_t half = pipeline.chunk * (size_ - 1);
  std::byte* const received = scratch(2 * half);
  Messages sent(*this);
  Messages even(*this), odd(*this);
  const auto post = [&](int64_t i) {
    if (i >= pipeline.chunks) return;
    std::byte* to = received + (i % 2) * half;
    const int64_t bytes = pipeline.contribution(rank_, i).bytes;
    for (int peer : peers_) {
      (i % 2 == 0 ? even : odd).recv({to, bytes}, peer, kFirstPhase);
      to += pipeline.chunk;
    }
    pipeline.before(i);
    for (int peer : peers_) sent.send(pipeline.contribution(peer, i), peer, kFirstPhase);
  };
  post(0);
  post(1);
  for (int64_t i = 0; i < pipeline.chunks; ++i) {
    (i % 2 == 0 ? even : odd).wait();
    const ByteSpan mine = pipeline.contribution(rank_, i);
    reduce_from_peers(reduction, pipeline.result(i), mine.data, received + (i % 2) * half,
                      pipeline.chunk, mine.bytes);
    pipeline.after(i);
    post(i + 2);
  }
  sent.wait();
}

// Each rank reduces its slice and sends the result to everybody, chunk by chunk: 2 steps when there
// is one chunk, else as many as chunks and one; 2 n (P-1) / P bytes.
//
// The result of a chunk is received into the very memory that its contribution is sent from, and
// the receive is posted first. That is safe: the peer has no result before it has all of the
// contribution.
void HostCollectives::allreduce_sliced(const Reduction& reduction, std::byte* data, int64_t count) {
  const Slices slices(data, count * size_of(reduction.dtype), size_);
  const int64_t chunk = chunk_of(slices.length);
  const auto part = [&](int rank, int64_t i) { return chunk_at(slices[rank], chunk, i); };
  Messages results(*this);
  reduce_pipelined(reduction, {.chunk = chunk,
                               .chunks = divide_up(slices.length, chunk),
                               .contribution = part,
                               .result = [&](int64_t i) { return part(rank_, i).data; },
                               .before =
                                   [&](int64_t i) {
                                     for (int peer : peers_)
                                       results.recv(part(peer, i), peer, kSecondPhase);
                                   },
                               .after =
                                   [&](int64_t i) {
                                     for (int peer : peers_)
                                       results.send(part(rank_, i), peer, kSecondPhase);
                                   }});
  results.wait();
}

// Like the first half of allreduce_sliced(), with shares as long as `counts` says: 1 step when
// there is one chunk, else as many as chunks; n - (own share) bytes.
void HostCollectives::reduce_scatter(const Reduction& reduction, const void* in, void* out,
                                     const std::vector<int64_t>& counts) {
  run([&] {
    const int64_t element = size_of(reduction.dtype);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const int64_t longest = *std::max_element(counts.begin(), counts.end()) * element;
    if (longest == 0) return;
    auto* const first = static_cast<std::byte*>(const_cast<void*>(in));  // only read
    const int64_t chunk = chunk_of(longest);
    const auto part = [&](int rank, int64_t i) {
      return chunk_at({first + offsets[rank] * element, counts[rank] * element}, chunk, i);
    };
    reduce_pipelined(reduction,
                     {.chunk = chunk,
                      .chunks = divide_up(longest, chunk),
                      .contribution = part,
                      .result = [&](int64_t i) { return static_cast<std::byte*>(out) + i * chunk; },
                      .before = [](int64_t) {},
                      .after = [](int64_t) {}});
  });
}

void HostCollectives::adasum(const Reduction& reduction, void* data,
                             const std::vector<Span>& tensors) {
  run([&] {
    adasum_by_doubling(
        rank_, size_, reduction, data, tensors, [this](int64_t bytes) { return scratch(bytes); },
        [this](const std::byte* sent, int to, std::byte* received, int from, int64_t bytes) {
          Messages messages(*this);
          if (from >= 0) messages.recv({received, bytes}, from, kFirstPhase);
          if (to >= 0) messages.send({const_cast<std::byte*>(sent), bytes}, to, kFirstPhase);
          messages.wait();
        });
  });
}

// --- data movement ---

// Everybody sends its part to everybody: 1 step, (own part) (P-1) bytes.
void HostCollectives::allgather(const void* in, void* out, const std::vector<int64_t>& bytes) {
  run([&] {
    const std::vector<int64_t> offsets = offsets_of(bytes);
    auto* const all = static_cast<std::byte*>(out);
    auto* const mine = static_cast<std::byte*>(const_cast<void*>(in));  // only read
    Messages messages(*this);
    for (int peer : peers_) messages.recv({all + offsets[peer], bytes[peer]}, peer, kFirstPhase);
    for (int peer : peers_) messages.send({mine, bytes[rank_]}, peer, kFirstPhase);
    copy_bytes(all + offsets[rank_], mine, bytes[rank_]);
    messages.wait();
  });
}

// Everybody sends each part to whom it is for: 1 step, n - (own part) bytes.
void HostCollectives::alltoall(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                               const std::vector<int64_t>& recv_bytes) {
  run([&] {
    const std::vector<int64_t> to = offsets_of(send_bytes), from = offsets_of(recv_bytes);
    auto* const sent = static_cast<std::byte*>(const_cast<void*>(in));  // only read
    auto* const received = static_cast<std::byte*>(out);
    Messages messages(*this);
    for (int peer : peers_) {
      messages.recv({received + from[peer], recv_bytes[peer]}, peer, kFirstPhase);
    }
    for (int peer : peers_) messages.send({sent + to[peer], send_bytes[peer]}, peer, kFirstPhase);
    copy_bytes(received + from[rank_], sent + to[rank_], send_bytes[rank_]);
    messages.wait();
  });
}

void HostCollectives::broadcast(void* data, int64_t bytes, int root) {
  run([&] {
    if (size_ == 2 || bytes <= sizes_.tree_broadcast) {
      broadcast_tree(static_cast<std::byte*>(data), bytes, root);
    } else {
      broadcast_sliced(static_cast<std::byte*>(data), bytes, root);
    }
  });
}

// A binomial tree, in ranks counted from the root: one's parent is oneself without the lowest bit
// set, one's children are those with one bit set below it. log2 P steps; the root sends n log2 P
// bytes.
void HostCollectives::broadcast_tree(std::byte* data, int64_t bytes, int root) {
  const int me = (rank_ - root + size_) % size_;
  const auto rank_of = [&](int counted) { return (counted + root) % size_; };
  Messages messages(*this);
  int bit = 1;
  while (bit < size_ && (me & bit) == 0) bit *= 2;
  if (me != 0) messages.recv({data, bytes}, rank_of(me - bit), kFirstPhase);
  messages.wait();
  for (bit /= 2; bit > 0; bit /= 2) {
    if (me + bit < size_) messages.send({data, bytes}, rank_of(me + bit), kFirstPhase);
  }
  messages.wait();
}

// The root sends each rank its slice, which that rank passes on to all others, chunk by chunk; the
// root's own slice goes to all directly. 2 steps when there is one chunk, else as many as chunks
// and one; the root sends 2 n (P-1) / P bytes, the others n (P-2) / P.
void HostCollectives::broadcast_sliced(std::byte* data, int64_t bytes, int root) {
  const Slices slices(data, bytes, size_);
  const int64_t chunk = chunk_of(slices.length);
  const int64_t chunks = divide_up(slices.length, chunk);
  const auto part = [&](int rank, int64_t i) { return chunk_at(slices[rank], chunk, i); };
  Messages mine(*this), rest(*this);
  if (rank_ != root) {
    for (int64_t i = 0; i < chunks; ++i) {
      mine.recv(part(rank_, i), root, kFirstPhase);
      for (int peer : peers_) rest.recv(part(peer, i), peer, kSecondPhase);
    }
  }
  for (int64_t i = 0; i < chunks; ++i) {
    if (rank_ == root) {
      for (int peer : peers_) rest.send(part(peer, i), peer, kFirstPhase);
    } else if (part(rank_, i).bytes > 0) {
      mine.wait_for_first();
    }
    for (int peer : peers_) {
      if (peer != root) rest.send(part(rank_, i), peer, kSecondPhase);
    }
  }
  rest.wait();
}

// Dissemination: in step k everybody tells the rank 2^k after it, and hears from the rank 2^k
// before it, that all ranks it knows of have arrived. log2 P steps of 1 byte.
void HostCollectives::barrier() {
  run([&] {
    std::byte told{}, heard{};
    for (int distance = 1; distance < size_; distance *= 2) {
      Messages messages(*this);
      messages.recv({&heard, 1}, (rank_ - distance + size_) % size_, kFirstPhase);
      messages.send({&told, 1}, (rank_ + distance) % size_, kFirstPhase);
      messages.wait();
    }
  });
}

}  // namespace hvdtorch
