#include "core/coordinator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/log.h"

namespace hvdtorch {

Coordinator::Coordinator(Options options)
    : options_(std::move(options)),
      negotiator_(options_.size),
      stalls_(options_.size, {options_.stall_warn_after, options_.stall_stop_after,
                              [this](int rank) { return describe(rank); }}),
      statement_slots_(static_cast<size_t>(options_.size), SlotReader(options_.cache_capacity)),
      presence_(static_cast<size_t>(options_.size), Presence::kHere),
      launches_(static_cast<size_t>(options_.size)) {}

Coordinator::Lane& Coordinator::lane_of(uint32_t process_set) {
  auto it = lanes_.find(process_set);
  if (it == lanes_.end()) {
    const std::vector<int>& members = negotiator_.members(process_set);
    Planner::Options planner = options_.planner;
    planner.hosts.clear();
    for (int rank : members) {
      if (!options_.planner.hosts.empty()) planner.hosts.push_back(options_.planner.hosts[rank]);
    }
    it = lanes_
             .emplace(process_set, Lane{Planner(static_cast<int>(members.size()), planner),
                                        SlotWriter(options_.cache_capacity), 0, std::nullopt})
             .first;
  }
  return it->second;
}

std::string Coordinator::describe(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  const auto index = static_cast<size_t>(rank);
  if (index < options_.hosts.size() && !options_.hosts[index].empty()) {
    text += " (host " + options_.hosts[index] + ")";
  }
  return text;
}

std::string Coordinator::farewell(int rank, const std::string& reason) const {
  return describe(rank) + " has left the job" +
         (reason.empty() ? " (hvd.shutdown() or end of its script)" : " after " + reason);
}

void Coordinator::on_frame(int rank, const std::string& frame, Clock::time_point now) {
  if (presence_[rank] != Presence::kHere) return;
  try {
    for (auto& statement : decode_statements(frame, statement_slots_[rank])) {
      on_statement(rank, std::move(statement), now);
    }
  } catch (const DecodeError& error) {
    presence_[rank] = Presence::kIgnored;
    end(describe(rank) + " sent a control message that makes no sense (" + error.what() +
            "); are all ranks running the same version of hvdtorch with the same settings?",
        true);
  }
}

void Coordinator::on_statement(int rank, Statement statement, Clock::time_point now) {
  if (auto* ready = std::get_if<Ready>(&statement)) {
    stalls_.on_ready(rank, ready->desc, now);
    negotiator_.on_ready(rank, std::move(*ready), now);
  } else if (const auto* finished = std::get_if<Finished>(&statement)) {
    const auto lane = lanes_.find(finished->process_set);
    if (lane != lanes_.end() &&
        finished->launches > static_cast<uint32_t>(lane->second.unfinished)) {
      throw DecodeError("it finished launches that were not made");
    }
    on_launches_finished(finished->process_set, static_cast<int>(finished->launches));
  } else if (const auto* excuse = std::get_if<Excuse>(&statement)) {
    stalls_.excuse(rank, std::chrono::duration<double>(excuse->seconds), now);
  } else if (const auto* bye = std::get_if<Bye>(&statement)) {
    presence_[rank] = Presence::kGone;
    // A launch that it left unread is one that it takes no part in: the others must not wait.
    const bool clean = bye->clean && bye->launches == launches_[rank];
    end(farewell(rank, bye->reason), !clean);
  } else {
    // Most often the transfer failed because a peer died, whose connection to us breaks as well:
    // that is the better explanation, so it gets a moment to turn up.
    if (failure_ || aborted_) return;
    failure_ = describe(rank) + " reports a failed transfer: " + std::get<Failed>(statement).text;
    failure_due_ = now + options_.cause_grace;
  }
}

void Coordinator::on_launches_finished(uint32_t process_set, int count) {
  const auto it = lanes_.find(process_set);  // not there: the set was removed meanwhile
  if (it != lanes_.end()) it->second.unfinished -= count;
}

void Coordinator::on_lost(int rank, const std::string& why) {
  if (std::exchange(presence_[rank], Presence::kGone) != Presence::kHere) return;
  end(describe(rank) + " is gone without a goodbye: it was killed or crashed (" + why + ")", true);
}

void Coordinator::end(std::string text, bool abort) {
  failure_due_.reset();
  ended_ = true;
  aborted_ |= abort;
  urgent_.emplace_back(Down{std::move(text), abort, false});
}

void Coordinator::decide(Decision decision, std::vector<Entry>& entries) {
  if (decision.error) {
    entries.emplace_back(std::move(*decision.error));
    return;
  }
  const Agreement& first = decision.agreed.front();
  if (first.desc->kind == OpKind::kRemoveProcessSet) {
    int64_t id;
    std::memcpy(&id, first.payloads.front().data(), sizeof(id));
    const auto removed = lanes_.find(static_cast<uint32_t>(id));
    // What the set agreed on before comes before its end.
    if (removed != lanes_.end()) {
      launch_all(removed->first, removed->second, entries);
      lanes_.erase(removed);
    }
  }
  Lane& lane = lane_of(first.desc->process_set);
  if (auto inlined = lane.planner.add(std::move(decision))) {
    entries.emplace_back(std::move(*inlined));
  }
}

void Coordinator::launch_all(uint32_t process_set, Lane& lane, std::vector<Entry>& entries) {
  const auto& members = negotiator_.members(process_set);
  for (Launch& launch : lane.planner.plan()) {
    ++lane.unfinished;
    auto absent = launch.absent.begin();
    for (size_t i = 0; i < members.size(); ++i) {
      if (absent != launch.absent.end() && *absent == static_cast<int>(i)) {
        ++absent;
      } else {
        ++launches_[static_cast<size_t>(members[i])];
      }
    }
    entries.emplace_back(std::move(launch));
  }
  lane.oldest_queued.reset();
}

void Coordinator::inspect_stalls(Clock::time_point now) {
  auto report = stalls_.inspect(negotiator_, now);
  if (!report.warning.empty()) {
    log_line(LogLevel::kWarning, "stall.cc",
             "some ranks wait for operations that others have not submitted (hvd.expected_stall() "
             "announces such a pause)" +
                 report.warning);
  }
  if (!report.resolved.empty()) {
    log_line(LogLevel::kInfo, "stall.cc", "no longer stalled: " + report.resolved);
  }
  if (!report.fatal.empty()) end(std::move(report.fatal), true);
}

std::vector<Entry> Coordinator::take_entries(Clock::time_point now) {
  if (failure_due_ && now >= *failure_due_) end(*failure_, true);
  std::vector<Entry> entries;
  for (Decision& decision : negotiator_.take_decisions()) {
    if (!ended_) decide(std::move(decision), entries);
  }
  if (!ended_) inspect_stalls(now);
  if (ended_) {
    entries.clear();
    lanes_.clear();
  }
  for (auto& [id, lane] : lanes_) {
    if (lane.planner.idle()) continue;
    if (!lane.oldest_queued) lane.oldest_queued = now;
    if (lane.unfinished < kPipeline || now >= *lane.oldest_queued + options_.cycle_time ||
        lane.planner.full()) {
      launch_all(id, lane, entries);
    }
  }
  std::move(urgent_.begin(), urgent_.end(), std::back_inserter(entries));
  urgent_.clear();
  return entries;
}

std::optional<Coordinator::Clock::time_point> Coordinator::deadline() const {
  std::optional<Clock::time_point> due = failure_due_;
  const auto consider = [&due](Clock::time_point when) {
    if (!due || when < *due) due = when;
  };
  for (const auto& [id, lane] : lanes_) {
    if (lane.oldest_queued) consider(*lane.oldest_queued + options_.cycle_time);
  }
  if (const auto stall = stalls_.deadline(negotiator_); stall && !ended_) consider(*stall);
  return due;
}

bool Coordinator::gathering() const noexcept {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return !lane.second.planner.idle(); });
}

