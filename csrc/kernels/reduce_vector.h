// The reduction kernel, in vectors: run(), a template of the format of the sources, that of the
// result (vector_formats.h) and an op, which combines two vectors of Values. It works in *groups*
// of four vectors, which stay in registers from the first source to the result; the last,
// incomplete group is copied to and from a whole one, so there is no second code for single
// elements. No step has a fused multiply-add (the build forbids them), so every instruction set
// gives the same bits.
//
// To add an op: a struct here, and a column in reduce_rows.h.
#pragma once

#include "kernels/reduce_table.h"
#include "kernels/vector_formats.h"

namespace hvdtorch {
namespace {

constexpr int kAhead = 2048;  // bytes that are fetched before they are read

// --- ops ---

struct Sum {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a + b;
  }
};

struct Product {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a * b;
  }
};

// A NaN on either side is the result: `a` by the first test, `b` because the second fails.
struct Min {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a != a ? a : (a < b ? a : b);
  }
};

struct Max {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return a != a ? a : (a > b ? a : b);
  }
};

struct Or {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return ((a | b) != 0) ? V{} + 1 : V{};
  }
};

struct And {
  template <typename V>
  HVDTORCH_INLINE static V apply(V a, V b) {
    return ((a != 0) & (b != 0)) ? V{} + 1 : V{};
  }
};

// --- groups ---

template <typename V>
struct Group {
  V a, b, c, d;
};

template <typename V>
struct Two {
  V a, b;
};

template <typename V>
struct One {
  V a;
};

// One vector at `at`, which need not be aligned.
template <typename V>
HVDTORCH_INLINE V load(const void* at) {
  V v;
  __builtin_memcpy(&v, at, sizeof(V));
  return v;
}

template <typename V>
HVDTORCH_INLINE void store(void* at, V v) {
  __builtin_memcpy(at, &v, sizeof(V));
}

template <typename In>
HVDTORCH_INLINE Group<typename In::ValueVector> load_group(const char* at) {
  if constexpr (!kIsPacked<In>) {
    using V = typename In::StoredVector;
    return {In::widen(load<V>(at)), In::widen(load<V>(at + sizeof(V))),
            In::widen(load<V>(at + 2 * sizeof(V))), In::widen(load<V>(at + 3 * sizeof(V)))};
  } else if constexpr (In::kPerWord == 2) {
    using V = typename In::Codes;
    const V first = load<V>(at), second = load<V>(at + sizeof(V));
    return {In::template widen<0>(first), In::template widen<1>(first),
            In::template widen<0>(second), In::template widen<1>(second)};
  } else {
    const auto all = load<typename In::Codes>(at);
    return {In::template widen<0>(all), In::template widen<1>(all), In::template widen<2>(all),
            In::template widen<3>(all)};
  }
}

template <typename Out>
HVDTORCH_INLINE auto narrow_group(const Group<typename Out::ValueVector>& group) {
  if constexpr (!kIsPacked<Out>) {
    return Group<typename Out::StoredVector>{Out::narrow(group.a), Out::narrow(group.b),
                                             Out::narrow(group.c), Out::narrow(group.d)};
  } else if constexpr (Out::kPerWord == 2) {
    return Two<typename Out::Codes>{
        Out::template narrow<0>(group.a) | Out::template narrow<1>(group.b),
        Out::template narrow<0>(group.c) | Out::template narrow<1>(group.d)};
  } else {
    return One<typename Out::Codes>{
        Out::template narrow<0>(group.a) | Out::template narrow<1>(group.b) |
        Out::template narrow<2>(group.c) | Out::template narrow<3>(group.d)};
  }
}

template <typename V>
HVDTORCH_INLINE void store_group(char* at, const Group<V>& group) {
  store(at, group.a);
  store(at + sizeof(V), group.b);
  store(at + 2 * sizeof(V), group.c);
  store(at + 3 * sizeof(V), group.d);
}

template <typename V>
HVDTORCH_INLINE void store_group(char* at, const One<V>& group) {
  store(at, group.a);
}

template <typename V>
HVDTORCH_INLINE void store_group(char* at, const Two<V>& group) {
  store(at, group.a);
  store(at + sizeof(V), group.b);
}

template <typename V, typename T>
HVDTORCH_INLINE void scale(Group<V>& group, T factor) {
  group.a *= factor;
  group.b *= factor;
  group.c *= factor;
  group.d *= factor;
}

// --- the kernel ---

template <typename In, typename Out, typename Op>
void run(const Work& work) {
  using Value = typename In::Value;
  using V = typename In::ValueVector;
  constexpr int kGroup = 4 * In::kLanes;
  constexpr bool kFloats = !kIsInteger<Value>;
  constexpr int64_t kIn = sizeof(typename In::Stored), kOut = sizeof(typename Out::Stored);
  // Factors of integers: reduce_scalar.cc. A power of two has an exact inverse, and multiplying by
  // it rounds to the same bits as the division, which is slower.
  const bool prescales = kFloats && work.prescale != 1.0;
  const bool postscales = kFloats && work.postscale != 1.0;
  const bool inverts = kFloats && (work.divisor & (work.divisor - 1)) == 0;
  const bool divides = kFloats && !inverts;
  const bool finishes = postscales || divides || work.divisor != 1;
  const auto pre = static_cast<Value>(work.prescale);
  const auto post = static_cast<Value>(work.postscale);
  const auto divisor = static_cast<Value>(work.divisor);
  const auto inverse = static_cast<Value>(1.0 / static_cast<double>(work.divisor));

  alignas(64) char whole[kGroup * (kIn > kOut ? kIn : kOut)];
  for (int64_t begin = 0; begin < work.count; begin += kGroup) {
    const int64_t left = work.count - begin;
    const bool is_whole = left >= kGroup;
    const auto read = [&](int r) __attribute__((always_inline)) {
      const char* from = static_cast<const char*>(work.srcs[r]) + begin * kIn;
      if (!is_whole) [[unlikely]] {
        __builtin_memset(whole, 0, sizeof(whole));
        __builtin_memcpy(whole, from, static_cast<size_t>(left * kIn));
        from = whole;
      }
      Group<V> group = load_group<In>(from);
      // Ahead of the processor's own prefetching, which stops at the end of every page.
      for (int64_t k = 0; k < kGroup * kIn; k += 64) __builtin_prefetch(from + kAhead + k);
      if (prescales) scale(group, pre);
      return group;
    };
    Group<V> sum = read(0);
    for (int r = 1; r < work.nsrc; ++r) {
      const Group<V> next = read(r);
      sum = {Op::apply(sum.a, next.a), Op::apply(sum.b, next.b), Op::apply(sum.c, next.c),
             Op::apply(sum.d, next.d)};
    }
    if constexpr (kFloats) {
      if (finishes) {
        if (postscales) scale(sum, post);
        if (divides) {
          sum = {sum.a / divisor, sum.b / divisor, sum.c / divisor, sum.d / divisor};
        } else {
          scale(sum, inverse);
        }
      }
    }
    const auto result = narrow_group<Out>(sum);
    if (is_whole) [[likely]] {
      for (int d = 0; d < work.ndst; ++d) {
        store_group(static_cast<char*>(work.dsts[d]) + begin * kOut, result);
      }
    } else {
      store_group(whole, result);
      for (int d = 0; d < work.ndst; ++d) {
        __builtin_memcpy(static_cast<char*>(work.dsts[d]) + begin * kOut, whole,
                         static_cast<size_t>(left * kOut));
      }
    }
  }
}

}  // namespace
}  // namespace hvdtorch
