#include "bind/job.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <stdexcept>

#include "kernels/reduce_cpu.h"

namespace hvdtorch {
namespace {

// Note [Fork]
// A forked child (a DataLoader worker) inherits the sockets but not the threads. If it kept the
// sockets open, the other ranks would not see this process die; if it used them, it would corrupt
// the parent's streams. So the child closes its copies at once and refuses every collective.
std::atomic<Runtime*> live_runtime{nullptr};
std::atomic<bool> forked{false};

void in_forked_child() {
  Runtime* runtime = live_runtime.load();
  if (runtime == nullptr) return;
  forked = true;
  runtime->abandon_in_child();
}

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw std::invalid_argument(name + ": " + why);
}

}  // namespace

Job::Job() { pthread_atfork(nullptr, nullptr, in_forked_child); }

Job& Job::instance() {
  static Job* job = new Job;  // never destroyed: threads may outlive static destruction
  return *job;
}

void Job::start(RuntimeOptions options, std::unique_ptr<Channel> channel,
                TransportFactory factory) {
  if (forked) throw InternalError("hvd.init() cannot be called in a forked child of a rank");
  if (runtime_) throw InternalError("the runtime is already started");
  rank_ = options.rank;
  unnamed_.clear();
  joins_ = 0;
  arena_ = options.arena;
  runtime_ = std::make_shared<Runtime>(std::move(options), std::move(channel), std::move(factory));
  live_runtime = runtime_.get();
}

void Job::stop(const std::string& reason) {
  if (forked || !runtime_) return;
  runtime_->stop(reason);
  live_runtime = nullptr;
  runtime_.reset();
  arena_.reset();
}

bool Job::running() const noexcept { return runtime_ != nullptr && !forked; }

Runtime& Job::runtime() {
  if (forked) {
    throw InternalError("process " + std::to_string(getpid()) + " is a forked child of rank " +
                        std::to_string(rank_) +
                        " (a DataLoader worker?): only the rank itself may run collectives");
  }
  if (!runtime_) throw InternalError("hvdtorch is not running: call hvd.init() first");
  return *runtime_;
}

OpDesc Job::describe(const Request& request, const at::Tensor* tensor) const {
  OpDesc desc;
  desc.process_set = request.process_set;
  desc.kind = request.kind;
  desc.op = request.op;
  desc.prescale = request.prescale;
  desc.postscale = request.postscale;
  desc.root = request.root;
  desc.site = request.site;
  desc.remembered = !request.name.empty();
  if (tensor != nullptr) {
    desc.dtype = *data_type_of(tensor->scalar_type());
    desc.shape = tensor->sizes().vec();
  } else {
    desc.dtype = DataType::kUInt8;
    desc.shape = {0};
  }
  return desc;
}

void Job::check(const OpDesc& desc, const Request& request, int size) const {
  switch (desc.kind) {
    case OpKind::kAllreduce:
    case OpKind::kReducescatter: {
      const auto why =
          why_not_reducible({desc.dtype, desc.op, desc.prescale, desc.postscale, size});
      if (!why.empty()) refuse(desc.name, why);
      if (desc.kind == OpKind::kAllreduce) break;
      if (desc.op == ReduceOp::kAdasum) refuse(desc.name, "reducescatter has no Adasum");
      if (desc.shape.empty()) {
        refuse(desc.name, "a 0-dim tensor has no rows to scatter: pass at least one dimension");
      }
      break;
    }
    case OpKind::kBroadcast:
      if (desc.root < 0 || desc.root >= size) {
        refuse(desc.name, "the root's rank in the process set must be one of 0-" +
                              std::to_string(size - 1) + ", not " + std::to_string(desc.root));
      }
      break;
    case OpKind::kAlltoall: {
      if (desc.shape.empty()) {
        refuse(desc.name, "a 0-dim tensor has no rows to send: pass at least one dimension");
      }
      const auto& splits = request.splits;
      if (static_cast<int>(splits.size()) != size) {
        refuse(desc.name, "splits has " + std::to_string(splits.size()) + " entries, needs " +
                              std::to_string(size) + ", one per rank");
      }
      int64_t sum = 0;
      for (int64_t rows : splits) {
        if (rows < 0) refuse(desc.name, "splits has a negative entry");
        sum += rows;
      }
      if (sum > desc.shape[0]) {
        refuse(desc.name, "splits add up to " + std::to_string(sum) + " rows, the tensor has " +
                              std::to_string(desc.shape[0]));
      }
      break;
    }
    case OpKind::kAllgather:
    case OpKind::kBarrier:
    case OpKind::kJoin:
    case OpKind::kAddProcessSet:
    case OpKind::kRemoveProcessSet:
      break;
  }
}

Submitted Job::submit(Request request) {
  Runtime& runtime = this->runtime();
  std::string base = request.name;
  if (base.empty()) {
    // Per set and label, so that ranks which made different calls elsewhere still match.
    base = request.label + ".noname.";
    if (joins_ != 0) base += std::to_string(joins_) + ".";
    base += std::to_string(unnamed_[{request.process_set, request.label}]++);
  }
  const int size = runtime.set_size(request.process_set);
  const bool no_tensor = request.kind == OpKind::kBarrier || request.kind == OpKind::kJoin;
  const size_t count = no_tensor ? 1 : request.tensors.size();
  if (count == 0) refuse(base, "an empty list of tensors: pass at least one");
  Submitted submitted;
  submitted.completion = std::make_shared<Completion>(static_cast<int>(count));
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor* tensor = request.tensors.empty() ? nullptr : &request.tensors[i];
    std::string name = base;
    if (request.grouped) name += "_" + std::to_string(i + 1) + "of" + std::to_string(count);
    if (tensor != nullptr) check_tensor(*tensor, name);
    auto desc = std::make_shared<OpDesc>(describe(request, tensor));
    desc->name = std::move(name);
    if (request.grouped) {
      desc->group = base;
      desc->group_size = static_cast<int32_t>(count);
    }
    check(*desc, request, size);
    auto operation = std::make_shared<Operation>();
    operation->desc = std::move(desc);
    operation->splits = request.splits;
    operation->completion = submitted.completion;
    if (tensor != nullptr) {
      submitted.members.push_back(attach(*operation, *tensor, request.in_place));
    }
    if (request.finish) operation->finish = request.finish;
    submitted.operations.push_back(std::move(operation));
  }
  runtime.submit(submitted.operations, request.waits);
  return submitted;
}

std::shared_ptr<std::byte> Job::allocate(int64_t bytes) {
  runtime();
  return arena_->allocate(bytes);
}

void Job::renumber() {
  ++joins_;
  unnamed_.clear();
}

}  // namespace hvdtorch
