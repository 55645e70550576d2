// Fuzzes what a rank does with bytes from the network: the decoder of either direction, and the
// coordinator (negotiator and planner behind it) fed with frames of hostile ranks.
//
// Part of the ordinary tests, with a bounded loop of our own (fuzz_test.cc). For longer:
//
//     HVDTORCH_FUZZ_ITERATIONS=50000000 HVDTORCH_FUZZ_SEED=7 PROGRAM "fuzz: "
//
// where PROGRAM is what `python tests/core/build.py BUILD_DIR --sanitize address,undefined` prints,
// or, where there is clang, with libFuzzer, which is guided by coverage:
//
//     SOURCES="csrc/core/{message,operation,types,negotiator,planner,coordinator,stall,log}.cc"
//     SOURCES+=" csrc/kernels/*.cc tests/core/fuzz_message.cc"
//     eval clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I csrc $SOURCES -o fuzz
//     mkdir -p corpus && ./fuzz -max_len=4096 corpus
//
// An input is a byte that chooses the target and the capacity of the slots, then frames: a byte
// (the rank), a 2-byte length, and the frame's bytes.
#include "fuzz_message.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string_view>

#include "core/coordinator.h"
#include "core/log.h"
#include "core/message.h"
#include "kernels/reduce_cpu.h"

namespace hvdtorch::test {
namespace {

constexpr uint32_t kCapacities[] = {0, 1, 3, 64};
constexpr int kRanks = 3;

// A property that must hold for every input.
void require(bool holds) {
  if (!holds) std::abort();
}

struct Frame {
  int rank;
  std::string_view bytes;
};

// The input's frames; what is left at the end is a frame too, however long it says it is.
std::vector<Frame> frames_of(std::string_view input) {
  std::vector<Frame> frames;
  while (input.size() >= 3) {
    uint16_t length;
    std::memcpy(&length, input.data() + 1, sizeof length);
    const int rank = static_cast<uint8_t>(input[0]) % kRanks;
    input.remove_prefix(3);
    frames.push_back({rank, input.substr(0, length)});
    input.remove_prefix(frames.back().bytes.size());
  }
  return frames;
}

// The bytes alone in a block of their size, so that a read past the end is noticed.
class Exact {
 public:
  explicit Exact(std::string_view bytes) : data_(new char[bytes.size()]), size_(bytes.size()) {
    bytes.copy(data_.get(), size_);
  }
  std::string_view view() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_;
};

// Either direction: its reader, its writers, and how a frame is decoded.
struct FromRank {
  using Record = Statement;
  explicit FromRank(uint32_t capacity) : reader(capacity), writer(capacity) {}
  std::vector<Statement> decode(std::string_view frame) { return decode_statements(frame, reader); }
  SlotWriter& writer_of(const Statement&) { return writer; }

  SlotReader reader;
  SlotWriter writer;
};
struct FromLog {
  using Record = Entry;
  explicit FromLog(uint32_t capacity) : capacity(capacity), reader(capacity) {}
  std::vector<Entry> decode(std::string_view frame) { return decode_entries(frame, reader); }
  SlotWriter& writer_of(const Entry& entry) {
    const auto* launch = std::get_if<Launch>(&entry);
    const uint32_t set = launch == nullptr ? 0 : launch->items.front().desc->process_set;
    return writers.try_emplace(set, capacity).first->second;
  }

