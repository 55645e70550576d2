#include "core/negotiator.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>

namespace hvdtorch {
namespace {

// One thing that all ranks must say alike, and how it reads in an error.
struct Field {
  const char* what;
  const char* advice;
  std::function<std::string(const OpDesc&)> value;
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

const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      {"operation", "All ranks must call the same collective",
       [](const OpDesc& d) { return std::string(name_of(d.kind)); }},
      {"dtype", "All ranks must pass tensors of one dtype",
       [](const OpDesc& d) { return std::string(name_of(d.dtype)); }},
      {"device", "All ranks must pass tensors on the same kind of device",
       [](const OpDesc& d) {
         return std::string(d.device.kind == DeviceKind::kCpu ? "CPU" : "GPU");
       }},
      {"shape", "All ranks must pass tensors of one shape (allgather and alltoall: all but dim 0)",
       [](const OpDesc& d) {
         return rows_may_differ(d.kind) ? trailing_shape(d) : shape_text(d.shape);
       }},
      {"reduce op", "All ranks must pass the same op",
       [](const OpDesc& d) {
         return reduces(d.kind) ? std::string(name_of(d.op)) : std::string();
       }},
      {"prescale_factor", "All ranks must pass the same factor",
       [](const OpDesc& d) { return reduces(d.kind) ? number(d.prescale) : std::string(); }},
      {"postscale_factor", "All ranks must pass the same factor",
       [](const OpDesc& d) { return reduces(d.kind) ? number(d.postscale) : std::string(); }},
      {"root rank", "All ranks must name the same root",
       [](const OpDesc& d) {
         return d.kind == OpKind::kBroadcast ? std::to_string(d.root) : std::string();
       }},
      {"group", "All ranks must submit the same groups",
       [](const OpDesc& d) {
         return d.group.empty() ? std::string("none")
                                : d.group + " of " + std::to_string(d.group_size);
       }},
  };
  return all;
}

bool may_carry_payload(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBroadcast;
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
  } else if (a.shape != b.shape) {
    return false;
  }
  if (reduces(a.kind)) {
    return a.op == b.op && same_factor(a.prescale, b.prescale) &&
           same_factor(a.postscale, b.postscale);
  }
  return a.kind != OpKind::kBroadcast || a.root == b.root;
}

