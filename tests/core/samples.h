// What the tests of the control plane share: descriptions that are short to write, a seeded source
// of random ones, and a text for each record, so that equality is equality of texts.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/message.h"

namespace hvdtorch::test {

// Soaks do fewer rounds where every step is slow.
inline int rounds(int plain) { return is_sanitized() ? plain / 10 : plain; }

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Uniform in [0, n).
  int below(int n) { return static_cast<int>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

inline OpDesc desc_of(OpKind kind, std::string name, std::vector<int64_t> shape = {4},
                      DataType dtype = DataType::kFloat32) {
  OpDesc d;
  d.kind = kind;
  d.name = std::move(name);
  d.shape = std::move(shape);
  d.dtype = dtype;
  return d;
}
inline OpDesc allreduce_of(std::string name, std::vector<int64_t> shape = {4},
                           DataType dtype = DataType::kFloat32) {
  return desc_of(OpKind::kAllreduce, std::move(name), std::move(shape), dtype);
}

inline Desc share(OpDesc d) { return std::make_shared<const OpDesc>(std::move(d)); }

// Member of a group of `size`.
inline OpDesc member_of(std::string group, int size, OpDesc d) {
  d.group = std::move(group);
  d.group_size = size;
  return d;
}

// "Add a process set of these ranks", "remove that one", "I have no more data".
inline Ready addition_of(const std::vector<int>& ranks) {
  const std::vector<int64_t> numbers(ranks.begin(), ranks.end());
  return {
      share(desc_of(OpKind::kAddProcessSet, "process_sets", {static_cast<int64_t>(numbers.size())},
                    DataType::kInt64)),
      std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t))};
}
inline Ready removal_of(int64_t id) {
  return {share(desc_of(OpKind::kRemoveProcessSet, "process_sets", {1}, DataType::kInt64)),
          std::string(reinterpret_cast<const char*>(&id), sizeof(id))};
}
inline Ready join_of() {
  return {share(desc_of(OpKind::kJoin, "join", {0}, DataType::kUInt8)), std::nullopt};
}

inline OpDesc in_set(uint32_t process_set, OpDesc d) {
  d.process_set = process_set;
  return d;
}

inline std::string text_of(const OpDesc& d) {
  std::ostringstream out;
  out.precision(17);
  out << d.process_set << ' ' << name_of(d.kind) << ' ' << name_of(d.dtype) << ' '
      << name_of(d.device) << ' ' << name_of(d.op) << " root " << d.root << " x" << d.prescale
      << " x" << d.postscale << " '" << d.name << "' " << shape_text(d.shape) << " group '"
      << d.group << "' of " << d.group_size << " at '" << d.site << "'"
      << (d.remembered ? "" : " once");
  return out.str();
}

inline std::string text_of(const Statement& statement) {
  if (const auto* ready = std::get_if<Ready>(&statement)) {
    return "Ready " + text_of(*ready->desc) +
           (ready->payload ? " payload '" + *ready->payload + "'" : "");
  }
  if (const auto* bye = std::get_if<Bye>(&statement)) {
    return std::string(bye->clean ? "clean" : "unclean") + " Bye '" + bye->reason + "' after " +
           std::to_string(bye->launches);
  }
  if (const auto* finished = std::get_if<Finished>(&statement)) {
    return "Finished " + std::to_string(finished->launches) + " in " +
           std::to_string(finished->process_set);
  }
  if (const auto* excuse = std::get_if<Excuse>(&statement)) {
    return "Excuse " + show(excuse->seconds);
  }
  return "Failed '" + std::get<Failed>(statement).text + "'";
}

inline std::string absent_text(const std::vector<int>& absent) {
  return absent.empty() ? "" : " without " + show(absent);
}

inline std::string text_of(const Entry& entry) {
  if (const auto* launch = std::get_if<Launch>(&entry)) {
    std::string text = launch->inlined ? "inlined Launch" : "Launch";
    text += absent_text(launch->absent);
    for (const auto& item : launch->items) {
      text += " {" + text_of(*item.desc) + " numbers " + shape_text(item.numbers) + " result '" +
              item.result + "'}";
    }
    return text;
  }
  if (const auto* error = std::get_if<Error>(&entry)) {
    std::string text = "Error in " + std::to_string(error->process_set);
    text += absent_text(error->absent);
    for (const auto& name : error->names) text += " '" + name + "'";
    return text + ": " + error->text;
  }
  const auto& down = std::get<Down>(entry);
  return std::string("Down") + (down.abort ? " abort" : "") + (down.last ? " last" : "") + ": " +
         down.text;
}

template <typename Record>
std::vector<std::string> texts_of(const std::vector<Record>& records) {
  std::vector<std::string> texts;
  for (const auto& record : records) texts.push_back(text_of(record));
  return texts;
}

inline std::string random_bytes(Random& random, int length) {
  std::string bytes(static_cast<size_t>(length), '\0');
  for (char& c : bytes) c = static_cast<char>(random.below(256));
  return bytes;
}

// Ascending ranks, often none.
inline std::vector<int> random_absent(Random& random) {
  std::vector<int> absent;
  if (random.one_in(2)) return absent;
  for (int rank = random.below(3); rank < 6; rank += 1 + random.below(3)) absent.push_back(rank);
  return absent;
}

// Any legal description; names repeat, so that slots are found, changed and evicted.
inline OpDesc random_desc(Random& random) {
  OpDesc d;
  d.process_set = static_cast<uint32_t>(random.below(2));
  d.kind = static_cast<OpKind>(random.below(kNumOpKinds));
  d.dtype = static_cast<DataType>(random.below(kNumDataTypes));
  d.device = random.one_in(4) ? Device{DeviceKind::kCuda, static_cast<int16_t>(random.below(8))}
                              : Device{};
  d.op = static_cast<ReduceOp>(random.below(kNumReduceOps));
  d.root = random.below(4);
  if (random.one_in(4)) d.prescale = 1.0 / (1 + random.below(3));
  if (random.one_in(4)) d.postscale = -0.5 * random.below(3);
  d.name = "layer" + std::to_string(random.below(12)) + ".weight";
  for (int dims = random.below(4); dims > 0; --dims) d.shape.push_back(random.below(5));
  if (random.one_in(4)) {
    d.group = "group" + std::to_string(random.below(2));
    d.group_size = 1 + random.below(4);
  }
  if (random.one_in(2)) d.site = "train.py:" + std::to_string(random.below(99));
  d.remembered = !random.one_in(5);
  return d;
}

}  // namespace hvdtorch::test
