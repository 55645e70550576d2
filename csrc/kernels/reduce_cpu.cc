// Which kernel computes what: those of reduce_rows.h for the instruction set in use, those of
// reduce_scalar.h for the rare cases, adasum_cpu.h for Adasum.
#include "kernels/reduce_cpu.h"

#include <cstring>

#include "kernels/adasum_cpu.h"
#include "kernels/isa.h"
#include "kernels/reduce_scalar.h"
#include "kernels/reduce_table.h"

namespace hvdtorch {
namespace {

const KernelTable& table() {
#if defined(__x86_64__)
  switch (current_isa()) {
    case Isa::kAvx512:
      return kernels_avx512();
    case Isa::kAvx2:
      return kernels_avx2();
    case Isa::kPlain:
      break;
  }
#endif
  return kernels_plain();
}

Kernel kernel_in(const KernelRow& row, ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return row.average;
    case ReduceOp::kSum:
      return row.sum;
    case ReduceOp::kMin:
      return row.min;
    case ReduceOp::kMax:
      return row.max;
    case ReduceOp::kProduct:
      return row.product;
    case ReduceOp::kAdasum:
      return nullptr;
  }
  return nullptr;
}

Kernel find_kernel(const Reduction& reduction, int nsrc) {
  const auto index = static_cast<size_t>(reduction.dtype);
  if (index >= kNumDataTypes) return nullptr;
  if (const Kernel kernel = scalar_kernel(reduction, nsrc)) return kernel;
  return kernel_in(table().whole[index], reduction.op);
}

// What is left of a reduction before, and after, the partial results are combined.
Reduction first_step(const Reduction& reduction) {
  Reduction step = combine_partials(reduction);
  step.dtype = reduction.dtype;
  step.prescale = reduction.prescale;
  return step;
}

Reduction last_step(const Reduction& reduction) {
  Reduction step = reduction;
  step.prescale = 1.0;
  return step;
}

}  // namespace

std::string why_not_reducible(const Reduction& reduction) {
  const std::string what = std::string(name_of(reduction.op)) + " of " + name_of(reduction.dtype);
  const bool is_bool = reduction.dtype == DataType::kBool;
  if (reduction.op == ReduceOp::kAdasum) {
    return has_adasum(reduction.dtype)
               ? ""
               : what + " is not available: cast to float16, bfloat16, float32 or float64 first";
  }
  if (find_kernel(reduction, 1) == nullptr) {
    if (is_bool) return what + " has no meaning: use Sum (logical or), or cast to a number first";
    if (is_complex(reduction.dtype)) return what + " has no meaning: complex numbers have no order";
    return what + " is not available";
  }
  if (is_bool && (reduction.prescale != 1.0 || reduction.postscale != 1.0)) {
    return what + " cannot be scaled: leave the prescale and postscale factors at 1";
  }
  if (reduction.op == ReduceOp::kAverage && reduction.divisor < 1) {
    return what + " needs a divisor of at least 1, not " + std::to_string(reduction.divisor);
  }
  return "";
}

void reduce(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
            int64_t count) {
  reduce_to_all(reduction, &dst, 1, srcs, nsrc, count);
}

void reduce_to_all(const Reduction& reduction, void* const* dsts, int ndst, const void* const* srcs,
                   int nsrc, int64_t count) {
  if (count == 0) return;
  const auto copy_to = [&](int first, const void* from) {
    for (int d = first; d < ndst; ++d) {
      if (dsts[d] != from) std::memcpy(dsts[d], from, count * size_of(reduction.dtype));
    }
  };
  const int64_t divisor = reduction.op == ReduceOp::kAverage ? reduction.divisor : 1;
  const bool scales = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (nsrc == 1 && !scales && divisor == 1) return copy_to(0, srcs[0]);
  if (reduction.op == ReduceOp::kAdasum) {
    adasum_reduce(reduction, dsts[0], srcs, nsrc, count);
    return copy_to(1, dsts[0]);
  }
  find_kernel(reduction, nsrc)(
      {dsts, ndst, srcs, nsrc, count, reduction.prescale, reduction.postscale, divisor});
}

std::optional<DataType> partial_type(const Reduction& reduction) {
  const DataType dtype = reduction.dtype;
  if (reduction.op == ReduceOp::kAdasum) return std::nullopt;
  if (is_floating(dtype)) return size_of(dtype) < 4 ? DataType::kFloat32 : dtype;
  if (!is_integer(dtype)) return dtype;
  if (reduction.prescale != 1.0 || reduction.postscale != 1.0) return std::nullopt;
  if (reduction.op != ReduceOp::kAverage) return dtype;
  if (size_of(dtype) == 8) return std::nullopt;
  return DataType::kInt64;
}

Reduction combine_partials(const Reduction& reduction) {
  const bool averages = reduction.op == ReduceOp::kAverage;
  return {.dtype = partial_type(reduction).value(), .op = averages ? ReduceOp::kSum : reduction.op};
}

void reduce_partial(const Reduction& reduction, void* dst, const void* const* srcs, int nsrc,
                    int64_t count) {
  if (partial_type(reduction).value() == reduction.dtype) {
    return reduce(first_step(reduction), dst, srcs, nsrc, count);
  }
  const KernelRow& row = table().partial[static_cast<size_t>(reduction.dtype)];
  kernel_in(row, reduction.op)({&dst, 1, srcs, nsrc, count, reduction.prescale});
}

void finish_partial(const Reduction& reduction, void* dst, const void* partial, int64_t count) {
  const DataType type = partial_type(reduction).value();
  if (type == reduction.dtype) return reduce(last_step(reduction), dst, &partial, 1, count);
  if (type == DataType::kInt64) {
    return finish_average(reduction, dst, static_cast<const int64_t*>(partial), count);
  }
  const int64_t divisor = reduction.op == ReduceOp::kAverage ? reduction.divisor : 1;
  table().finish[static_cast<size_t>(reduction.dtype)](
      {&dst, 1, &partial, 1, count, 1.0, reduction.postscale, divisor});
}

}  // namespace hvdtorch
