// The instruction sets of the reduction kernels against each other, reductions into several
// destinations, and reductions in two steps, through partial results.
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "kernels/isa.h"
#include "kernels/reduce_cpu.h"
#include "reduce_reference.h"

namespace hvdtorch::test {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

using Bytes = std::vector<uint8_t>;

std::vector<Isa> isas() {
  std::vector<Isa> present;
  for (Isa isa : {Isa::kPlain, Isa::kAvx2, Isa::kAvx512}) {
    if (processor_has(isa)) present.push_back(isa);
  }
  return present;
}

// Runs `body` with each instruction set that the processor has, and then leaves the best one.
void with_every_isa(const std::function<void(Isa)>& body) {
  const Isa before = current_isa();
  for (Isa isa : isas()) {
    check(use_isa(isa), name_of(isa));
    try {
      body(isa);
    } catch (...) {
      use_isa(before);
      throw;
    }
  }
  use_isa(before);
}

std::string text_of(const Reduction& reduction, int nsrc, int64_t count) {
  return std::string(name_of(reduction.op)) + " of " + std::to_string(nsrc) + " x " +
         std::to_string(count) + " " + name_of(reduction.dtype) + " prescale " +
         show(reduction.prescale) + " postscale " + show(reduction.postscale) + " divisor " +
         show(reduction.divisor);
}

// Everything that can be reduced, with and without factors.
std::vector<Reduction> reductions(int64_t divisor) {
  std::vector<Reduction> all;
  for (int d = 0; d < kNumDataTypes; ++d) {
    for (ReduceOp op : kOps) {
      for (auto [prescale, postscale] : {std::pair{1.0, 1.0}, {0.37, 1.0}, {1.0, -0.25}}) {
        const Reduction reduction{static_cast<DataType>(d), op, prescale, postscale, divisor};
        if (why_not_reducible(reduction).empty()) all.push_back(reduction);
      }
    }
  }
  return all;
}

// Spans of random elements, each `shift` bytes off an aligned address, with a guard after each.
class Spans {
 public:
  Spans(DataType dtype, int spans, int64_t count, int64_t shift, std::mt19937_64& random)
      : bytes_(count * size_of(dtype)), shift_(shift) {
    for (int s = 0; s < spans; ++s) {
      memory_.emplace_back((shift + bytes_ + kGuard + 15) / 8);
      for (uint64_t& word : memory_.back()) word = random();
      if (dtype != DataType::kBool) continue;
      for (int64_t i = 0; i < bytes_; ++i) at(s)[i] &= 1;
    }
  }

  uint8_t* at(int span) { return reinterpret_cast<uint8_t*>(memory_[span].data()) + shift_; }
  Bytes bytes(int span) { return {at(span), at(span) + bytes_}; }
  Bytes guard(int span) { return {at(span) + bytes_, at(span) + bytes_ + kGuard}; }
  std::vector<const void*> sources() {
    std::vector<const void*> pointers;
    for (size_t s = 0; s < memory_.size(); ++s) pointers.push_back(at(static_cast<int>(s)));
    return pointers;
  }