// "allreduce.x: the ranks disagree on dtype: ranks 0, 2: float32 (train.py:7); rank 1: ..."
std::string disagreement(const std::vector<Ready>& by_rank, const std::vector<int>& ranks) {
  std::ostringstream out;
  out << by_rank.front().desc->name << ": the ranks disagree on ";
  std::string advice;
  bool first_field = true;
  for (const Field& field : fields()) {
    // Ranks by what they say, in the order of the first rank that says it.
    std::vector<std::pair<std::string, std::vector<size_t>>> values;
    for (size_t i = 0; i < by_rank.size(); ++i) {
      const std::string value = field.value(*by_rank[i].desc);
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

Negotiator::Negotiator(int size) {
  Set global;
  global.ranks.resize(size);
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

void Negotiator::on_ready(int rank, Ready ready) {
  const uint32_t id = ready.desc->process_set;
  const auto found = sets_.find(id);
  if (found == sets_.end()) {
    throw DecodeError("rank " + std::to_string(rank) + " named process set " + std::to_string(id) +
                      ", which does not exist");
  }
  Set& set = found->second;
  const int index = index_in(set, rank);
  if (ready.desc->kind == OpKind::kBroadcast &&
      (ready.desc->root < 0 || ready.desc->root >= static_cast<int>(set.ranks.size()))) {
    throw DecodeError("rank " + std::to_string(rank) + " named a root outside the process set");
  }
  if (ready.payload && !may_carry_payload(ready.desc->kind)) {
    throw DecodeError("rank " + std::to_string(rank) + " sent a payload with a " +
                      name_of(ready.desc->kind));
  }
  const bool silent = ready.desc->kind == OpKind::kBroadcast && ready.desc->root != index;
  if (ready.payload && !silent &&
      ready.payload->size() != static_cast<size_t>(ready.desc->bytes())) {
    throw DecodeError("rank " + std::to_string(rank) + " sent a payload of the wrong length");
  }
  const std::string name = ready.desc->name;
  auto it = set.pending.try_emplace(name).first;
  Pending& pending = it->second;
  if (pending.by_rank.empty()) pending.by_rank.resize(set.ranks.size());
  if (pending.by_rank[index].desc) {
    throw DecodeError("rank " + std::to_string(rank) + " submitted " + name + " twice");
  }
  pending.by_rank[index] = std::move(ready);
  if (++pending.count < static_cast<int>(set.ranks.size())) return;
  Pending all = std::move(pending);
  set.pending.erase(it);
  complete(id, set, name, std::move(all));
}

void Negotiator::complete(uint32_t id, Set& set, const std::string& name, Pending pending) {
  auto& by_rank = pending.by_rank;
  const OpDesc& first = *by_rank.front().desc;
  std::string text;
  if (!std::all_of(by_rank.begin() + 1, by_rank.end(),
                   [&](const Ready& r) { return agree(first, *r.desc); })) {
    text = disagreement(by_rank, set.ranks);
  }
  Agreement agreement;
  agreement.desc = by_rank.front().desc;
  if (text.empty()) {
    if (first.kind == OpKind::kAllgather) {
      for (const Ready& r : by_rank) {
        agreement.rows.push_back(r.desc->shape.empty() ? 1 : r.desc->shape[0]);
      }
    }
    // A broadcast needs the root's payload only; the other kinds need everyone's.
    const bool all_have = std::all_of(by_rank.begin(), by_rank.end(), [&](const Ready& r) {
      return first.kind == OpKind::kBroadcast || r.payload.has_value();
    });
    const bool root_has = first.kind != OpKind::kBroadcast ||
                          by_rank[static_cast<size_t>(first.root)].payload.has_value();
    if (all_have && root_has) {
      for (Ready& r : by_rank) agreement.payloads.push_back(std::move(r.payload).value_or(""));
    }
  }
  // Ranks that disagree on the group itself: the member fails at once, and so does every group
  // that one of them meant, when its other members are complete.
  std::set<std::string> groups;
  for (const Ready& r : by_rank) groups.insert(r.desc->group);
  const bool alone = groups.size() > 1 || first.group.empty();
  if (alone) {
    Decision decision;
    if (text.empty()) {
      decision.agreed.push_back(std::move(agreement));
    } else {
      decision.error = Error{id, {name}, text};
    }
    decisions_.push_back(std::move(decision));
  }
  for (const Ready& r : by_rank) {
    if (r.desc->group.empty() || groups.erase(r.desc->group) == 0) continue;
    Group& group = set.groups[r.desc->group];
    if (group.error.empty()) group.error = text;
    if (!alone) {
      group.names.push_back(name);
      group.agreed.push_back(std::move(agreement));
    }
    // Ranks that disagree on how many members there are: more than the fewest never get complete.
    int32_t members = r.desc->group_size;
    for (const Ready& other : by_rank) {
      if (other.desc->group == r.desc->group) members = std::min(members, other.desc->group_size);
    }
    if (++group.complete < members) continue;
    Decision decision;
    if (group.error.empty()) {
      decision.agreed = std::move(group.agreed);
    } else {
      decision.error = Error{id, std::move(group.names), std::move(group.error)};
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
  for (const auto& [id, set] : sets_) {
    for (const auto& [name, pending] : set.pending) {
      Waiting w;
      for (size_t i = 0; i < set.ranks.size(); ++i) {
        const Ready& r = pending.by_rank[i];
        if (r.desc && !w.desc) w.desc = r.desc;
        (r.desc ? w.ready : w.missing).push_back(set.ranks[i]);
      }
      all.push_back(std::move(w));
    }
  }
  return all;
}

}  // namespace hvdtorch
