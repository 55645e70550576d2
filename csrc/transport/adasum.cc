#include "transport/adasum.h"

#include "kernels/adasum_cpu.h"

namespace hvdtorch {
namespace {

// The spans' values one after another, without the gaps between the spans.
class Packed {
 public:
  Packed(const Reduction& reduction, const std::vector<Span>& tensors)
      : reduction_(reduction), tensors_(tensors) {
    for (const Span& tensor : tensors) count_ += tensor.count;
  }

  int64_t bytes() const { return count_ * adasum_value_size(reduction_.dtype); }

  void load(std::byte* values, const std::byte* data) const {
    for_each(values, data, [&](std::byte* value, const std::byte* element, int64_t count) {
      adasum_load(reduction_, value, element, count);
    });
  }
  void store(std::byte* data, std::byte* values) const {
    for_each(values, data, [&](std::byte* value, std::byte* element, int64_t count) {
      adasum_store(reduction_, element, value, count);
    });
  }
  // One combination per tensor; out is `a` or `b`.
  void combine(std::byte* out, std::byte* a, std::byte* b) const {
    for (const Span& tensor : tensors_) {
      adasum_combine(reduction_.dtype, out, a, b, tensor.count);
      const int64_t bytes = tensor.count * adasum_value_size(reduction_.dtype);
      out += bytes;
      a += bytes;
      b += bytes;
    }
  }

 private:
  template <typename Data, typename Body>
  void for_each(std::byte* values, Data* data, Body&& body) const {
    for (const Span& tensor : tensors_) {
      body(values, data + tensor.offset * size_of(reduction_.dtype), tensor.count);
      values += tensor.count * adasum_value_size(reduction_.dtype);
    }
  }

  const Reduction& reduction_;
  const std::vector<Span>& tensors_;
  int64_t count_ = 0;
};

}  // namespace

void adasum_by_doubling(int rank, int size, const Reduction& reduction, void* data,
                        const std::vector<Span>& tensors,
                        const std::function<std::byte*(int64_t bytes)>& scratch,
                        const AdasumStep& step) {
  const bool scales = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (size == 1 && !scales) return;
  const Packed packed(reduction, tensors);
  const int64_t bytes = packed.bytes();
  auto* const elements = static_cast<std::byte*>(data);
  std::byte* values = scratch(2 * bytes);
  std::byte* const received = values + bytes;
  // A single tensor that is stored as it is computed needs no copy.
  const int64_t element = size_of(reduction.dtype);
  if (tensors.size() == 1 && element == adasum_value_size(reduction.dtype)) {
    values = elements + tensors[0].offset * element;
  }
  packed.load(values, elements);

  const int power = adasum_power_of_two(size);
  const int folded = size - power;  // ranks power, power + 1, ... fold into 0, 1, ...
  const bool folds_in = rank >= power, takes_in = rank < folded;
  if (folded > 0) {
    step(values, folds_in ? rank - power : -1, received, takes_in ? rank + power : -1, bytes);
    if (takes_in) packed.combine(values, values, received);
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int neighbour = folds_in ? -1 : rank ^ distance;
    step(values, neighbour, received, neighbour, bytes);
    if (folds_in) continue;
    if (rank < neighbour) {
      packed.combine(values, values, received);
    } else {
      packed.combine(values, received, values);
    }
  }
  if (folded > 0) {
    step(values, takes_in ? rank + power : -1, values, folds_in ? rank - power : -1, bytes);
  }
  packed.store(elements, values);
}

}  // namespace hvdtorch
