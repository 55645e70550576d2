// See reduce_reference.h.
#include "reduce_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

namespace hvdtorch::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_signed(DataType dtype) {
  return dtype == DataType::kInt8 || dtype == DataType::kInt16 || dtype == DataType::kInt32 ||
         dtype == DataType::kInt64;
}

uint64_t bits_at(const uint8_t* at, int64_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, size);  // little-endian
  return bits;
}

template <typename T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

Int128 wrap(DataType dtype, Int128 value) {
  const Int128 range = static_cast<Int128>(1) << (8 * size_of(dtype));
  value %= range;
  if (value < 0) value += range;
  return is_signed(dtype) && value >= range / 2 ? value - range : value;
}

// Modulo 2^128, hence also modulo the dtype's range; a signed product could overflow.
Int128 times(Int128 a, Int128 b) {
  __extension__ using Unsigned = unsigned __int128;
  return static_cast<Int128>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
}

Int128 scaled(DataType dtype, Int128 value, double factor) {
  if (factor == 1.0) return value;
  return wrap(dtype, static_cast<Int128>(std::trunc(static_cast<double>(value) * factor)));
}

Int128 reduce_integers(const Reduction& reduction, std::vector<Int128> values) {
  for (Int128& value : values) value = scaled(reduction.dtype, value, reduction.prescale);
  Int128 result = values[0];
  for (size_t r = 1; r < values.size(); ++r) {
    const Int128 value = values[r];
    switch (reduction.op) {
      case ReduceOp::kMin:
        result = std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = std::max(result, value);
        break;
      case ReduceOp::kProduct:
        result = wrap(reduction.dtype, times(result, value));
        break;
      default:
        result += value;
    }
  }
  if (reduction.op == ReduceOp::kAverage) result /= reduction.divisor;
  return wrap(reduction.dtype,
              scaled(reduction.dtype, wrap(reduction.dtype, result), reduction.postscale));
}

uint8_t reduce_bools(const Reduction& reduction, const std::vector<bool>& values) {
  const bool any = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kMax;
  const auto count = std::count(values.begin(), values.end(), true);
  return any ? count > 0 : count == static_cast<int64_t>(values.size());
}

template <typename T>
T reduce_floats(const Reduction& reduction, std::vector<T> values) {
  if (reduction.prescale != 1.0) {
    for (T& value : values) value *= static_cast<T>(reduction.prescale);
  }
  T result = values[0];
  for (size_t r = 1; r < values.size(); ++r) {
    const T value = values[r];
    switch (reduction.op) {
      case ReduceOp::kMin:
      case ReduceOp::kMax:
        if (std::isnan(result) || std::isnan(value)) {
          result = std::numeric_limits<T>::quiet_NaN();
        } else if (reduction.op == ReduceOp::kMin ? value <= result : value >= result) {
          result = value;
        }
        break;
      case ReduceOp::kProduct:
        result *= value;
        break;
      default:
        result += value;
    }
  }
  if (reduction.postscale != 1.0) result *= static_cast<T>(reduction.postscale);
  if (reduction.op == ReduceOp::kAverage) result /= static_cast<T>(reduction.divisor);
  return result;
}

// Sum and Average by parts, Product as schoolbooks have it.
template <typename T>
void reduce_complex(const Reduction& reduction, const std::vector<const uint8_t*>& at,
                    uint8_t* out) {
  std::vector<T> re, im;
  for (const uint8_t* p : at) {
    re.push_back(read<T>(p));
    im.push_back(read<T>(p + sizeof(T)));
  }
  T result[2];
  if (reduction.op == ReduceOp::kProduct) {
    const auto pre = static_cast<T>(reduction.prescale), post = static_cast<T>(reduction.postscale);
    T a = re[0] * pre, b = im[0] * pre;
    for (size_t r = 1; r < re.size(); ++r) {
      const T c = re[r] * pre, d = im[r] * pre;
      const T real = a * c - b * d;
      b = a * d + b * c;
      a = real;
    }
    result[0] = a * post;
    result[1] = b * post;
  } else {
    result[0] = reduce_floats(reduction, re);
    result[1] = reduce_floats(reduction, im);
  }
  std::memcpy(out, result, sizeof(result));
}

// All finite, non-negative values of a format by code, and one more: where the next would be.
const std::vector<double>& magnitudes(DataType dtype) {
  thread_local std::map<DataType, std::vector<double>> known;
  std::vector<double>& values = known[dtype];
  if (values.empty()) {
    const FloatFormat& format = format_of(dtype);
    const uint32_t sign = 1u << (format.exponent_bits + format.mantissa_bits);
    for (uint32_t code = 0; code < sign && std::isfinite(decode(dtype, code)); ++code) {
      values.push_back(decode(dtype, code));
    }
    values.push_back(2 * values.back() - values[values.size() - 2]);
  }
  return values;
}

}  // namespace

const FloatFormat& format_of(DataType dtype) {
  static const std::map<DataType, FloatFormat> formats = {
      {DataType::kFloat16, {5, 10, 15, true, false, false}},
      {DataType::kBFloat16, {8, 7, 127, true, false, false}},
      {DataType::kFloat8E4M3, {4, 3, 7, false, false, true}},
      {DataType::kFloat8E5M2, {5, 2, 15, true, false, false}},
      {DataType::kFloat8E4M3Uz, {4, 3, 8, false, true, false}},
      {DataType::kFloat8E5M2Uz, {5, 2, 16, false, true, false}},
  };
  return formats.at(dtype);
}

