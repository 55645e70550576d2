#include "core/negotiator.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {
namespace {

// One thing that all ranks must say alike, and how it reads in an error.
struct Field {
  const char* what;
  const char* advice;
  std::function<std::string(const Ready&)> value;
};

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

std::string trailing_shape(const OpDesc& d) {
  if (d.shape.empty()) return "[]";
  std::string text = shape_text({d.shape.begin() + 1, d.shape.end()});
  return "[*" + std::string(d.shape.size() > 1 ? ", " : "") + text.substr(1);
}

bool reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter; }
bool rows_may_differ(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
}
bool changes_sets(OpKind kind) {
  return kind == OpKind::kAddProcessSet || kind == OpKind::kRemoveProcessSet;
}

// What a payload of int64 holds.
std::vector<int64_t> integers_in(const std::string& payload) {
  std::vector<int64_t> values(payload.size() / sizeof(int64_t));
  if (!values.empty()) std::memcpy(values.data(), payload.data(), values.size() * sizeof(int64_t));
  return values;
}

// "ranks [0, 1]" to be added, "number 3" to be removed.
std::string process_set_text(const Ready& ready) {
  const auto values = integers_in(ready.payload.value_or(""));
  if (ready.desc->kind == OpKind::kAddProcessSet) return "ranks " + shape_text(values);
  return "number " + std::to_string(values.empty() ? -1 : values.front());
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      {"operation", "All ranks must call the same collective",
       [](const Ready& r) { return std::string(name_of(r.desc->kind)); }},
      {"process set", "All ranks must add and remove the same process sets in the same order",
       [](const Ready& r) {
         return changes_sets(r.desc->kind) ? process_set_text(r) : std::string();
       }},
      {"dtype", "All ranks must pass tensors of one dtype",
       [](const Ready& r) { return std::string(name_of(r.desc->dtype)); }},
      {"device", "All ranks must pass tensors on the same kind of device",
       [](const Ready& r) {
         return std::string(r.desc->device.kind == DeviceKind::kCpu ? "CPU" : "GPU");
       }},
      {"shape", "All ranks must pass tensors of one shape (allgather and alltoall: all but dim 0)",
       [](const Ready& r) {
         if (changes_sets(r.desc->kind)) return std::string();
         return rows_may_differ(r.desc->kind) ? trailing_shape(*r.desc) : shape_text(r.desc->shape);
       }},
      {"reduce op", "All ranks must pass the same op",
       [](const Ready& r) {
         return reduces(r.desc->kind) ? std::string(name_of(r.desc->op)) : std::string();
       }},
      {"prescale_factor", "All ranks must pass the same factor",
       [](const Ready& r) {
         return reduces(r.desc->kind) ? number(r.desc->prescale) : std::string();
       }},
      {"postscale_factor", "All ranks must pass the same factor",
       [](const Ready& r) {
         return reduces(r.desc->kind) ? number(r.desc->postscale) : std::string();
       }},
      {"root rank", "All ranks must name the same root",
       [](const Ready& r) {
         return r.desc->kind == OpKind::kBroadcast ? std::to_string(r.desc->root) : std::string();
       }},
      {"group", "All ranks must submit the same groups",
       [](const Ready& r) {
         return r.desc->group.empty() ? std::string("none")
                                      : r.desc->group + " of " + std::to_string(r.desc->group_size);
       }},
  };
  return all;
}

bool may_carry_payload(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBroadcast ||
         changes_sets(kind);
}

// Rows and the like apart, what one rank says is what all must say.
bool agree(const OpDesc& a, const OpDesc& b) {
  if (a.kind != b.kind || a.dtype != b.dtype || a.device.kind != b.device.kind ||
      a.group_size != b.group_size || a.group != b.group) {
    return false;
  }
  if (rows_may_differ(a.kind)) {
    if (a.shape.size() != b.shape.size() ||
        !std::equal(a.shape.begin() + (a.shape.empty() ? 0 : 1), a.shape.end(),
                    b.shape.begin() + (b.shape.empty() ? 0 : 1))) {
      return false;
    }
  } else if (!changes_sets(a.kind) && a.shape != b.shape) {
    return false;
  }
  if (reduces(a.kind)) {
    return a.op == b.op && same_factor(a.prescale, b.prescale) &&
           same_factor(a.postscale, b.postscale);
  }
  return a.kind != OpKind::kBroadcast || a.root == b.root;
}

