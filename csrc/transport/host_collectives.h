// The collectives of ranks that can only send each other messages: algorithms over PointToPoint,
// arithmetic by kernels/reduce_cpu. Every transport over sockets is this class and a link.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/point_to_point.h"
#include "transport/transport.h"

namespace hvdtorch {

struct StagedAllreduce;  // transport/staged_allreduce.h

// Sizes at which algorithms change, in bytes. All ranks must use the same. Chosen by measuring
// against Gloo's own allreduce, 2 ranks on 2 cores: smaller chunks cost more thread switches than
// their overlap saves, larger ones fall out of the cache.
struct CollectiveSizes {
  // allreduce: up to here (bytes that one rank receives), everybody sends everything to everybody.
  int64_t direct_allreduce = 512 << 10;
  // broadcast: up to here, a tree of whole messages; above, scatter and allgather.
  int64_t tree_broadcast = 128 << 10;
  // Long messages are cut into chunks, so that one is reduced or passed on while the next travels:
  // a quarter of the message, but within these limits.
  int64_t least_chunk = 512 << 10;
  int64_t largest_chunk = 4 << 20;
};

class HostCollectives : public Transport {
 public:
  // Tags that it uses on its link: 0 up to here, not included.
  static constexpr int kTags = 1024;

  explicit HostCollectives(std::shared_ptr<PointToPoint> link, const CollectiveSizes& sizes = {});
  ~HostCollectives() override;

  const char* name() const noexcept override { return "host"; }
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

  // Like allreduce(), of data that becomes ready and is wanted piece by piece.
  void allreduce_in_stages(const StagedAllreduce& work);

 private:
  // Keeps who is to be aborted, and the reason once there is one.
  class LiveRequests {
   public:
    void add(PointToPoint::Request* request);  // throws once abort() was called
    void remove(PointToPoint::Request* request) noexcept;
    void abort(const std::string& why) noexcept;
    void throw_if_aborted() const;

   private:
    mutable std::mutex mutex_;
    std::optional<std::string> why_;
    std::unordered_set<PointToPoint::Request*> live_;
  };
  class Messages;
  struct Pipeline;

  template <typename Body>
  void run(Body&& body);
  void allreduce_direct(const Reduction& reduction, std::byte* data, int64_t count);
  void allreduce_sliced(const Reduction& reduction, std::byte* data, int64_t count);
  void broadcast_tree(std::byte* data, int64_t bytes, int root);
  void broadcast_sliced(std::byte* data, int64_t bytes, int root);
  void reduce_pipelined(const Reduction& reduction, const Pipeline& pipeline);
  void reduce_from_peers(const Reduction& reduction, void* dst, const void* mine,
                         const std::byte* received, int64_t stride, int64_t bytes) const;

  int64_t chunk_of(int64_t message) const;
  std::byte* scratch(int64_t bytes);

  const std::shared_ptr<PointToPoint> link_;
  const int rank_, size_;
  const CollectiveSizes sizes_;
  const std::vector<int> peers_;  // the next rank first, so that not all send to the same one
  int tag_ = 0;                   // of the running collective's first phase
  LiveRequests live_;
  std::unique_ptr<std::byte, decltype(&std::free)> scratch_{nullptr, &std::free};
  int64_t scratch_bytes_ = 0;
};

}  // namespace hvdtorch