double decode(DataType dtype, uint32_t code) {
  const FloatFormat& format = format_of(dtype);
  const uint32_t sign = 1u << (format.exponent_bits + format.mantissa_bits);
  const uint32_t magnitude = code & (sign - 1);
  const uint32_t exponent = magnitude >> format.mantissa_bits;
  const uint32_t fraction = magnitude & ((1u << format.mantissa_bits) - 1);
  if (format.unsigned_zero) {
    if (code == sign) return kNan;
  } else if (format.has_infinity) {
    if (exponent + 1 == 1u << format.exponent_bits) {
      return fraction != 0 ? kNan : code & sign ? -kInfinity : kInfinity;
    }
  } else if (magnitude == sign - 1) {
    return kNan;
  }
  const double significand = std::ldexp(fraction, -format.mantissa_bits) + (exponent > 0);
  const int power = static_cast<int>(exponent > 0 ? exponent : 1) - format.bias;
  return std::ldexp(code & sign ? -significand : significand, power);
}

uint32_t encode(DataType dtype, float value) {
  const FloatFormat& format = format_of(dtype);
  const uint32_t sign = 1u << (format.exponent_bits + format.mantissa_bits);
  const uint32_t nan = format.unsigned_zero ? sign : sign - 1;
  if (std::isnan(value)) return nan;
  const std::vector<double>& values = magnitudes(dtype);
  const auto overflow = static_cast<uint32_t>(values.size() - 1);
  const double magnitude = std::fabs(value);
  uint32_t code = overflow;
  if (magnitude < values.back()) {
    code = static_cast<uint32_t>(std::upper_bound(values.begin(), values.end(), magnitude) -
                                 values.begin() - 1);
    const double below = magnitude - values[code], above = values[code + 1] - magnitude;
    if (above < below || (above == below && code % 2 == 1)) ++code;
  }
  if (code == overflow) {
    if (format.unsigned_zero) return nan;
    if (format.saturates) --code;  // else the code after the largest finite one is infinity's
  }
  if (code == 0 && format.unsigned_zero) return 0;
  return std::signbit(value) ? code | sign : code;
}

std::vector<uint8_t> reference_reduce(const Reduction& reduction,
                                      const std::vector<const uint8_t*>& srcs, int64_t count) {
  const DataType dtype = reduction.dtype;
  const int64_t size = size_of(dtype);
  std::vector<uint8_t> result(count * size);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<const uint8_t*> at;
    for (const uint8_t* src : srcs) at.push_back(src + i * size);
    uint8_t* out = result.data() + i * size;
    if (dtype == DataType::kBool) {
      std::vector<bool> values;
      for (const uint8_t* p : at) values.push_back(*p != 0);
      *out = reduce_bools(reduction, values);
    } else if (is_integer(dtype)) {
      std::vector<Int128> values;
      for (const uint8_t* p : at) values.push_back(wrap(dtype, bits_at(p, size)));
      const Int128 value = reduce_integers(reduction, values);
      std::memcpy(out, &value, size);
    } else if (dtype == DataType::kComplex64) {
      reduce_complex<float>(reduction, at, out);
    } else if (dtype == DataType::kComplex128) {
      reduce_complex<double>(reduction, at, out);
    } else if (dtype == DataType::kFloat64) {
      std::vector<double> values;
      for (const uint8_t* p : at) values.push_back(read<double>(p));
      const double value = reduce_floats(reduction, values);
      std::memcpy(out, &value, size);
    } else {
      const bool is_float32 = dtype == DataType::kFloat32;
      std::vector<float> values;
      for (const uint8_t* p : at) {
        values.push_back(is_float32 ? read<float>(p)
                                    : static_cast<float>(
                                          decode(dtype, static_cast<uint32_t>(bits_at(p, size)))));
      }
      const float value = reduce_floats(reduction, values);
      const uint32_t bits = is_float32 ? 0 : encode(dtype, value);
      std::memcpy(out, is_float32 ? static_cast<const void*>(&value) : &bits, size);
    }
  }
  return result;
}

bool same_element(DataType dtype, const uint8_t* a, const uint8_t* b) {
  const int64_t size = size_of(dtype);
  if (std::memcmp(a, b, size) == 0) return true;
  const auto both_nan_or_same = [](auto x, auto y) {
    return std::memcmp(&x, &y, sizeof(x)) == 0 || (std::isnan(x) && std::isnan(y));
  };
  switch (dtype) {
    case DataType::kFloat32:
      return both_nan_or_same(read<float>(a), read<float>(b));
    case DataType::kFloat64:
      return both_nan_or_same(read<double>(a), read<double>(b));
    case DataType::kComplex64:
      return both_nan_or_same(read<float>(a), read<float>(b)) &&
             both_nan_or_same(read<float>(a + 4), read<float>(b + 4));
    case DataType::kComplex128:
      return both_nan_or_same(read<double>(a), read<double>(b)) &&
             both_nan_or_same(read<double>(a + 8), read<double>(b + 8));
    default:
      if (!is_floating(dtype)) return false;
      return std::isnan(decode(dtype, static_cast<uint32_t>(bits_at(a, size)))) &&
             std::isnan(decode(dtype, static_cast<uint32_t>(bits_at(b, size))));
  }
}

}  // namespace hvdtorch::test
