// The tables of reduction kernels: which format and op each dtype and ReduceOp has. Included once
// per instruction set, by a file that has switched the compiler to it (reduce_avx512.cc and its
// siblings).
#pragma once

#include "kernels/reduce_vector.h"

namespace hvdtorch {
namespace {

// A complex number is two real ones, but for products.
template <Kernel kReal>
void by_parts(const Work& work) {
  Work twice = work;
  twice.count *= 2;
  kReal(twice);
}

// From one format to another; the two are the same, or that of the result is float32.
template <typename In, typename Out>
constexpr KernelRow float_row() {
  constexpr Kernel sum = run<In, Out, Sum>;
  return {sum, sum, run<In, Out, Min>, run<In, Out, Max>, run<In, Out, Product>};
}

template <typename Narrow>
constexpr KernelRow packed_row() {
  return float_row<Packed<Narrow>, Packed<Narrow>>();
}

#if defined(HVDTORCH_HAS_F16C)  // whose conversions take codes that lie side by side
constexpr KernelRow kFloat16Row = float_row<Float16, Float16>();
#else
constexpr KernelRow kFloat16Row = packed_row<Float16>();
#endif

template <typename Wrapping, typename T, typename Average>
constexpr KernelRow integer_row() {
  return {run<Average, Average, Sum>, run<Plain<Wrapping>, Plain<Wrapping>, Sum>,
          run<Plain<T>, Plain<T>, Min>, run<Plain<T>, Plain<T>, Max>,
          run<Plain<Wrapping>, Plain<Wrapping>, Product>};
}

template <typename Wrapping, typename T>
constexpr KernelRow long_row() {  // averages of these: reduce_scalar.cc
  return {nullptr, run<Plain<Wrapping>, Plain<Wrapping>, Sum>, run<Plain<T>, Plain<T>, Min>,
          run<Plain<T>, Plain<T>, Max>, run<Plain<Wrapping>, Plain<Wrapping>, Product>};
}

template <typename T>
constexpr KernelRow complex_row() {
  constexpr Kernel sum = by_parts<run<Plain<T>, Plain<T>, Sum>>;
  return {sum, sum, nullptr, nullptr, nullptr};
}

constexpr KernelRow bool_row() {
  using Bool = Plain<uint8_t>;
  return {nullptr, run<Bool, Bool, Or>, run<Bool, Bool, And>, run<Bool, Bool, Or>,
          run<Bool, Bool, And>};
}

template <typename T>
constexpr KernelRow partial_average() {
  return {run<SumInInt64<T>, Plain<int64_t>, Sum>, nullptr, nullptr, nullptr, nullptr};
}

constexpr KernelRow kNothing = {nullptr, nullptr, nullptr, nullptr, nullptr};

template <typename Narrow>
constexpr Kernel finish() {
  return run<Plain<float>, Narrow, Sum>;
}

constexpr KernelTable kKernels = {
    .whole = {
        /* bool            */ bool_row(),
        /* uint8           */ integer_row<uint8_t, uint8_t, Packed<AverageInFloat<uint8_t>>>(),
        /* int8            */ integer_row<uint8_t, int8_t, Packed<AverageInFloat<int8_t>>>(),
        /* int16           */ integer_row<uint16_t, int16_t, Packed<AverageInFloat<int16_t>>>(),
        /* int32           */ integer_row<uint32_t, int32_t, AverageInDouble<int32_t>>(),
        /* int64           */ long_row<uint64_t, int64_t>(),
        /* uint16          */ integer_row<uint16_t, uint16_t, Packed<AverageInFloat<uint16_t>>>(),
        /* uint32          */ integer_row<uint32_t, uint32_t, AverageInDouble<uint32_t>>(),
        /* uint64          */ long_row<uint64_t, uint64_t>(),
        /* float16         */ kFloat16Row,
        /* bfloat16        */ packed_row<BFloat16>(),
        /* float32         */ float_row<Plain<float>, Plain<float>>(),
        /* float64         */ float_row<Plain<double>, Plain<double>>(),
        /* complex64       */ complex_row<float>(),
        /* complex128      */ complex_row<double>(),
        /* float8_e4m3fn   */ packed_row<Float8<Float8E4M3>>(),
        /* float8_e5m2     */ packed_row<Float8<Float8E5M2>>(),
        /* float8_e4m3fnuz */ packed_row<Float8<Float8E4M3Uz>>(),
        /* float8_e5m2fnuz */ packed_row<Float8<Float8E5M2Uz>>(),
    },
    .partial = {
        /* bool            */ kNothing,
        /* uint8           */ partial_average<uint8_t>(),
        /* int8            */ partial_average<int8_t>(),
        /* int16           */ partial_average<int16_t>(),
        /* int32           */ partial_average<int32_t>(),
        /* int64           */ kNothing,
        /* uint16          */ partial_average<uint16_t>(),
        /* uint32          */ partial_average<uint32_t>(),
        /* uint64          */ kNothing,
        /* float16         */ float_row<Float16, Plain<float>>(),
        /* bfloat16        */ float_row<BFloat16, Plain<float>>(),
        /* float32         */ kNothing,
        /* float64         */ kNothing,
        /* complex64       */ kNothing,
        /* complex128      */ kNothing,
        /* float8_e4m3fn   */ float_row<Float8<Float8E4M3>, Plain<float>>(),
        /* float8_e5m2     */ float_row<Float8<Float8E5M2>, Plain<float>>(),
        /* float8_e4m3fnuz */ float_row<Float8<Float8E4M3Uz>, Plain<float>>(),
        /* float8_e5m2fnuz */ float_row<Float8<Float8E5M2Uz>, Plain<float>>(),
    },
    .finish =
        {
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            /* float16         */ finish<Float16>(),
            /* bfloat16        */ finish<BFloat16>(),
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            /* float8_e4m3fn   */ finish<Float8<Float8E4M3>>(),
            /* float8_e5m2     */ finish<Float8<Float8E5M2>>(),
            /* float8_e4m3fnuz */ finish<Float8<Float8E4M3Uz>>(),
            /* float8_e5m2fnuz */ finish<Float8<Float8E5M2Uz>>(),
        },
};

}  // namespace
}  // namespace hvdtorch
