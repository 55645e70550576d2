// Names and sizes of the core's vocabulary: one row per dtype, one name per op and kind.
#include "core/types.h"

#include <array>

namespace hvdtorch {
namespace {

enum class Family : uint8_t { kBool, kInteger, kFloating, kComplex };

struct DataTypeRow {
  DataType dtype;
  const char* name;
  int64_t size;
  Family family;
};

constexpr std::array<DataTypeRow, kNumDataTypes> kDataTypes = {{
    {DataType::kBool, "bool", 1, Family::kBool},
    {DataType::kUInt8, "uint8", 1, Family::kInteger},
    {DataType::kInt8, "int8", 1, Family::kInteger},
    {DataType::kInt16, "int16", 2, Family::kInteger},
    {DataType::kInt32, "int32", 4, Family::kInteger},
    {DataType::kInt64, "int64", 8, Family::kInteger},
    {DataType::kUInt16, "uint16", 2, Family::kInteger},
    {DataType::kUInt32, "uint32", 4, Family::kInteger},
    {DataType::kUInt64, "uint64", 8, Family::kInteger},
    {DataType::kFloat16, "float16", 2, Family::kFloating},
    {DataType::kBFloat16, "bfloat16", 2, Family::kFloating},
    {DataType::kFloat32, "float32", 4, Family::kFloating},
    {DataType::kFloat64, "float64", 8, Family::kFloating},
    {DataType::kComplex64, "complex64", 8, Family::kComplex},
    {DataType::kComplex128, "complex128", 16, Family::kComplex},
    {DataType::kFloat8E4M3, "float8_e4m3fn", 1, Family::kFloating},
    {DataType::kFloat8E5M2, "float8_e5m2", 1, Family::kFloating},
    {DataType::kFloat8E4M3Uz, "float8_e4m3fnuz", 1, Family::kFloating},
    {DataType::kFloat8E5M2Uz, "float8_e5m2fnuz", 1, Family::kFloating},
}};

constexpr bool rows_are_in_order() {
  for (size_t i = 0; i < kDataTypes.size(); ++i) {
    if (static_cast<size_t>(kDataTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_are_in_order(), "kDataTypes is indexed by DataType");

constexpr std::array<const char*, kNumReduceOps> kReduceOps = {"Average", "Sum", "Adasum",
                                                               "Min",     "Max", "Product"};
constexpr std::array<const char*, kNumOpKinds> kOpKinds = {
    "allreduce", "allgather", "broadcast",       "alltoall",          "reducescatter",
    "barrier",   "join",      "add_process_set", "remove_process_set"};

// Names are asked for in error texts too, about values that came from a peer: never out of range.
constexpr DataTypeRow kUnknown = {DataType::kBool, "unknown", 0, Family::kBool};

const DataTypeRow& row_of(DataType dtype) noexcept {
  const auto index = static_cast<size_t>(dtype);
  return index < kDataTypes.size() ? kDataTypes[index] : kUnknown;
}

template <typename Names, typename Value>
const char* name_in(const Names& names, Value value) noexcept {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names[index] : "unknown";
}

}  // namespace

int64_t size_of(DataType dtype) noexcept { return row_of(dtype).size; }

const char* name_of(DataType dtype) noexcept { return row_of(dtype).name; }

const char* name_of(ReduceOp op) noexcept { return name_in(kReduceOps, op); }

const char* name_of(OpKind kind) noexcept { return name_in(kOpKinds, kind); }

std::string name_of(Device device) {
  if (device.kind == DeviceKind::kCpu) return "CPU";
  return "GPU " + std::to_string(device.index);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool is_floating(DataType dtype) noexcept { return row_of(dtype).family == Family::kFloating; }

bool is_complex(DataType dtype) noexcept { return row_of(dtype).family == Family::kComplex; }

bool is_integer(DataType dtype) noexcept { return row_of(dtype).family == Family::kInteger; }

}  // namespace hvdtorch
