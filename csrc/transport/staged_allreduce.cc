// In every stage each rank reduces one slice of it for all, as in a sliced allreduce. Partial
// results travel in partial_type(), results in the type of the data. A rank sends (P-1)/P of the
// data in each of the two; as many steps as stages and two.
//
// Where the two types are one, partial results lie in the data itself, and a result is received
// into the memory that its partial result is sent from. That is safe although the receive is posted
// first: the peer has no result before it has all partial results.
#include "transport/staged_allreduce.h"

#include <array>

#include "transport/host_collectives.h"
#include "transport/host_messages.h"

namespace hvdtorch {
namespace {

constexpr int64_t kSliceMultiple = 64;  // elements: whole cache lines of any dtype
constexpr int kSlots = 3;               // a stage has its slot until it is finished

Span slice_of(const Span& stage, int rank, int ranks) {
  const int64_t even = (stage.count + ranks - 1) / ranks;
  const int64_t length = (even + kSliceMultiple - 1) / kSliceMultiple * kSliceMultiple;
  const int64_t begin = std::min(rank * length, stage.count);
  return {stage.offset + begin, std::min(length, stage.count - begin)};
}

}  // namespace

void HostCollectives::allreduce_in_stages(const StagedAllreduce& work) {
  run([&] {
    const Reduction combining = combine_partials(work.reduction);
    const int64_t wide = size_of(combining.dtype), narrow = size_of(work.reduction.dtype);
    const bool in_data = combining.dtype == work.reduction.dtype;
    auto* const data = static_cast<std::byte*>(work.data);

    // A slot's scratch memory: what the peers send, then this rank's partial result of the stage.
    const int64_t longest = work.stages.longest();
    const int64_t stride = slice_of({0, longest}, 0, size_).count * wide;
    const int64_t received_bytes = stride * (size_ - 1);
    const int64_t slot_bytes = received_bytes + (in_data ? 0 : longest * wide);
    const int64_t slot_stride = (slot_bytes + kSliceMultiple - 1) / kSliceMultiple * kSliceMultiple;
    std::byte* const memory = scratch(kSlots * slot_stride);
    const auto received = [&](int64_t i) { return memory + i % kSlots * slot_stride; };
    const auto partial = [&](int64_t i, const Span& part) {
      if (in_data) return ByteSpan{data + part.offset * wide, part.count * wide};
      const int64_t within = part.offset - work.stages[i].offset;
      return ByteSpan{received(i) + received_bytes + within * wide, part.count * wide};
    };
    const auto result = [&](const Span& part) {
      return ByteSpan{data + part.offset * narrow, part.count * narrow};
    };
    const auto slice = [&](int64_t i, int rank) { return slice_of(work.stages[i], rank, size_); };

    struct Slot {
      explicit Slot(HostCollectives& owner) : sent(owner), arriving(owner), results(owner) {}
      Messages sent, arriving, results;
    };
    std::array<Slot, kSlots> slots{Slot(*this), Slot(*this), Slot(*this)};
    Messages results_sent(*this);
    const auto slot = [&](int64_t i) -> Slot& { return slots[i % kSlots]; };

    const auto start = [&](int64_t i) {
      const int64_t expected = slice(i, rank_).count * wide;
      for (size_t k = 0; k < peers_.size(); ++k) {
        slot(i).arriving.recv({received(i) + k * stride, expected}, peers_[k], kFirstPhase);
      }
      for (int peer : peers_) slot(i).results.recv(result(slice(i, peer)), peer, kSecondPhase);
      work.start(work.stages[i], partial(i, work.stages[i]).data);
      for (int peer : peers_) slot(i).sent.send(partial(i, slice(i, peer)), peer, kFirstPhase);
    };
    const auto combine = [&](int64_t i) {
      slot(i).arriving.wait();
      const Span own = slice(i, rank_);
      const ByteSpan mine = partial(i, own);
      const Reduction reduction = in_data ? without_prescale(work.reduction) : combining;
      reduce_from_peers(reduction, mine.data, mine.data, received(i), stride, mine.bytes);
      if (!in_data) finish_partial(work.reduction, result(own).data, mine.data, own.count);
      for (int peer : peers_) results_sent.send(result(own), peer, kSecondPhase);
    };
    const auto finish = [&](int64_t i) {
      slot(i).results.wait();
      slot(i).sent.wait();  // at once: who sent a result has had all that it is made of
      work.finish(work.stages[i]);
    };
    work.stages.run(start, combine, finish);
    results_sent.wait();
  });
}

}  // namespace hvdtorch
