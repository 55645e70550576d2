// Negotiator: who is ready for what. A pure state machine at the coordinator: statements of ranks
// go in, agreements and readable errors come out. It does no I/O, never sleeps, reads no clock and
// no environment, so that tests drive it with simulated ranks in one process.
//
// It also knows which process sets exist and which ranks have joined (said that they have no more
// data), since both decide whom a tensor waits for. A joined rank is absent from all operations
// that it has not submitted itself, in all its sets, until every rank has joined.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/message.h"

namespace hvdtorch {

// How many process sets a job may add. Bounds what ids are made into: a transport's tags.
inline constexpr uint32_t kMaxProcessSets = 1 << 20;

// A tensor that every rank of its process set is ready for or absent from, and on whose description
// all agree.
struct Agreement {
  Desc desc;
  std::vector<int> absent;       // ranks in the set, ascending
  std::vector<int64_t> numbers;  // see LaunchItem; allgather: 0 rows of absent ranks
  // By rank in the set, if every rank that had to sent one; empty of those that had not.
  std::vector<std::string> payloads;
};

// What the negotiator decided, in order: members that must be launched together (one, or all of a
// group), or an error that every rank of the set is told.
struct Decision {
  std::vector<Agreement> agreed;
  std::optional<Error> error;
};

class Negotiator {
 public:
  using Clock = std::chrono::steady_clock;

  // The global process set (id 0) holds ranks 0..size-1.
  explicit Negotiator(int size);

  // Rank `rank` (global) states that a tensor can be reduced. Throws DecodeError on a statement
  // that no well-behaved rank makes (unknown set, not a member, twice the same name).
  void on_ready(int rank, Ready ready, Clock::time_point now);

  // Decisions since the last call, in the order in which they were reached.
  std::vector<Decision> take_decisions();

  // Global ranks of a set, ascending; of a removed one too.
  const std::vector<int>& members(uint32_t process_set) const {
    return sets_.at(process_set).ranks;
  }
  bool joined(int rank) const { return joined_[static_cast<size_t>(rank)]; }

  // Names that some ranks have submitted and others have not, oldest first: for reports. A join of
  // some ranks is one of them, the last.
  struct Waiting {
    uint64_t id;  // of this use of the name
    Clock::time_point since;
    std::vector<std::pair<int, Desc>> ready;  // global rank, and what it said
    std::vector<int> missing;                 // global ranks
  };
  std::vector<Waiting> waiting() const;
  bool is_waiting(uint64_t id) const {
    return ages_.contains(id) || (first_join_ && first_join_->id == id);
  }
  // When the oldest of them was first submitted.
  std::optional<Clock::time_point> waiting_since() const;

 private:
  struct Age {
    Clock::time_point since;
    uint32_t process_set;
    std::string name;
  };
  struct Pending {
    std::vector<Ready> by_rank;  // index: rank in the set; desc null: not yet
    int count = 0;
    std::map<uint64_t, Age>::iterator age;
  };
  struct Group {
    std::vector<Agreement> agreed;
    std::vector<std::string> names;
    std::string error;  // the first member's
    int complete = 0;
  };
  struct Set {
    std::vector<int> ranks;  // global ranks, ascending
    bool removed = false;
    std::unordered_map<std::string, Pending> pending;
    std::unordered_map<std::string, Group> groups;
  };

  int index_in(const Set& set, int rank) const;
  void check(int rank, int index, const Set& set, const Ready& ready) const;
  bool nobody_missing(const Set& set, const Pending& pending) const;
  void complete(uint32_t id, Set& set, const std::string& name);
  std::vector<int64_t> consequence(const Agreement& agreement, std::string& error);
  void join(int rank, Ready ready, Clock::time_point now);
  void remove_set(uint32_t id);

  std::map<uint32_t, Set> sets_;
  std::vector<char> joined_;  // by global rank
  int num_joined_ = 0;
  std::optional<Waiting> first_join_;  // who has joined, and since when somebody has
  std::map<uint64_t, Age> ages_;       // of everything pending, by id: oldest first
  uint64_t next_age_ = 0;
  std::vector<Decision> decisions_;
};

// "ranks 0, 2-7": a compact list for error texts.
std::string rank_list(const std::vector<int>& ranks);

}  // namespace hvdtorch
