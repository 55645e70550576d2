// The vocabulary of the core: what kind of operation, on what kind of data.
// Nothing here knows torch, CUDA, Python or a network.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hvdtorch {

// Values are part of the wire format: append, never renumber.
enum class DataType : uint8_t {
  kBool = 0,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kFloat8E4M3,    // torch.float8_e4m3fn
  kFloat8E5M2,    // torch.float8_e5m2
  kFloat8E4M3Uz,  // torch.float8_e4m3fnuz
  kFloat8E5M2Uz,  // torch.float8_e5m2fnuz
};
inline constexpr int kNumDataTypes = 19;

// Values are part of the public API (hvd.Average == 0 ...) and of the wire format.
enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};
inline constexpr int kNumReduceOps = 6;

enum class OpKind : uint8_t {
  kAllreduce = 0,
  kAllgather,
  kBroadcast,
  kAlltoall,
  kReducescatter,
  kBarrier,
  // About the job itself, on the global set.
  kJoin,
  kAddProcessSet,     // the payload holds the ranks, int64
  kRemoveProcessSet,  // the payload holds the id, int64
};
inline constexpr int kNumOpKinds = 9;
inline constexpr int kNumDataKinds = 6;  // those before kJoin

enum class DeviceKind : uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int16_t index = -1;
  friend bool operator==(const Device&, const Device&) = default;
};

int64_t size_of(DataType) noexcept;                   // bytes per element
const char* name_of(DataType) noexcept;               // torch's name without prefix: "float32"
const char* name_of(ReduceOp) noexcept;               // "Average"
const char* name_of(OpKind) noexcept;                 // "allreduce"
std::string name_of(Device);                          // "CPU", "GPU 0"
std::string shape_text(const std::vector<int64_t>&);  // "[4, 3]", "[]"
bool is_floating(DataType) noexcept;                  // includes float8, excludes complex
bool is_complex(DataType) noexcept;
bool is_integer(DataType) noexcept;  // excludes bool

// An error every rank of the job is told about: HorovodInternalError in Python.
struct InternalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace hvdtorch