bool agree(const Ready& a, const Ready& b) {
  return agree(*a.desc, *b.desc) && (!changes_sets(a.desc->kind) || a.payload == b.payload);
}

// "allreduce.x: the ranks disagree on dtype: ranks 0, 2: float32 (train.py:7); rank 1: ..."
// `by_rank` may have gaps: absent ranks.
std::string disagreement(const std::vector<Ready>& by_rank, const std::vector<int>& ranks) {
  const auto somebody = std::find_if(by_rank.begin(), by_rank.end(),
                                     [](const Ready& r) { return r.desc != nullptr; });
  std::ostringstream out;
  out << somebody->desc->name << ": the ranks disagree on ";
  std::string advice;
  bool first_field = true;
  for (const Field& field : fields()) {
    // Ranks by what they say, in the order of the first rank that says it.
    std::vector<std::pair<std::string, std::vector<size_t>>> values;
    for (size_t i = 0; i < by_rank.size(); ++i) {
      if (!by_rank[i].desc) continue;
      const std::string value = field.value(by_rank[i]);
      auto same = std::find_if(values.begin(), values.end(),
                               [&](const auto& v) { return v.first == value; });
      if (same == values.end()) {
        values.push_back({value, {i}});
      } else {
        same->second.push_back(i);
      }
    }
    if (values.size() < 2) continue;
    out << (first_field ? "" : "; and on ") << field.what << ": ";
    for (size_t v = 0; v < values.size(); ++v) {
      std::vector<int> members;
      for (size_t i : values[v].second) members.push_back(ranks[i]);
      const std::string& site = by_rank[values[v].second.front()].desc->site;
      out << (v == 0 ? "" : ", ") << rank_list(members) << ": " << values[v].first;
      if (!site.empty()) out << " (" << site << ")";
    }
    advice += std::string(". ") + field.advice;
    first_field = false;
    if (&field == &fields().front()) break;  // of different collectives all else differs by nature
  }
  out << advice << ".";
  return out.str();
}

}  // namespace

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i != 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

Negotiator::Negotiator(int size) : joined_(static_cast<size_t>(size)) {
  Set global;
  global.ranks.resize(static_cast<size_t>(size));
  std::iota(global.ranks.begin(), global.ranks.end(), 0);
  sets_.emplace(0, std::move(global));
}

int Negotiator::index_in(const Set& set, int rank) const {
  const auto it = std::lower_bound(set.ranks.begin(), set.ranks.end(), rank);
  if (it == set.ranks.end() || *it != rank) {
    throw DecodeError("rank " + std::to_string(rank) + " is not a member of that process set");
  }
  return static_cast<int>(it - set.ranks.begin());
}