std::optional<uint32_t> Coordinator::set_of(const Entry& entry) {
  if (const auto* launch = std::get_if<Launch>(&entry)) {
    return launch->items.front().desc->process_set;
  }
  if (const auto* error = std::get_if<Error>(&entry)) return error->process_set;
  return std::nullopt;
}

void Coordinator::distribute(const std::vector<Entry>& entries,
                             const std::function<void(int, std::string_view)>& send) {
  const auto for_all = [](const Entry& entry) { return set_of(entry).value_or(0) == 0; };
  const auto encode_all = [this](auto begin, auto end) {
    std::string frame;
    SlotWriter none(0);
    for (auto it = begin; it != end; ++it) {
      const auto set = set_of(*it);
      // A set that was removed has no lane: the last of it is encoded in full.
      const auto lane = set ? lanes_.find(*set) : lanes_.end();
      encode(frame, *it, lane == lanes_.end() ? none : lane->second.slots);
    }
    return frame;
  };
  // Runs of entries that concern the same ranks are encoded once.
  std::map<int, std::string> mixed;
  const bool all_the_same = std::all_of(entries.begin(), entries.end(), for_all);
  for (auto begin = entries.begin(); begin != entries.end();) {
    const auto set = set_of(*begin).value_or(0);
    const auto end = std::find_if(
        begin, entries.end(), [&](const Entry& entry) { return set_of(entry).value_or(0) != set; });
    const std::string frame = encode_all(begin, end);
    for (int rank : negotiator_.members(set)) {
      if (rank == 0 || departed(rank)) continue;
      if (all_the_same) {
        send(rank, frame);
      } else {
        mixed[rank] += frame;
      }
    }
    begin = end;
  }
  for (const auto& [rank, frame] : mixed) send(rank, frame);
}

}  // namespace hvdtorch
