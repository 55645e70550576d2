#include "core/stall.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

namespace hvdtorch {
namespace {

constexpr size_t kMaxNames = 6;  // in one list

std::string with_site(const OpDesc& desc) {
  std::string text = desc.name;
  if (desc.process_set != 0) text += " in process set " + std::to_string(desc.process_set);
  if (!desc.site.empty()) text += " (" + desc.site + ")";
  return text;
}

std::string seconds_text(StallInspector::Clock::duration duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  std::ostringstream out;
  out.precision(seconds < 10 ? 2 : 6);
  out << (seconds < 10 ? seconds : std::round(seconds)) << " s";
  return out.str();
}

// The name as the user gave it: without the kind, and without "_2of3".
std::string user_name(const OpDesc& desc) {
  const std::string& full = desc.group.empty() ? desc.name : desc.group;
  return full.substr(full.find('.') + 1);
}

std::string what_kind(const OpDesc& desc) {
  std::string text = desc.name.substr(0, desc.name.find('.'));
  if (!desc.group.empty()) text += " of " + std::to_string(desc.group_size) + " tensors";
  return text;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMaxNames); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kMaxNames) {
    text += " and " + std::to_string(names.size() - kMaxNames) + " more";
  }
  return text;
}

}  // namespace

StallInspector::StallInspector(int size, Options options)
    : options_(std::move(options)), ranks_(static_cast<size_t>(size)) {}

void StallInspector::on_ready(int rank, const Desc& desc, Clock::time_point now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.last = desc;
  r.when = now;
}

void StallInspector::excuse(int rank, std::chrono::duration<double> how_long,
                            Clock::time_point now) {
  // Beyond a year it is for ever; and not a number is no time at all.
  constexpr double kYear = 365 * 24 * 3600.0;
  const double seconds = how_long.count() > 0 ? std::min(how_long.count(), kYear) : 0;
  ranks_[static_cast<size_t>(rank)].excused_until =
      now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  next_.reset();
}

std::optional<StallInspector::Clock::time_point> StallInspector::deadline(
    const Negotiator& negotiator) const {
  const auto since = negotiator.waiting_since();
  if (options_.warn_after.count() == 0 || !since) return std::nullopt;
  const auto earliest = *since + options_.warn_after;
  return next_ ? std::max(*next_, earliest) : earliest;
}

StallInspector::Report StallInspector::inspect(const Negotiator& negotiator,
                                               Clock::time_point now) {
  Report report;
  const auto due = deadline(negotiator);
  if (reported_.empty() && (!due || now < *due)) return report;
  // What was reported and is waited for no longer.
  std::vector<std::string> over;
  for (auto it = reported_.begin(); it != reported_.end();) {
    const bool still = negotiator.is_waiting(it->id);
    if (!still) over.push_back(it->name);
    it = still ? std::next(it) : reported_.erase(it);
  }
  if (!over.empty()) report.resolved = listed(over);
  if (!due || now < *due) return report;

  std::vector<Waiting> all = negotiator.waiting();
  std::set<int> blocked;  // ranks that wait for others themselves
  for (Waiting& waiting : all) {
    if (waiting.ready.front().second->kind == OpKind::kJoin) {  // the last one
      std::erase_if(waiting.missing, [&](int rank) { return blocked.contains(rank); });
    } else {
      for (const auto& [rank, desc] : waiting.ready) blocked.insert(rank);
    }
  }
  next_ = now + options_.warn_after;
  const auto consider = [this](Clock::time_point when) { next_ = std::min(*next_, when); };
  std::vector<Waiting> fresh, fatal;
  for (const Waiting& waiting : all) {
    // The rank that has kept the others waiting longest, its excuses apart.
    auto since = Clock::time_point::max();
    const bool join = waiting.ready.front().second->kind == OpKind::kJoin;
    for (int rank : waiting.missing) {
      const Rank& r = ranks_[static_cast<size_t>(rank)];
      auto kept = std::max(waiting.since, r.excused_until);
      if (join) kept = std::max(kept, r.when);  // it has data, as long as it submits some
      since = std::min(since, kept);
    }
    if (since == Clock::time_point::max()) continue;  // nobody
    // What is almost due is told along: tensors of one moment make one report.
    if (now < since + options_.warn_after * 9 / 10) {
      consider(since + options_.warn_after);
    } else if (reported_.insert({waiting.id, waiting.ready.front().second->name}).second) {
      fresh.push_back(waiting);
    }
    if (options_.stop_after.count() == 0) continue;
    if (now >= since + options_.stop_after) {
      fatal.push_back(waiting);
    } else {
      consider(since + options_.stop_after);
    }
  }
  if (!fresh.empty()) report.warning = describe(fresh, all, now);
  if (!fatal.empty()) {
    report.fatal = "the job was stopped: it stalled for " + seconds_text(options_.stop_after) +
                   " (HVDTORCH_STALL_SHUTDOWN_TIME_SECONDS)" + describe(fatal, all, now);
  }
  return report;
}

