// Adasum over point-to-point messages, by recursive doubling: in step k a rank exchanges its whole
// vector with its neighbour, rank xor 2^k, and both compute the same combination from the same two
// vectors, so that after log2 P steps all ranks hold identical bits. The order of combination is
// that of kernels/adasum_cpu.h, also for a P that is no power of two. log2 P steps, n log2 P bytes
// (n: bytes of the values on one rank); 2 steps more when ranks are folded in.
#include <cstddef>
#include <vector>

#include "kernels/adasum_cpu.h"
#include "transport/host_messages.h"

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

void HostCollectives::adasum(const Reduction& reduction, void* data,
                             const std::vector<Span>& tensors) {
  run([&] {
    const bool scales = reduction.prescale != 1.0 || reduction.postscale != 1.0;
    if (size_ == 1 && !scales) return;
    const Packed packed(reduction, tensors);
    auto* const elements = static_cast<std::byte*>(data);
    std::byte* values = scratch(2 * packed.bytes());
    std::byte* const received = values + packed.bytes();
    // A single tensor that is stored as it is computed needs no copy.
    const int64_t element = size_of(reduction.dtype);
    if (tensors.size() == 1 && element == adasum_value_size(reduction.dtype)) {
      values = elements + tensors[0].offset * element;
    }
    packed.load(values, elements);

    const int power = adasum_power_of_two(size_);
    const int folded = size_ - power;  // ranks power, power + 1, ... fold into 0, 1, ...
    Messages messages(*this);
    const auto receive = [&](std::byte* to, int from, int phase) {
      messages.recv({to, packed.bytes()}, from, phase);
    };
    const auto send = [&](int to, int phase) {
      messages.send({values, packed.bytes()}, to, phase);
    };
    if (rank_ >= power) {
      send(rank_ - power, kFirstPhase);
      messages.wait();  // before the receive, which overwrites what is sent
      receive(values, rank_ - power, kSecondPhase);
      messages.wait();
    } else {
      if (rank_ < folded) {
        receive(received, rank_ + power, kFirstPhase);
        messages.wait();
        packed.combine(values, values, received);
      }
      for (int distance = 1; distance < power; distance *= 2) {
        const int neighbour = rank_ ^ distance;
        receive(received, neighbour, kFirstPhase);
        send(neighbour, kFirstPhase);
        messages.wait();
        if (rank_ < neighbour) {
          packed.combine(values, values, received);
        } else {
          packed.combine(values, received, values);
        }
      }
      if (rank_ < folded) {
        send(rank_ + power, kSecondPhase);
        messages.wait();
      }
    }
    packed.store(elements, values);
  });
}

}  // namespace hvdtorch
