// Times the reduction kernels beside memcpy; run by benchmarks/kernels.py.
//
//     main ROUNDS BYTES[,BYTES...] NSRC[,NSRC...] DTYPE[,DTYPE...] OP[,OP...] ISA[,ISA...]
//
// prints one line per case: isa, dtype, op, nsrc, bytes, GB/s of the kernel, GB/s of memcpy. GB/s
// counts what is read and what is written: nsrc + 1 spans for a kernel, 2 for memcpy. The two take
// turns, in processor time, and each number is that of its best round: what else runs on the
// machine disturbs them least.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/isa.h"
#include "kernels/reduce_cpu.h"

namespace hvdtorch {
namespace {

constexpr double kSecondsPerRound = 0.004;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// The value of an enum by its name; ends the program if there is none.
template <typename Enum>
Enum named(const std::string& name, int values) {
  for (int value = 0; value < values; ++value) {
    if (name == name_of(static_cast<Enum>(value))) return static_cast<Enum>(value);
  }
  std::fprintf(stderr, "unknown name '%s'\n", name.c_str());
  std::exit(2);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory zeros(int64_t bytes) {
  Memory memory(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
  std::memset(memory.get(), 0, bytes);
  return memory;
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Body>
double seconds_per_call(int64_t calls, const Body& body) {
  const double begin = processor_seconds();
  for (int64_t i = 0; i < calls; ++i) body();
  return (processor_seconds() - begin) / static_cast<double>(calls);
}

void measure(Isa isa, const Reduction& reduction, int nsrc, int64_t bytes, int rounds) {
  use_isa(isa);
  std::vector<Memory> memory;
  std::vector<const void*> srcs;
  for (int r = 0; r < nsrc; ++r) {
    memory.push_back(zeros(bytes));
    srcs.push_back(memory.back().get());
  }
  const Memory dst = zeros(bytes);
  const auto kernel = [&] {
    reduce(reduction, dst.get(), srcs.data(), nsrc, bytes / size_of(reduction.dtype));
  };
  const auto copy = [&] {
    std::memcpy(dst.get(), srcs[0], bytes);
    asm volatile("" ::: "memory");  // else copies nobody reads could be left out
  };
  const auto calls_of = [](double seconds) {
    return std::max<int64_t>(1, static_cast<int64_t>(kSecondsPerRound / (seconds + 1e-9)));
  };
  const int64_t kernel_calls = calls_of(seconds_per_call(2, kernel));
  const int64_t copy_calls = calls_of(seconds_per_call(2, copy));
  double kernel_seconds = HUGE_VAL, copy_seconds = HUGE_VAL;
  for (int round = 0; round < rounds; ++round) {
    kernel_seconds = std::min(kernel_seconds, seconds_per_call(kernel_calls, kernel));
    copy_seconds = std::min(copy_seconds, seconds_per_call(copy_calls, copy));
  }
  const double size = static_cast<double>(bytes) * 1e-9;
  std::printf("%s %s %s %d %lld %.3f %.3f\n", name_of(isa), name_of(reduction.dtype),
              name_of(reduction.op), nsrc, static_cast<long long>(bytes),
              size * (nsrc + 1) / kernel_seconds, size * 2 / copy_seconds);
  std::fflush(stdout);
}

int run(char** argv) {
  const int rounds = std::atoi(argv[1]);
  for (const std::string& dtype : split(argv[4])) {
    for (const std::string& op : split(argv[5])) {
      for (const std::string& sources : split(argv[3])) {
        const int nsrc = std::atoi(sources.c_str());
        const Reduction reduction{named<DataType>(dtype, kNumDataTypes),
                                  named<ReduceOp>(op, kNumReduceOps), 1.0, 1.0, nsrc};
        if (!why_not_reducible(reduction).empty()) continue;
        for (const std::string& bytes : split(argv[2])) {
          for (const std::string& name : split(argv[6])) {
            const Isa isa = named<Isa>(name, kNumIsas);
            if (processor_has(isa))
              measure(isa, reduction, nsrc, std::atoll(bytes.c_str()), rounds);
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace hvdtorch

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "started by benchmarks/kernels.py\n");
    return 2;
  }
  return hvdtorch::run(argv);
}