// One line for the tensors that the same ranks miss for the same others, and one for each missing
// rank.
std::string StallInspector::describe(const std::vector<Waiting>& stalled,
                                     const std::vector<Waiting>& all, Clock::time_point now) const {
  std::map<std::pair<std::vector<int>, std::vector<int>>, std::vector<const Waiting*>> by_ranks;
  for (const Waiting& waiting : stalled) {
    std::vector<int> ready;
    for (const auto& [rank, desc] : waiting.ready) ready.push_back(rank);
    by_ranks[{waiting.missing, ready}].push_back(&waiting);
  }
  std::string text;
  std::set<int> missing_ranks;
  for (const auto& [ranks, waitings] : by_ranks) {
    const auto& [missing, ready] = ranks;
    std::vector<std::string> names;
    for (const Waiting* waiting : waitings) {
      names.push_back(with_site(*waiting->ready.front().second));
    }
    text += "\n  " + rank_list(missing) + (missing.size() == 1 ? " has" : " have") +
            " not submitted " + listed(names) + ", for which " + rank_list(ready) +
            (ready.size() == 1 ? " has" : " have") + " waited for " +
            seconds_text(now - waitings.front()->since);
    missing_ranks.insert(missing.begin(), missing.end());
  }
  size_t told = 0;
  for (int rank : missing_ranks) {
    if (++told > kMaxNames) {
      text += "\n  and " + std::to_string(missing_ranks.size() - kMaxNames) + " more ranks";
      break;
    }
    text += "\n  " + options_.describe(rank) + " " + last_act(rank, stalled, all, now);
  }
  return text;
}

std::string StallInspector::last_act(int rank, const std::vector<Waiting>& stalled,
                                     const std::vector<Waiting>& all, Clock::time_point now) const {
  const Rank& r = ranks_[static_cast<size_t>(rank)];
  if (!r.last) return "has submitted nothing yet";
  // What the rank itself waits for, and whether that is what the others mean by another name.
  std::vector<std::string> its_own;
  std::string hint;
  for (const Waiting& waiting : all) {
    for (const auto& [who, desc] : waiting.ready) {
      if (who != rank) continue;
      its_own.push_back(with_site(*desc));
      for (const Waiting& other : stalled) {
        const OpDesc& theirs = *other.ready.front().second;
        if (hint.empty() && theirs.process_set == desc->process_set &&
            user_name(theirs) == user_name(*desc) &&
            std::find(other.missing.begin(), other.missing.end(), rank) != other.missing.end()) {
          hint = "; is its " + what_kind(*desc) + " '" + user_name(*desc) + "' meant to be the " +
                 what_kind(theirs) + " '" + user_name(theirs) +
                 "' of the others? All ranks must call the same collective, with lists of the same "
                 "length";
        }
      }
    }
  }
  if (!its_own.empty()) return "waits for " + listed(its_own) + hint;
  return "last submitted " + with_site(*r.last) + ", " + seconds_text(now - r.when) + " ago";
}

}  // namespace hvdtorch
