// Negotiator: who is ready for what. A pure state machine at the coordinator: statements of ranks
// go in, agreements and readable errors come out. It does no I/O, never sleeps, reads no clock and
// no environment, so that tests drive it with simulated ranks in one process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/message.h"

namespace hvdtorch {

// A tensor that every rank of its process set is ready for, and on whose description all agree.
struct Agreement {
  Desc desc;
  std::vector<int64_t> rows;          // allgather: first dimension on each rank of the set
  std::vector<std::string> payloads;  // by rank in the set, if every rank that had to sent one
};

// What the negotiator decided, in order: members that must be launched together (one, or all of a
// group), or an error that every rank of the set is told.
struct Decision {
  std::vector<Agreement> agreed;
  std::optional<Error> error;
};

class Negotiator {
 public:
  // The global process set (id 0) holds ranks 0..size-1. `hosts[r]` may be empty.
  explicit Negotiator(int size);

  // Rank `rank` (global) states that a tensor can be reduced. Throws DecodeError on a statement
  // that no well-behaved rank makes (unknown set, not a member, twice the same name).
  void on_ready(int rank, Ready ready);

  // Decisions since the last call, in the order in which they were reached.
  std::vector<Decision> take_decisions();

  // Names that some ranks have submitted and others have not: for reports.
  struct Waiting {
    Desc desc;
    std::vector<int> ready;    // global ranks
    std::vector<int> missing;  // global ranks
  };
  std::vector<Waiting> waiting() const;

 private:
  struct Pending {
    std::vector<Ready> by_rank;  // index: rank in the set; desc null: not yet
    int count = 0;
  };
  struct Group {
    std::vector<Agreement> agreed;
    std::vector<std::string> names;
    std::string error;  // the first member's
    int complete = 0;
  };
  struct Set {
    std::vector<int> ranks;  // global ranks, ascending
    std::unordered_map<std::string, Pending> pending;
    std::unordered_map<std::string, Group> groups;
  };

  int index_in(const Set& set, int rank) const;
  void complete(uint32_t id, Set& set, const std::string& name, Pending pending);

  std::map<uint32_t, Set> sets_;
  std::vector<Decision> decisions_;
};

// "ranks 0, 2-7": a compact list for error texts.
std::string rank_list(const std::vector<int>& ranks);

}  // namespace hvdtorch