  uint32_t capacity;
  LogSlots reader;
  std::map<uint32_t, SlotWriter> writers;
};

// What was decoded, encoded and decoded again, must encode to the same bytes.
template <typename Direction>
void check_round_trip(const std::vector<typename Direction::Record>& records, uint32_t capacity) {
  std::string frames[2];
  std::vector<typename Direction::Record> again;
  for (std::string& frame : frames) {
    Direction direction(capacity);
    for (const auto& record : &frame == frames ? records : again) {
      encode(frame, record, direction.writer_of(record));
    }
    again = direction.decode(frame);
    require(again.size() == records.size());
  }
  require(frames[0] == frames[1]);
}

template <typename Direction>
bool fuzz_decoder(std::string_view input, uint32_t capacity) {
  Direction direction(capacity);
  try {
    for (const Frame& frame : frames_of(input)) {
      const Exact bytes(frame.bytes);
      check_round_trip<Direction>(direction.decode(bytes.view()), capacity);
    }
  } catch (const DecodeError&) {
    return false;
  }
  return true;
}

// Ranks 1 and up are hostile; rank 0, the coordinator's own, submits what rank 1 does, as far as
// its own checks would let it.
bool fuzz_coordinator(std::string_view input, uint32_t capacity) {
  configure_log(LogLevel::kFatal, false);  // stalls are reported at every turn
  Coordinator::Options options;
  options.size = kRanks;
  options.planner.fusion_threshold = 256;
  options.cache_capacity = capacity;
  options.stall_warn_after = std::chrono::milliseconds(1);
  options.stall_stop_after = std::chrono::milliseconds(1000);
  Coordinator coordinator(std::move(options));
  SlotReader own(capacity);
  std::vector<LogSlots> logs(kRanks, LogSlots(capacity));
  Coordinator::Clock::time_point now{};
  bool down = false;
  for (const Frame& frame : frames_of(input)) {
    const Exact bytes(frame.bytes);
    if (frame.rank == 0) {
      try {
        for (auto& statement : decode_statements(bytes.view(), own)) {
          auto* ready = std::get_if<Ready>(&statement);
          if (ready == nullptr) continue;
          const OpDesc& d = *ready->desc;
          if (d.bytes() > 1 << 20 ||
              !why_not_reducible({d.dtype, d.op, d.prescale, d.postscale, kRanks}).empty()) {
            continue;
          }
          coordinator.on_statement(0, std::move(statement), now);
        }
      } catch (const DecodeError&) {  // rank 0 cannot say that: its own submit() refuses it
      }
    } else {
      coordinator.on_frame(frame.rank, std::string(bytes.view()), now);
    }
    now += std::chrono::milliseconds(1);
    // What the coordinator makes of it must be a log that ranks can read, and end only once.
    const auto entries = coordinator.take_entries(now);
    size_t read = 0;
    coordinator.distribute(entries, [&](int rank, std::string_view bytes) {
      read = std::max(read, decode_entries(bytes, logs[static_cast<size_t>(rank)]).size());
    });
    require(read <= entries.size());
    for (const Entry& entry : entries) {
      const auto* launch = std::get_if<Launch>(&entry);
      require(launch == nullptr || !down);
      down |= std::holds_alternative<Down>(entry);
      if (launch != nullptr && !launch->inlined) {
        coordinator.on_launches_finished(launch->items.front().desc->process_set, 1);
      }
    }
    require(down || !coordinator.deadline() || *coordinator.deadline() > now);
  }
  return !down;
}

bool run(std::string_view input) {
  if (input.empty()) return false;
  const auto choice = static_cast<uint8_t>(input[0]);
  input.remove_prefix(1);
  const uint32_t capacity = kCapacities[choice / 4 % 4];
  switch (choice % 4) {
    case 0:
      return fuzz_decoder<FromRank>(input, capacity);
    case 1:
      return fuzz_decoder<FromLog>(input, capacity);
    default:
      return fuzz_coordinator(input, capacity);
  }
}

// --- seeds ----------------------------------------------------------------------------------

void add_frame(std::string& input, int rank, const std::string& frame) {
  const auto length = static_cast<uint16_t>(frame.size());
  input += static_cast<char>(rank);
  input.append(reinterpret_cast<const char*>(&length), sizeof length);
  input += frame;
}

std::vector<Desc> sample_descs() {
  OpDesc d;
  d.name = "a";
  d.shape = {2};
  d.site = "t.py:1";
  std::vector<Desc> all = {std::make_shared<const OpDesc>(d)};
  for (int kind = 0; kind < kNumOpKinds; ++kind) {
    d.kind = static_cast<OpKind>(kind);
    d.dtype = static_cast<DataType>(2 * kind);
    d.name = std::string(1, static_cast<char>('b' + kind));
    const bool grouped = kind % 2 == 0 && kind < kNumDataKinds;
    d.group = grouped ? "g" : "";
    d.group_size = grouped ? 3 : 1;
    d.remembered = kind != 1;
    if (d.kind >= OpKind::kJoin) {
      d.dtype = DataType::kInt64;
      d.shape = {d.kind == OpKind::kAddProcessSet      ? 2
                 : d.kind == OpKind::kRemoveProcessSet ? 1
                                                       : 0};
    }
    all.push_back(std::make_shared<const OpDesc>(d));
  }
  return all;
}

std::string statements_of_rank(const std::vector<Desc>& descs, SlotWriter& writer, bool leaves) {
  std::string frame;
  for (const Desc& d : descs) {
    std::optional<std::string> payload;
    if (d->kind == OpKind::kAllreduce) payload.emplace(static_cast<size_t>(d->bytes()), '\1');
    const int64_t numbers[] = {0, 2};
    if (d->kind == OpKind::kAddProcessSet)
      payload.emplace(reinterpret_cast<const char*>(numbers), 16);
    if (d->kind == OpKind::kRemoveProcessSet) {
      payload.emplace(std::string("\1\0\0\0\0\0\0\0", 8));
    }
    encode(frame, Ready{d, std::move(payload)}, writer);
  }
  if (leaves) {
    encode(frame, Finished{0, 1}, writer);
    encode(frame, Excuse{0.5}, writer);
    encode(frame, Failed{"reset"}, writer);
    encode(frame, Bye{"KeyError", true, 1}, writer);
  }
  return frame;
}

std::string log_of(const std::vector<Desc>& descs, SlotWriter& writer) {
  std::string frame;
  Launch launch, inlined;
  inlined.inlined = true;
  inlined.absent = {0, 2};
  for (const Desc& d : descs) {
    launch.items.push_back({d, {1, 2, 3}, ""});
    inlined.items.push_back({d, {}, "result"});
  }
  encode(frame, launch, writer);
  encode(frame, inlined, writer);
  encode(frame, Error{0, {1}, {"a", "b"}, "mismatch"}, writer);
  encode(frame, Down{"end", true, false}, writer);
  return frame;
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  const auto descs = sample_descs();
  std::vector<std::string> seeds;
  for (int capacity = 0; capacity < 4; ++capacity) {
    for (int target = 0; target < 3; ++target) {
      std::string input(1, static_cast<char>(4 * capacity + target));
      std::vector<SlotWriter> writers(kRanks, SlotWriter(kCapacities[capacity]));
      for (int round = 0; round < 2; ++round) {
        for (int rank = 0; rank < (target == 2 ? kRanks : 1); ++rank) {
          SlotWriter& writer = writers[static_cast<size_t>(rank)];
          add_frame(input, rank,
                    target == 1 ? log_of(descs, writer)
                                : statements_of_rank(descs, writer, target == 0 && round == 1));
        }
      }
      seeds.push_back(std::move(input));
    }
  }
  return seeds;
}

namespace {

// --- mutation -------------------------------------------------------------------------------

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return random_() % n; }

