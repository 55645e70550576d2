// An allreduce of data that becomes ready, and is wanted, piece by piece, so that what its ranks do
// before and after overlaps with the transfers. It is what the leaders of hosts run: every piece is
// reduced inside the hosts first, and handed out there afterwards (transport/hierarchical.h).
//
// Words. A *stage* is the piece: a contiguous part of the data. It is *started* (this rank's
// partial result is made and sent), *combined* (of this rank's slice of the stage, when all have
// sent) and *finished* (all slices' results are here, and are handed out).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "transport/transport.h"

namespace hvdtorch {

// `count` elements in stages of `length`, the last of which may be shorter.
class Stages {
 public:
  Stages(int64_t count, int64_t length) : count_(count), length_(length) {}
  int64_t size() const { return (count_ + length_ - 1) / length_; }
  int64_t longest() const { return std::min(count_, length_); }
  Span operator[](int64_t i) const {
    return {i * length_, std::min(length_, count_ - i * length_)};
  }

  // The order in which all ranks, leaders or not, go through their stages. Two stages are always on
  // their way between the hosts, while one before them is finished or one after them is started.
  template <typename Start, typename Combine, typename Finish>
  void run(Start&& start, Combine&& combine, Finish&& finish) const {
    for (int64_t i = 0; i < std::min<int64_t>(2, size()); ++i) start(i);
    for (int64_t i = 0; i < size(); ++i) {
      combine(i);
      if (i > 0) finish(i - 1);
      if (i + 2 < size()) start(i + 2);
    }
    if (size() > 0) finish(size() - 1);
  }

 private:
  int64_t count_, length_;
};

// What HostCollectives::allreduce_in_stages() works on. Precondition: partial_type(reduction).
struct StagedAllreduce {
  Reduction reduction;  // of the whole, of which this rank's partial results are a part
  void* data;           // where results go: elements of reduction.dtype
  Stages stages;
  // Writes this rank's partial result of a stage: elements of partial_type(reduction). Where that
  // is reduction.dtype, `partial` is the stage's place in `data`.
  std::function<void(const Span& stage, void* partial)> start;
  // The results of a stage are in `data`.
  std::function<void(const Span& stage)> finish;
};

// What combines complete partial results of the type that they are wanted in: finish included.
inline Reduction without_prescale(Reduction reduction) {
  reduction.prescale = 1.0;
  return reduction;
}

}  // namespace hvdtorch