void Negotiator::check(int rank, int index, const Set& set, const Ready& ready) const {
  const OpDesc& desc = *ready.desc;
  const std::string who = "rank " + std::to_string(rank);
  if (desc.kind == OpKind::kBroadcast &&
      (desc.root < 0 || desc.root >= static_cast<int>(set.ranks.size()))) {
    throw DecodeError(who + " named a root outside the process set");
  }
  if (ready.payload && !may_carry_payload(desc.kind)) {
    throw DecodeError(who + " sent a payload with a " + name_of(desc.kind));
  }
  const bool silent = desc.kind == OpKind::kBroadcast && desc.root != index;
  if (ready.payload && !silent && ready.payload->size() != static_cast<size_t>(desc.bytes())) {
    throw DecodeError(who + " sent a payload of the wrong length");
  }
  if (ready.payload && desc.kind == OpKind::kAllreduce) {
    const auto size = static_cast<int64_t>(set.ranks.size());
    const auto why = why_not_reducible({desc.dtype, desc.op, desc.prescale, desc.postscale, size});
    if (!why.empty()) throw DecodeError(who + " wants to reduce what cannot be reduced: " + why);
  }
  if (desc.kind < OpKind::kJoin) return;
  if (desc.process_set != 0 || !desc.group.empty()) {
    throw DecodeError(who + " wants to " + name_of(desc.kind) +
                      " elsewhere than in the global set");
  }
  if (!changes_sets(desc.kind)) return;
  const auto values = integers_in(ready.payload.value_or(""));
  const auto size = static_cast<int64_t>(joined_.size());
  if (desc.kind == OpKind::kAddProcessSet) {
    const bool ascending =
        std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
    if (values.empty() || !ascending || values.front() < 0 || values.back() >= size) {
      throw DecodeError(who + " wants to add a process set of impossible ranks");
    }
  } else if (values.size() != 1 || values[0] <= 0 || values[0] > UINT32_MAX) {
    throw DecodeError(who + " wants to remove an impossible process set");
  }
}

bool Negotiator::nobody_missing(const Set& set, const Pending& pending) const {
  if (pending.count == static_cast<int>(set.ranks.size())) return true;
  if (num_joined_ == 0) return false;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    if (!pending.by_rank[i].desc && !joined(set.ranks[i])) return false;
  }
  return true;
}

void Negotiator::on_ready(int rank, Ready ready, Clock::time_point now) {
  const uint32_t id = ready.desc->process_set;
  const auto found = sets_.find(id);
  if (found == sets_.end()) {
    throw DecodeError("rank " + std::to_string(rank) + " named process set " + std::to_string(id) +
                      ", which does not exist");
  }
  Set& set = found->second;
  const int index = index_in(set, rank);
  check(rank, index, set, ready);
  const std::string name = ready.desc->name;
  if (set.removed) {  // it crossed the removal on its way here
    decisions_.push_back(
        {{}, Error{id, {}, {name}, name + ": process set " + std::to_string(id) + " was removed"}});
    return;
  }
  if (ready.desc->kind == OpKind::kJoin) {
    join(rank, std::move(ready), now);
    return;
  }
  auto it = set.pending.try_emplace(name).first;
  Pending& pending = it->second;
  if (pending.by_rank.empty()) {
    pending.by_rank.resize(set.ranks.size());
    pending.age = ages_.emplace_hint(ages_.end(), next_age_++, Age{now, id, name});
  }
  if (pending.by_rank[static_cast<size_t>(index)].desc) {
    throw DecodeError("rank " + std::to_string(rank) + " submitted " + name + " twice");
  }
  pending.by_rank[static_cast<size_t>(index)] = std::move(ready);
  ++pending.count;
  if (nobody_missing(set, pending)) complete(id, set, name);
}

void Negotiator::join(int rank, Ready ready, Clock::time_point now) {
  if (joined(rank)) throw DecodeError("rank " + std::to_string(rank) + " joined twice");
  joined_[static_cast<size_t>(rank)] = 1;
  ++num_joined_;
  if (!first_join_) first_join_ = Waiting{next_age_++, now, {}, {}};
  first_join_->ready.emplace_back(rank, ready.desc);
  // What waited for this rank does so no longer.
  for (auto age = ages_.begin(); age != ages_.end();) {
    const Age& current = (age++)->second;  // complete() erases it
    Set& set = sets_.at(current.process_set);
    if (!std::binary_search(set.ranks.begin(), set.ranks.end(), rank)) continue;
    if (nobody_missing(set, set.pending.at(current.name))) {
      complete(current.process_set, set, std::string(current.name));
    }
  }
  if (num_joined_ < static_cast<int>(joined_.size())) return;
  std::fill(joined_.begin(), joined_.end(), 0);
  num_joined_ = 0;
  first_join_.reset();
  Decision decision;
  decision.agreed.push_back({std::move(ready.desc), {}, {rank}, {}});
  decisions_.push_back(std::move(decision));
}