 private:
  static constexpr int64_t kGuard = 64;
  int64_t bytes_, shift_;
  std::vector<std::vector<uint64_t>> memory_;
};

void check_same(DataType dtype, const Bytes& got, const Bytes& expected, const std::string& what) {
  check_eq(got.size(), expected.size(), what);
  for (size_t i = 0; i < got.size(); i += size_of(dtype)) {
    if (!same_element(dtype, &got[i], &expected[i])) {
      fail(what + ": byte " + std::to_string(i) + ": got " + show(got[i]) + ", expected " +
           show(expected[i]));
    }
  }
}

const Case identical("every instruction set gives the same, at any size and alignment", [] {
  // Around one vector and one group of four, for elements of 1 to 16 bytes.
  const std::vector<int64_t> counts = {1, 15, 16, 17, 63, 64, 65, 255, 257, 700};
  std::mt19937_64 random(5);
  for (const int nsrc : {1, 2, 3, 5}) {
    for (const Reduction& reduction : reductions(nsrc)) {
      const int64_t size = size_of(reduction.dtype);
      for (const int64_t count : counts) {
        const int64_t shift = size * static_cast<int64_t>(random() % 4);
        Spans spans(reduction.dtype, nsrc + 1, count, shift, random);
        const std::vector<const void*> srcs = spans.sources();
        const Bytes guard = spans.guard(nsrc);
        Bytes expected;
        with_every_isa([&](Isa isa) {
          const std::string what = text_of(reduction, nsrc, count) + " by " + name_of(isa);
          reduce(reduction, spans.at(nsrc), srcs.data(), nsrc, count);
          if (expected.empty()) expected = spans.bytes(nsrc);
          check_same(reduction.dtype, spans.bytes(nsrc), expected, what);
          check(spans.guard(nsrc) == guard, what + " wrote behind the end");
        });
      }
    }
  }
});

const Case unaligned("elements need no more alignment than their own", [] {
  std::mt19937_64 random(6);
  for (const Reduction& reduction : reductions(2)) {
    for (int64_t shift = 0; shift < 64; shift += size_of(reduction.dtype)) {
      Spans spans(reduction.dtype, 2, 130, shift, random);
      const std::vector<const void*> srcs = spans.sources();
      const Bytes expected = reference_reduce(reduction, {spans.at(0), spans.at(1)}, 130);
      with_every_isa([&](Isa isa) {
        Bytes result(130 * size_of(reduction.dtype) + 1);
        reduce(reduction, result.data(), srcs.data(), 2, 130);
        result.pop_back();
        check_same(reduction.dtype, result, expected,
                   text_of(reduction, 2, 130) + " by " + name_of(isa));
      });
    }
  }
});

const Case several("reduce_to_all writes every destination, sources among them", [] {
  std::mt19937_64 random(8);
  for (const int nsrc : {1, 2, 3, 4}) {
    for (const Reduction& reduction : reductions(nsrc)) {
      for (const int64_t count : {1, 33, 300}) {
        Spans spans(reduction.dtype, nsrc + 1, count, size_of(reduction.dtype), random);
        const std::vector<const void*> srcs = spans.sources();
        std::vector<const uint8_t*> read;
        for (int r = 0; r < nsrc; ++r) read.push_back(spans.at(r));
        const Bytes expected = reference_reduce(reduction, read, count);
        std::vector<void*> dsts;  // all sources, and one more
        for (int d = nsrc; d >= 0; --d) dsts.push_back(spans.at(d));
        reduce_to_all(reduction, dsts.data(), nsrc + 1, srcs.data(), nsrc, count);
        for (int d = 0; d <= nsrc; ++d) {
          check_same(reduction.dtype, spans.bytes(d), expected,
                     text_of(reduction, nsrc, count) + " into " + std::to_string(d));
        }
      }
    }
  }
  const Reduction adasum{DataType::kFloat32, ReduceOp::kAdasum};
  float a[2] = {1, 0}, b[2] = {0, 1}, c[2] = {};
  const void* srcs[] = {a, b};
  void* dsts[] = {a, b, c};
  reduce_to_all(adasum, dsts, 3, srcs, 2, 2);
  for (const float* result : {a, b, c}) check(result[0] == 1 && result[1] == 1, "adasum");
});

// Small integers, whose sums and products are exact in every dtype, so that the order in which
// partial results are combined changes nothing. Complex numbers are 2 + i or 4 + 2i: no product of
// them has a part that is 0, whose sign could depend on the order.
Bytes small_numbers(DataType dtype, int64_t count, std::mt19937_64& random) {
  const int64_t size = size_of(dtype);
  Bytes bytes(count * size);
  for (int64_t i = 0; i < count; ++i) {
    const int value = static_cast<int>(random() % 2);
    const auto put = [&](const auto& number, int64_t offset, int64_t length) {
      std::memcpy(&bytes[i * size + offset], &number, length);
    };
    if (dtype == DataType::kComplex64) {
      put(2.0f * static_cast<float>(1 + value), 0, 4);
      put(static_cast<float>(1 + value), 4, 4);
    } else if (dtype == DataType::kComplex128) {
      put(2.0 * (1 + value), 0, 8);
      put(1.0 + value, 8, 8);
    } else if (dtype == DataType::kFloat64) {
      put(static_cast<double>(value), 0, 8);
    } else if (dtype == DataType::kFloat32) {
      put(static_cast<float>(value), 0, 4);
    } else if (is_floating(dtype)) {
      put(encode(dtype, static_cast<float>(value)), 0, size);
    } else {
      put(static_cast<int64_t>(value), 0, size);
    }
  }
  return bytes;
}

const Case two_steps(
    "partial results of groups of ranks, combined and finished, are the result", [] {
      constexpr int kRanks = 5, kFirst = 2;  // ranks 0, 1 and ranks 2, 3, 4
      std::mt19937_64 random(9);
      int compared = 0;
      for (const Reduction& reduction : reductions(kRanks)) {
        const auto type = partial_type(reduction);
        if (!type) continue;
        for (const int64_t count : {1, 40, 300}) {
          std::vector<Bytes> inputs;
          for (int r = 0; r < kRanks; ++r) {
            inputs.push_back(small_numbers(reduction.dtype, count, random));
          }
          std::vector<const void*> srcs;
          for (const Bytes& input : inputs) srcs.push_back(input.data());
          Bytes expected(count * size_of(reduction.dtype)), result(expected.size());
          // A prescale factor that is exact in every dtype, for the same reason as small numbers.
          Reduction exact = reduction;
          if (exact.prescale != 1.0) exact.prescale = 0.5;
          reduce(exact, expected.data(), srcs.data(), kRanks, count);
          with_every_isa([&](Isa isa) {
            Bytes a(count * size_of(*type)), b(a.size());
            reduce_partial(exact, a.data(), srcs.data(), kFirst, count);
            reduce_partial(exact, b.data(), srcs.data() + kFirst, kRanks - kFirst, count);
            const void* partials[] = {a.data(), b.data()};
            reduce(combine_partials(exact), a.data(), partials, 2, count);
            finish_partial(exact, result.data(), a.data(), count);
            check_same(reduction.dtype, result, expected,
                       text_of(exact, kRanks, count) + " in steps by " + name_of(isa));
            ++compared;
          });
        }
      }
      check(compared > 0, "nothing was compared");
    });

const Case one_group("a partial result of all ranks finishes to the same bits as reduce()", [] {
  std::mt19937_64 random(10);
  for (const Reduction& reduction : reductions(3)) {
    const auto type = partial_type(reduction);
    if (!type) continue;
    Spans spans(reduction.dtype, 3, 200, 0, random);
    const std::vector<const void*> srcs = spans.sources();
    const Bytes expected =
        reference_reduce(reduction, {spans.at(0), spans.at(1), spans.at(2)}, 200);
    with_every_isa([&](Isa isa) {
      Bytes partial(200 * size_of(*type)), result(expected.size());
      reduce_partial(reduction, partial.data(), srcs.data(), 3, 200);
      finish_partial(reduction, result.data(), partial.data(), 200);
      const std::string what = text_of(reduction, 3, 200) + " by " + name_of(isa);
      check_same(reduction.dtype, result, expected, what);
      if (*type == reduction.dtype) {  // in place
        finish_partial(reduction, partial.data(), partial.data(), 200);
        check_same(reduction.dtype, partial, expected, what + " in place");
      }
    });
  }
});

const Case types("which dtype partial results have", [] {
  using enum DataType;
  const auto type = [](DataType dtype, ReduceOp op, double factor = 1.0) {
    return partial_type({dtype, op, factor});
  };
  for (DataType dtype : {kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2Uz, kFloat32}) {
    for (ReduceOp op : kOps) check(type(dtype, op, 0.5) == kFloat32, name_of(dtype));
  }
  for (DataType dtype : {kFloat64, kComplex64, kComplex128, kBool}) {
    check(type(dtype, ReduceOp::kSum) == dtype, name_of(dtype));
  }
  check(type(kInt8, ReduceOp::kProduct) == kInt8, "a product of int8");
  check(type(kUInt32, ReduceOp::kAverage) == kInt64, "an average of uint32");
  check(!type(kInt64, ReduceOp::kAverage), "an average of int64");
  check(!type(kInt32, ReduceOp::kSum, 0.5), "a scaled integer");
  check(!type(kFloat32, ReduceOp::kAdasum), "Adasum");
  const Reduction combined = combine_partials({kBFloat16, ReduceOp::kAverage, 0.5, 2.0, 4});
  check(combined.dtype == kFloat32 && combined.op == ReduceOp::kSum && combined.prescale == 1.0 &&
            combined.postscale == 1.0 && combined.divisor == 1,
        "how averages are combined");
  check(combine_partials({kInt8, ReduceOp::kMin}).op == ReduceOp::kMin, "how minima are combined");
});

// Any divisor, also one that is no number of sources, and the extreme values.
template <typename T>
void check_averages(DataType dtype, const std::vector<T>& values) {
  for (const int64_t divisor : {1, 2, 3, 7, 64, 1000, 1 << 20}) {
    for (const T a : values) {
      for (const T b : values) {
        const void* srcs[] = {&a, &b, &b};
        const auto sum = static_cast<Int128>(a) + b + b;
        const auto expected = static_cast<T>(sum / divisor);
        const Reduction reduction{dtype, ReduceOp::kAverage, 1, 1, divisor};
        T result{};
        reduce(reduction, &result, srcs, 3, 1);
        check_eq(result, expected, text_of(reduction, 3, 1));
      }
    }
  }
}

template <typename T>
std::vector<T> extremes() {
  const T least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  return {least,
          static_cast<T>(least + 1),
          static_cast<T>(most / 3),
          static_cast<T>(0),
          static_cast<T>(1),
          static_cast<T>(2),
          static_cast<T>(-1),
          static_cast<T>(most - 1),
          most};
}

const Case averages("the averages of extreme integers are exact, whatever the divisor", [] {
  with_every_isa([](Isa) {
    check_averages(DataType::kInt8, extremes<int8_t>());
    check_averages(DataType::kUInt8, extremes<uint8_t>());
    check_averages(DataType::kInt16, extremes<int16_t>());
    check_averages(DataType::kUInt16, extremes<uint16_t>());
    check_averages(DataType::kInt32, extremes<int32_t>());
    check_averages(DataType::kUInt32, extremes<uint32_t>());
    check_averages(DataType::kInt64, extremes<int64_t>());
    check_averages(DataType::kUInt64, extremes<uint64_t>());
  });
});

const Case many("averages of very many small integers stay exact", [] {
  constexpr int kRanks = 1000;
  const std::vector<uint16_t> most(kRanks, 65535);
  std::vector<const void*> srcs;
  for (const uint16_t& value : most) srcs.push_back(&value);
  with_every_isa([&](Isa isa) {
    uint16_t result = 0;
    reduce({DataType::kUInt16, ReduceOp::kAverage, 1, 1, kRanks}, &result, srcs.data(), kRanks, 1);
    check_eq(result, 65535, name_of(isa));
  });
});

const Case refused("an instruction set that the processor lacks is not used", [] {
  const Isa best = isas().back();
  for (Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (!processor_has(isa)) check(!use_isa(isa), name_of(isa));
  }
  check(processor_has(Isa::kPlain), "every processor has the plain one");
  check_eq(name_of(current_isa()), name_of(best), "the best one is used");
});

}  // namespace
}  // namespace hvdtorch::test
