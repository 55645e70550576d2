#include "core/coordinator.h"

#include <algorithm>
#include <utility>

namespace hvdtorch {

Coordinator::Coordinator(Options options)
    : options_(std::move(options)),
      negotiator_(options_.size),
      planner_(options_.fusion_threshold),
      log_slots_(options_.cache_capacity),
      statement_slots_(options_.size, SlotReader(options_.cache_capacity)),
      presence_(options_.size, Presence::kHere) {}

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
    negotiator_.on_ready(rank, std::move(*ready));
  } else if (const auto* bye = std::get_if<Bye>(&statement)) {
    presence_[rank] = Presence::kGone;
    // A launch that it left unread is one that it takes no part in: the others must not wait.
    const bool clean = bye->clean && bye->launches == launches_;
    end(farewell(rank, bye->reason), !clean);
  } else {
    // Most often the transfer failed because a peer died, whose connection to us breaks as well:
    // that is the better explanation, so it gets a moment to turn up.
    if (failure_ || aborted_) return;
    failure_ = describe(rank) + " reports a failed transfer: " + std::get<Failed>(statement).text;
    failure_due_ = now + options_.cause_grace;
  }
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

std::vector<Entry> Coordinator::take_entries(Clock::time_point now) {
  if (failure_due_ && now >= *failure_due_) end(*failure_, true);
  for (Decision& decision : negotiator_.take_decisions()) {
    uint32_t set = 0;
    if (!decision.agreed.empty()) set = decision.agreed.front().desc->process_set;
    planner_.add(std::move(decision), options_.divisor(set));
  }
  std::vector<Entry> entries = planner_.take_immediate();
  if (ended_) entries.clear();
  if (planner_.idle() || ended_) {
    oldest_queued_.reset();
  } else {
    if (!oldest_queued_) oldest_queued_ = now;
    if (unfinished_ < kPipeline || now >= *oldest_queued_ + options_.cycle_time ||
        planner_.queued_bytes() >= options_.fusion_threshold) {
      for (Launch& launch : planner_.plan()) {
        ++unfinished_;
        ++launches_;
        entries.emplace_back(std::move(launch));
      }
      oldest_queued_.reset();
    }
  }
  std::move(urgent_.begin(), urgent_.end(), std::back_inserter(entries));
  urgent_.clear();
  return entries;
}

std::optional<Coordinator::Clock::time_point> Coordinator::deadline() const {
  std::optional<Clock::time_point> due = failure_due_;
  if (oldest_queued_) {
    const auto flush = *oldest_queued_ + options_.cycle_time;
    if (!due || flush < *due) due = flush;
  }
  return due;
}

std::string Coordinator::encode(const std::vector<Entry>& entries) {
  std::string frame;
  for (const Entry& entry : entries) hvdtorch::encode(frame, entry, log_slots_);
  return frame;
}

}  // namespace hvdtorch
