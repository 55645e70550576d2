// A job of simulated ranks: each a Runtime of its own with its two threads, over channels within
// the process, over socket pairs or over rings, and host collectives over in-memory links.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "channel/channel.h"
#include "check.h"
#include "core/runtime.h"
#include "transport/host_collectives.h"
#include "transport/memory_link.h"

namespace hvdtorch::test {

// A wait that is longer has found a hang.
inline constexpr std::chrono::seconds kHang{60};

enum class Wire { kLocal, kSockets, kRings };
inline constexpr Wire kWires[] = {Wire::kLocal, Wire::kSockets, Wire::kRings};

// Graces that keep tests of ends short; the order of the two is the same as in production.
RuntimeOptions quick(int64_t inline_limit = 0);

std::vector<std::unique_ptr<Channel>> make_channels(Wire wire, int size);

// An operation and the memory it works on.
class Submission {
 public:
  // For kinds that make their output: `out` gets its length from the shape they ask for.
  Submission(OpDesc desc, std::string input, std::shared_ptr<Completion> completion = nullptr);

  const std::shared_ptr<Operation>& operation() const { return operation_; }
  // Waits; "" or the error. The thread leads in `rank`, if it is given or submitted this.
  std::string wait(Runtime* rank = nullptr) const;
  const std::string& output() const { return memory_->out; }
  // How often finish() ran.
  int finished() const { return memory_->finished; }

  // Submissions whose operation still exists anywhere.
  static int alive() { return alive_; }

 private:
  struct Memory {
    Memory() { ++alive_; }
    ~Memory() { --alive_; }
    std::string in, out;
    int finished = 0;
  };
  friend class SimulatedRanks;
  static inline std::atomic<int> alive_{0};
  Runtime* rank_ = nullptr;
  std::shared_ptr<Operation> operation_;
  std::shared_ptr<Memory> memory_;
};

class SimulatedRanks {
 public:
  struct Setup {
    Wire wire = Wire::kLocal;
    RuntimeOptions options = {};  // but for rank, size and hosts
    // Ranks whose channel can be made to die (die()) and whose transport only pretends.
    std::vector<int> mortal = {};
    // Ranks that are left out: the test speaks for them, through take_channel().
    std::vector<int> raw = {};
  };
  SimulatedRanks(int size, const Setup& setup);
  ~SimulatedRanks();

  int size() const { return size_; }
  Runtime& operator[](int rank) { return *ranks_[rank]; }
  Submission submit(int rank, const OpDesc& desc, std::string input);
  // Stops all ranks at once, as the ends of their scripts do.
  void stop();

  Channel& channel(int rank) { return *raw_[rank]; }

  // The rank's process is killed: its control connection ends without a word.
  void die(int rank);
  // The data connections of a mortal rank break.
  void cut_link(int rank);
  // Until a mortal rank is inside a collective.
  void wait_until_in_transfer(int rank);

 private:
  class MortalChannel;
  class StuckTransport;

  int size_;
  std::vector<std::shared_ptr<PointToPoint>> links_;
  std::vector<std::unique_ptr<Channel>> raw_;
  std::vector<MortalChannel*> mortal_;
  std::vector<std::shared_ptr<StuckTransport>> stuck_;
  std::vector<std::unique_ptr<Runtime>> ranks_;
};

// `count` float32 values, as bytes.
std::string floats(const std::vector<float>& values);

}  // namespace hvdtorch::test
