// The wire format of the control plane: what ranks tell the coordinator (Ready, Finished, Excuse,
// Bye, Failed) and what the coordinator appends to the log (Launch, Error, Down).
//
// A frame is a run of records; each starts with its kind. Integers are little-endian and of fixed
// width. Decoding never reads past the frame and never trusts a length: malformed bytes throw
// DecodeError and nothing else.
//
// A description travels once: the sender gives it a slot, and later records name the slot alone
// (Note [Slots] in message.cc). Both ends of a stream see the same records in the same order, so
// their tables agree without further words.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/operation.h"

namespace hvdtorch {

struct DecodeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- what a rank says -----------------------------------------------------------------------

// "This tensor can be reduced." A small payload may travel along (Note [Inline] in planner.h).
struct Ready {
  Desc desc;
  std::optional<std::string> payload;
};
// "Launches of this process set were finished here." Said by its lowest rank that took part, so
// that the coordinator knows when the set's pipeline has room.
struct Finished {
  uint32_t process_set = 0;
  uint32_t launches = 0;
};
// "For this long, nobody need wonder what I am doing." 0: I am back.
struct Excuse {
  double seconds = 0;
};
// "I leave the job." `reason` is empty for a plain shutdown. `clean`: nothing of what this rank has
// taken from the log is unfinished here. `launches`: how many launches through a transport that
// were; where the log holds more, the others wait for this rank in vain.
struct Bye {
  std::string reason;
  bool clean = true;
  uint64_t launches = 0;
};
// "My data transport failed." The cause is usually a peer's death that the coordinator sees itself.
struct Failed {
  std::string text;
};
using Statement = std::variant<Ready, Finished, Excuse, Bye, Failed>;

// --- what the log holds ---------------------------------------------------------------------

struct LaunchItem {
  Desc desc;  // as the coordinator knows it
  // allgather: rows of each rank of the set; join: the last rank; adding a process set: its id.
  std::vector<int64_t> numbers;
  std::string result;  // inline launches: the result itself
};
// Run one collective over these tensors, fused. All are of one process set.
struct Launch {
  bool inlined = false;     // every item carries its result: no data transport is needed
  std::vector<int> absent;  // ranks in the set, ascending, that have joined and take no part
  std::vector<LaunchItem> items;
};
// These operations fail on every rank that submitted them, the job goes on.
struct Error {
  uint32_t process_set = 0;
  // As in a launch. (Such a rank may have an operation of that name: a later one.)
  std::vector<int> absent;
  std::vector<std::string> names;
  std::string text;
};
// The job is over: everything pending fails with `text`.
struct Down {
  std::string text;
  bool abort = false;  // running transfers cannot finish: abort them
  bool last = false;   // the coordinator itself leaves: no entry follows
};
using Entry = std::variant<Launch, Error, Down>;

// --- slots ----------------------------------------------------------------------------------

// Sender's side: which descriptions the other end already knows. Least recently used goes first.
class SlotWriter {
 public:
  explicit SlotWriter(uint32_t capacity) : capacity_(capacity) {}
  struct Choice {
    uint32_t slot;  // kNoSlot: send in full, remember nothing
    bool known;     // the other end has exactly this description there
  };
  static constexpr uint32_t kNoSlot = 0xffffffff;
  Choice choose(const Desc& desc);

 private:
  struct Item {
    Desc desc;
    uint32_t slot;
  };
  static std::string key_of(const OpDesc&);
  uint32_t capacity_;
  std::list<Item> items_;  // most recently used first
  std::unordered_map<std::string, std::list<Item>::iterator> by_name_;
};

// Receiver's side.
class SlotReader {
 public:
  explicit SlotReader(uint32_t capacity) : capacity_(capacity) {}
  void set(uint32_t slot, Desc desc);
  const Desc& get(uint32_t slot) const;  // DecodeError if nothing is there

 private:
  uint32_t capacity_;
  std::vector<Desc> slots_;
};

// The log's tables: one for each process set, since a rank sees the entries of its own sets only.
class LogSlots {
 public:
  explicit LogSlots(uint32_t capacity) : capacity_(capacity) {}
  SlotReader& of(uint32_t process_set) {
    return tables_.try_emplace(process_set, capacity_).first->second;
  }
  void forget(uint32_t process_set) { tables_.erase(process_set); }

 private:
  uint32_t capacity_;
  std::map<uint32_t, SlotReader> tables_;
};

// --- encoding -------------------------------------------------------------------------------

void encode(std::string& frame, const Statement&, SlotWriter&);
// `slots`: of the entry's process set.
void encode(std::string& frame, const Entry&, SlotWriter& slots);
std::vector<Statement> decode_statements(std::string_view frame, SlotReader&);
std::vector<Entry> decode_entries(std::string_view frame, LogSlots&);

}  // namespace hvdtorch