  // Changes `input` in a few places; `other` lends bytes.
  void mutate(std::string& input, const std::string& other) {
    for (size_t n = 1 + below(4); n > 0 && !input.empty(); --n) {
      const size_t at = below(input.size());
      const size_t length = std::min(1 + below(16), input.size() - at);
      switch (below(8)) {
        case 0:
          input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
          break;
        case 1:
          input[at] = static_cast<char>(random_());
          break;
        case 2:
          input.erase(at, length);
          break;
        case 3:
          input.insert(at, input.substr(below(input.size()), length));
          break;
        case 4:
          put_number(input, at);
          break;
        case 5:
          input.replace(at, length, other.substr(below(other.size()), length));
          break;
        case 6:
          input.insert(at, other.substr(below(other.size()), 1 + below(64)));
          break;
        case 7:
          input.resize(at);
          break;
      }
    }
    if (input.size() > kMaxInput) input.resize(kMaxInput);
  }

 private:
  static constexpr size_t kMaxInput = 4096;

  // The numbers at which lengths, counts and slots go wrong.
  void put_number(std::string& input, size_t at) {
    static constexpr uint64_t kNumbers[] = {
        0, 1, 2, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, 0x80000000, 1ull << 62, ~0ull};
    const uint64_t value = kNumbers[below(std::size(kNumbers))];
    const size_t width = size_t{1} << below(4);
    std::memcpy(&input[at], &value, std::min(width, input.size() - at));
  }

  std::mt19937_64 random_;
};

}  // namespace

FuzzReport fuzz(uint64_t seed, int iterations) {
  Mutator mutator(seed);
  std::vector<std::string> corpus = fuzz_seeds();
  const size_t seeds = corpus.size();
  constexpr size_t kMaxCorpus = 2000;
  FuzzReport report;
  for (int i = 0; i < iterations; ++i) {
    std::string input = corpus[mutator.below(corpus.size())];
    mutator.mutate(input, corpus[mutator.below(corpus.size())]);
    if (run(input)) {
      ++report.decoded;
      if (corpus.size() < kMaxCorpus) {
        corpus.push_back(std::move(input));
      } else {
        corpus[seeds + mutator.below(corpus.size() - seeds)] = std::move(input);
      }
    } else {
      ++report.refused;
    }
  }
  return report;
}

}  // namespace hvdtorch::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  hvdtorch::test::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