// What an agreement adds here, and the numbers that its ranks are told. Sets `error` if it cannot
// be carried out after all.
std::vector<int64_t> Negotiator::consequence(const Agreement& agreement, std::string& error) {
  const OpDesc& desc = *agreement.desc;
  std::vector<int> absent;
  for (int index : agreement.absent) absent.push_back(sets_.at(desc.process_set).ranks[index]);
  if (desc.kind == OpKind::kBroadcast) {
    if (std::binary_search(agreement.absent.begin(), agreement.absent.end(), desc.root)) {
      error = desc.name + ": the root, rank " +
              std::to_string(sets_.at(desc.process_set).ranks[static_cast<size_t>(desc.root)]) +
              ", has joined (hvd.join()) and broadcasts no more until all ranks have joined";
    }
    return {};
  }
  if (!changes_sets(desc.kind)) return {};
  const auto values = integers_in(agreement.payloads.front());
  if (!absent.empty()) {
    error = desc.name + ": all ranks must take part, but " + rank_list(absent) +
            (absent.size() == 1 ? " has" : " have") + " joined (hvd.join())";
    return {};
  }
  if (desc.kind == OpKind::kAddProcessSet) {
    // Ids are not used again: a late message about a removed set cannot be taken for a new one's.
    const uint32_t id = sets_.rbegin()->first + 1;
    if (id > kMaxProcessSets) {
      error = desc.name + ": this job has added " + std::to_string(kMaxProcessSets) +
              " process sets, which is the most: use a set again instead of adding one like it";
      return {};
    }
    Set set;
    set.ranks.assign(values.begin(), values.end());
    sets_.emplace(id, std::move(set));
    return {id};
  }
  const auto id = static_cast<uint32_t>(values.front());
  const auto found = sets_.find(id);
  if (found == sets_.end() || found->second.removed) {
    error = desc.name + ": there is no process set " + std::to_string(id);
  }
  return {};
}

void Negotiator::remove_set(uint32_t id) {
  Set& set = sets_.at(id);
  set.removed = true;
  Error error{id, {}, {}, ""};
  for (const auto& [name, pending] : set.pending) {
    error.names.push_back(name);
    ages_.erase(pending.age);
  }
  for (const auto& [name, group] : set.groups) {
    error.names.insert(error.names.end(), group.names.begin(), group.names.end());
  }
  set.pending.clear();
  set.groups.clear();
  if (error.names.empty()) return;
  std::sort(error.names.begin(), error.names.end());
  error.text = error.names.front() + ": process set " + std::to_string(id) +
               " was removed before all its ranks had submitted this operation";
  decisions_.push_back({{}, std::move(error)});
}

