// Job: the one global of the module. Holds the runtime between start() and stop(), numbers unnamed
// operations, and turns a Python call into operations of the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/tensor_ref.h"
#include "core/runtime.h"

namespace hvdtorch {

// What Python holds of a submitted operation.
struct Submitted {
  std::shared_ptr<Completion> completion;
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<std::shared_ptr<Member>> members;  // empty for a barrier
};

struct Request {
  OpKind kind;
  std::string name;   // without member suffix; "": unnamed
  std::string label;  // what unnamed operations are numbered under
  std::vector<at::Tensor> tensors;
  bool grouped = false;
  bool in_place = false;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int32_t root = 0;
  std::vector<int64_t> splits;
  uint32_t process_set = 0;
  std::string site;
  bool waits = false;            // see Runtime::submit()
  std::function<void()> finish;  // runs when the result is in place, before completion
};

class Job {
 public:
  static Job& instance();

  void start(RuntimeOptions options, std::unique_ptr<Channel> channel, TransportFactory factory);
  void stop(const std::string& reason);
  bool running() const noexcept;
  Runtime& runtime();  // InternalError unless running
  // The same for a thread that may wait in it while another stops it; null unless running.
  std::shared_ptr<Runtime> shared_runtime() const { return running() ? runtime_ : nullptr; }

  // Throws std::invalid_argument for what this rank alone can see is wrong.
  Submitted submit(Request request);

  // Memory for tensors that collectives work on without copies: blocks of the arena of this host's
  // ranks, 64-byte aligned and not initialised. They may outlive the job.
  std::shared_ptr<std::byte> allocate(int64_t bytes);

  // After a join, at which the ranks may have made different numbers of calls: unnamed operations
  // get names that are equal on all ranks again.
  void renumber();

 private:
  Job();
  OpDesc describe(const Request& request, const at::Tensor* tensor) const;
  void check(const OpDesc& desc, const Request& request, int size) const;

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<SharedArena> arena_;
  int rank_ = 0;
  uint64_t joins_ = 0;
  std::map<std::pair<uint32_t, std::string>, uint64_t> unnamed_;  // next number by set and label
};

}  // namespace hvdtorch
