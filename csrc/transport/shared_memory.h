// The collectives of ranks that share memory (shared/host_group.h): no messages, no system calls
// but those to sleep and to wake. Every rank has a stage, memory that all of them map, through
// which data passes in chunks that stay in the cache; what lies in every rank's arena is read and
// written where it is.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shared/host_group.h"
#include "shared/waiting.h"
#include "transport/transport.h"

namespace hvdtorch {

struct SharedMemoryOptions {
  SpinPolicy spin;
  // How long to wait for another rank in the middle of a collective; none: for ever.
  std::optional<std::chrono::milliseconds> limit;
  // The rest must be the same on all ranks. Bytes of each half of a rank's stage; 0: chosen by
  // the number of ranks.
  int64_t stage = 0;
  // Allreduce: up to here everybody reduces everything, in one step.
  int64_t one_step = 64 << 10;
};

class SharedMemoryTransport : public Transport {
 public:
  // `members`: of the group, by rank in this transport, this process among them. `key` is known to
  // all of them and to no other transport of the group, ever.
  SharedMemoryTransport(std::shared_ptr<HostGroup> group, std::vector<int> members, uint64_t key,
                        SharedMemoryOptions options);
  ~SharedMemoryTransport() override;

  const char* name() const noexcept override { return "shared memory"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  void allreduce(const Reduction& reduction, void* data, int64_t count) override;
  void adasum(const Reduction& reduction, void* data, const std::vector<Span>& tensors) override;
  void allgather(const void* in, void* out, const std::vector<int64_t>& bytes) override;
  void broadcast(void* data, int64_t bytes, int root) override;
  void alltoall(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                const std::vector<int64_t>& recv_bytes) override;
  void reduce_scatter(const Reduction& reduction, const void* in, void* out,
                      const std::vector<int64_t>& counts) override;
  void barrier() override;
  void abort(const std::string& why) noexcept override;

 private:
  struct Seat;
  struct Note;

  template <typename Body>
  void run(Body&& body);
  void throw_if_aborted() const;
  void open();
  Seat& seat(int rank) const noexcept;
  std::byte* stage(int rank, uint64_t step) const noexcept;
  std::byte* next_stage() const noexcept { return stage(rank_, step_ + 1); }
  Note& next_note() const noexcept;
  const Note& note(int rank) const noexcept;
  void sync();
  std::optional<std::vector<std::byte*>> places(const void* data, int64_t bytes);

  void allreduce_at_once(const Reduction& reduction, std::byte* data, int64_t count);
  void allreduce_in_place(const Reduction& reduction, const std::vector<std::byte*>& all,
                          int64_t count);
  void allreduce_staged(const Reduction& reduction, std::byte* data, int64_t count);
  int64_t part() const noexcept;  // of half a stage, for each rank

  const std::shared_ptr<HostGroup> group_;
  const std::vector<int> members_;
  const int size_;
  int rank_ = 0;
  const uint64_t key_;
  const SharedMemoryOptions options_;
  const int64_t stage_bytes_;
  std::unique_ptr<HostGroup::Publication> memory_;  // opened by the first collective
  uint64_t step_ = 0;
  Waiter waiter_;
  std::vector<std::byte> scratch_;  // of Adasum

  mutable std::mutex mutex_;  // guards the rest
  std::optional<std::string> why_;
  Bell* bell_ = nullptr;
};

}  // namespace hvdtorch
