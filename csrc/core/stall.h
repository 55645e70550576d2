// Stall inspector: tensors that some ranks wait for and others do not submit. It says which, who is
// missing, and what each missing rank did last, once for each; and ends the job after a set time if
// asked to. Pure, like the negotiator: the coordinator tells it the time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/negotiator.h"

namespace hvdtorch {

class StallInspector {
 public:
  using Clock = Negotiator::Clock;
  struct Options {
    std::chrono::milliseconds warn_after{0};   // 0: never
    std::chrono::milliseconds stop_after{0};   // 0: never; else not less than warn_after
    std::function<std::string(int)> describe;  // a rank, for texts
  };
  StallInspector(int size, Options options);

  // What `rank` said last.
  void on_ready(int rank, const Desc& desc, Clock::time_point now);
  // Until then, nobody wonders why `rank` submits nothing.
  void excuse(int rank, std::chrono::duration<double> how_long, Clock::time_point now);

  struct Report {
    std::string warning;   // "" if there is nothing new to say
    std::string resolved;  // names that were reported and wait no longer, "" if none
    std::string fatal;     // why the job has to end, "" if it has not
  };
  // To be called at deadline(); it does nothing before.
  Report inspect(const Negotiator& negotiator, Clock::time_point now);
  std::optional<Clock::time_point> deadline(const Negotiator& negotiator) const;

 private:
  struct Rank {
    Desc last;  // null: nothing yet
    Clock::time_point when;
    Clock::time_point excused_until;
  };
  using Waiting = Negotiator::Waiting;

  std::string describe(const std::vector<Waiting>& stalled, const std::vector<Waiting>& all,
                       Clock::time_point now) const;
  std::string last_act(int rank, const std::vector<Waiting>& stalled,
                       const std::vector<Waiting>& all, Clock::time_point now) const;

  const Options options_;
  std::vector<Rank> ranks_;
  struct Reported {
    uint64_t id;
    std::string name;
    friend bool operator<(const Reported& a, const Reported& b) { return a.id < b.id; }
  };
  std::set<Reported> reported_;
  std::optional<Clock::time_point> next_;  // nothing becomes due before
};

}  // namespace hvdtorch
