#include "transport/choice.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "transport/hierarchical.h"
#include "transport/host_collectives.h"
#include "transport/memory_link.h"
#include "transport/sub_link.h"

namespace hvdtorch {
namespace {

// Keys of transports in shared memory. All ranks make the transports among themselves in the same
// order, so that a count of those before tells two among the same ranks apart.
class Keys {
 public:
  uint64_t next(uint32_t process_set, const std::vector<int>& ranks) {
    std::lock_guard lock(mutex_);
    const uint64_t number = ++made_[{process_set, ranks}];
    uint64_t key = mixed(mixed(process_set) ^ number);
    for (int rank : ranks) key = mixed(key ^ static_cast<uint64_t>(rank));
    return key | 1;  // never 0
  }

 private:
  // The finalizer of splitmix64.
  static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  std::mutex mutex_;
  std::map<std::pair<uint32_t, std::vector<int>>, uint64_t> made_;
};

// The links that a process set may use at the same time.
enum Level : uint32_t { kFlat, kCross, kLevels };

class Choice {
 public:
  Choice(Topology topology, SharedMemoryOptions shared)
      : topology_(std::move(topology)), shared_(shared) {
    const int own = topology_.group_of[static_cast<size_t>(topology_.rank)];
    for (int rank = 0; rank < static_cast<int>(topology_.group_of.size()); ++rank) {
      if (topology_.group_of[static_cast<size_t>(rank)] == own) neighbours_.push_back(rank);
    }
  }

  std::shared_ptr<Transport> make(uint32_t process_set, const std::vector<int>& ranks) {
    if (ranks.size() == 1) return std::make_shared<HostCollectives>(make_memory_links(1)[0]);
    if (topology_.group &&
        std::includes(neighbours_.begin(), neighbours_.end(), ranks.begin(), ranks.end())) {
      return local(process_set, ranks);
    }
    auto flat = remote(process_set, kFlat, ranks);
    std::map<int, std::vector<int>> by_group;
    std::vector<int> groups, leaders;
    for (int rank : ranks) {
      groups.push_back(topology_.group_of[static_cast<size_t>(rank)]);
      std::vector<int>& members = by_group[groups.back()];
      if (members.empty()) leaders.push_back(rank);
      members.push_back(rank);
    }
    if (leaders.size() == ranks.size()) return flat;
    const std::vector<int>& here =
        by_group[topology_.group_of[static_cast<size_t>(topology_.rank)]];
    const bool leads = here.front() == topology_.rank;
    return make_hierarchical(groups, make(process_set, here),
                             leads ? remote(process_set, kCross, leaders) : nullptr,
                             std::move(flat));
  }

 private:
  std::shared_ptr<HostCollectives> remote(uint32_t process_set, Level level,
                                          const std::vector<int>& ranks) {
    const auto channel = static_cast<int>(process_set * kLevels + level);
    return std::make_shared<HostCollectives>(
        make_sub_link(topology_.network, ranks, channel, HostCollectives::kTags));
  }

  std::shared_ptr<Transport> local(uint32_t process_set, const std::vector<int>& ranks) {
    std::vector<int> members;  // of the group
    for (int rank : ranks) {
      members.push_back(static_cast<int>(
          std::lower_bound(neighbours_.begin(), neighbours_.end(), rank) - neighbours_.begin()));
    }
    return std::make_shared<SharedMemoryTransport>(topology_.group, std::move(members),
                                                   keys_.next(process_set, ranks), shared_);
  }

  const Topology topology_;
  const SharedMemoryOptions shared_;
  std::vector<int> neighbours_;  // the ranks of this host group, ascending
  Keys keys_;
};

}  // namespace

TransportFactory make_transport_factory(Topology topology, SharedMemoryOptions shared) {
  auto choice = std::make_shared<Choice>(std::move(topology), shared);
  return [choice](uint32_t process_set, const std::vector<int>& ranks) {
    return choice->make(process_set, ranks);
  };
}

}  // namespace hvdtorch
