// What the kernel counts of a thread of this process: shows whether an idle thread really sleeps.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace hvdtorch::test {

// How often thread `tid` has gone to sleep so far.
inline long voluntary_switches(int tid) {
  std::ifstream status("/proc/self/task/" + std::to_string(tid) + "/status");
  const std::string key = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::stol(line.substr(key.size()));
  }
  fail("thread " + std::to_string(tid) + " is not there");
}

inline std::vector<long> voluntary_switches(const std::vector<int>& tids) {
  std::vector<long> counts;
  for (int tid : tids) counts.push_back(voluntary_switches(tid));
  return counts;
}

// The threads sleep through one second. What they were busy with may first come to its end.
inline void check_asleep(const std::vector<int>& tids) {
  using std::chrono::milliseconds;
  std::vector<long> before = voluntary_switches(tids);
  for (int i = 0; i < 100; ++i) {
    std::this_thread::sleep_for(milliseconds(100));
    const auto now = voluntary_switches(tids);
    if (now == before) break;
    before = now;
  }
  std::this_thread::sleep_for(milliseconds(1000));
  check_eq(voluntary_switches(tids), before, "voluntary context switches after an idle second");
}

inline long entries_of(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory),
                       std::filesystem::directory_iterator());
}
// Descriptors that this process holds.
inline long open_fds() { return entries_of("/proc/self/fd"); }
// Threads of this process.
inline long live_threads() { return entries_of("/proc/self/task"); }

}  // namespace hvdtorch::test