void Negotiator::complete(uint32_t id, Set& set, const std::string& name) {
  const auto it = set.pending.find(name);
  Pending pending = std::move(it->second);
  set.pending.erase(it);
  ages_.erase(pending.age);
  auto& by_rank = pending.by_rank;
  Agreement agreement;
  const Ready* first = nullptr;
  for (size_t i = 0; i < by_rank.size(); ++i) {
    if (!by_rank[i].desc) {
      agreement.absent.push_back(static_cast<int>(i));
    } else if (first == nullptr) {
      first = &by_rank[i];
    }
  }
  std::string text;
  if (!std::all_of(by_rank.begin(), by_rank.end(),
                   [&](const Ready& r) { return !r.desc || agree(*first, r); })) {
    text = disagreement(by_rank, set.ranks);
  }
  const Desc desc = agreement.desc = first->desc;
  const std::string group_of_first = desc->group;
  const std::vector<int> absent = agreement.absent;
  uint32_t removed = 0;
  if (text.empty()) {
    // A broadcast needs the root's payload only; the other kinds need everyone's.
    const bool by_root = desc->kind == OpKind::kBroadcast;
    bool all_have = true;
    for (size_t i = 0; i < by_rank.size(); ++i) {
      const bool needed = by_root ? static_cast<int>(i) == desc->root : by_rank[i].desc != nullptr;
      all_have &= !needed || by_rank[i].payload.has_value();
    }
    if (all_have) {
      for (Ready& r : by_rank) agreement.payloads.push_back(std::move(r.payload).value_or(""));
    }
    if (desc->kind == OpKind::kAllgather) {
      for (const Ready& r : by_rank) {
        agreement.numbers.push_back(!r.desc ? 0 : r.desc->shape.empty() ? 1 : r.desc->shape[0]);
      }
    } else {
      agreement.numbers = consequence(agreement, text);
      if (text.empty() && desc->kind == OpKind::kRemoveProcessSet) {
        removed = static_cast<uint32_t>(integers_in(agreement.payloads.front()).front());
      }
    }
  }
  // Ranks that disagree on the group itself: the member fails at once, and so does every group
  // that one of them meant, when its other members are complete.
  std::set<std::string> groups;
  for (const Ready& r : by_rank) {
    if (r.desc) groups.insert(r.desc->group);
  }
  const bool alone = groups.size() > 1 || group_of_first.empty();
  if (alone) {
    Decision decision;
    if (text.empty()) {
      decision.agreed.push_back(std::move(agreement));
    } else {
      decision.error = Error{id, absent, {name}, text};
    }
    decisions_.push_back(std::move(decision));
    // After it: what the set agreed on is launched first, and what it did not fails then.
    if (removed != 0) remove_set(removed);
  }
  for (const Ready& r : by_rank) {
    if (!r.desc || r.desc->group.empty() || groups.erase(r.desc->group) == 0) continue;
    Group& group = set.groups[r.desc->group];
    if (group.error.empty()) group.error = text;
    if (!alone) {
      group.names.push_back(name);
      group.agreed.push_back(std::move(agreement));
    }
    // Ranks that disagree on how many members there are: more than the fewest never get complete.
    int32_t members = r.desc->group_size;
    for (const Ready& other : by_rank) {
      if (other.desc && other.desc->group == r.desc->group) {
        members = std::min(members, other.desc->group_size);
      }
    }
    if (++group.complete < members) continue;
    Decision decision;
    if (group.error.empty()) {
      decision.agreed = std::move(group.agreed);
    } else {
      decision.error = Error{id, absent, std::move(group.names), std::move(group.error)};
    }
    // No names: every member failed on its own.
    if (!decision.error || !decision.error->names.empty())
      decisions_.push_back(std::move(decision));
    set.groups.erase(r.desc->group);
  }
}

std::vector<Decision> Negotiator::take_decisions() { return std::exchange(decisions_, {}); }

std::vector<Negotiator::Waiting> Negotiator::waiting() const {
  std::vector<Waiting> all;
  for (const auto& [id, age] : ages_) {
    const Set& set = sets_.at(age.process_set);
    const Pending& pending = set.pending.at(age.name);
    Waiting w{id, age.since, {}, {}};
    for (size_t i = 0; i < set.ranks.size(); ++i) {
      if (pending.by_rank[i].desc) {
        w.ready.emplace_back(set.ranks[i], pending.by_rank[i].desc);
      } else if (!joined(set.ranks[i])) {
        w.missing.push_back(set.ranks[i]);
      }
    }
    all.push_back(std::move(w));
  }
  if (first_join_) {
    Waiting w = *first_join_;
    std::sort(w.ready.begin(), w.ready.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (int rank = 0; rank < static_cast<int>(joined_.size()); ++rank) {
      if (!joined(rank)) w.missing.push_back(rank);
    }
    all.push_back(std::move(w));
  }
  return all;
}

std::optional<Negotiator::Clock::time_point> Negotiator::waiting_since() const {
  if (ages_.empty() && !first_join_) return std::nullopt;
  if (ages_.empty()) return first_join_->since;
  const auto oldest = ages_.begin()->second.since;
  return first_join_ ? std::min(oldest, first_join_->since) : oldest;
}

}  // namespace hvdtorch
