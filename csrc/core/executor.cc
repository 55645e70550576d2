#include "core/executor.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "core/planner.h"
#include "core/thread.h"

namespace hvdtorch {
namespace {

void copy_if_apart(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

Reduction reduction_of(const OpDesc& desc, int64_t divisor) {
  return {desc.dtype, desc.op, desc.prescale, desc.postscale, divisor};
}

std::vector<int64_t> scaled(std::vector<int64_t> values, int64_t factor) {
  for (int64_t& value : values) value *= factor;
  return values;
}

std::vector<int64_t> gathered_shape(const LaunchItem& item, const OpDesc& desc) {
  std::vector<int64_t> shape = desc.shape;
  if (shape.empty()) shape.push_back(1);
  shape[0] = std::accumulate(item.rows.begin(), item.rows.end(), int64_t{0});
  return shape;
}

}  // namespace

void place_inline_result(const LaunchItem& item, Operation& op) {
  int64_t bytes = op.desc->bytes();
  if (op.desc->kind == OpKind::kAllgather) {
    const auto shape = gathered_shape(item, *op.desc);
    bytes = shape[0] * op.desc->row_numel() * size_of(op.desc->dtype);
    op.output = op.allocate(shape);
  } else if (op.desc->kind == OpKind::kBarrier) {
    bytes = 0;
  }
  if (static_cast<int64_t>(item.result.size()) != bytes) {
    throw std::runtime_error("the log carries a result of the wrong length");
  }
  if (!item.result.empty()) std::memcpy(op.output, item.result.data(), item.result.size());
  if (op.finish) op.finish();
}

std::vector<int64_t> split_rows(int64_t rows, int parts) {
  std::vector<int64_t> counts(parts, rows / parts);
  for (int r = 0; r < rows % parts; ++r) ++counts[r];
  return counts;
}

std::byte* Arena::reserve(int64_t bytes) {
  if (bytes > capacity_) {
    data_.reset();  // before the new one: the sum would not have to fit
    capacity_ = 0;
    const auto size = static_cast<size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
    void* fresh = std::aligned_alloc(kAlignment, size);
    if (fresh == nullptr) throw std::bad_alloc();
    std::memset(fresh, 0, size);  // the gaps between members are reduced along: keep them tame
    data_.reset(static_cast<std::byte*>(fresh));
    capacity_ = bytes;
  }
  return data_.get();
}

void Arena::Free::operator()(void* p) const noexcept { std::free(p); }

Executor::Executor(Hooks hooks, int core) : hooks_(std::move(hooks)) {
  SignalsBlocked blocked;
  thread_ = std::thread([this, core] { loop(core); });
}

Executor::~Executor() { stop(); }

void Executor::add_transport(uint32_t process_set, std::shared_ptr<Transport> transport) {
  std::lock_guard lock(mutex_);
  transports_[process_set] = std::move(transport);
}

int64_t Executor::divisor(uint32_t process_set) const {
  std::lock_guard lock(mutex_);
  return transports_.at(process_set)->size();
}

void Executor::submit(Work work) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

bool Executor::drain(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return queue_.empty() && !busy_; });
}

void Executor::abort(const std::string& why) noexcept {
  std::map<uint32_t, std::shared_ptr<Transport>> transports;
  {
    std::lock_guard lock(mutex_);
    transports = transports_;
  }
  for (auto& [id, transport] : transports) transport->abort(why);
}

void Executor::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Executor::loop(int core) {
  thread_id_ = enter_runtime_thread("hvd-executor", core);
  for (;;) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    std::string error;
    try {
      run(work);
    } catch (const TransportError& failure) {
      error = hooks_.await_cause(failure.what());
    } catch (const std::exception& failure) {
      // Out of memory, say: the ranks are out of step from here on.
      error = hooks_.await_cause(std::string("the executor failed: ") + failure.what());
    }
    for (auto& op : work.operations) hooks_.complete(op, error);
    work = {};
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
      changed_.notify_all();
    }
    finished_.fetch_add(1);
    hooks_.launch_finished();
  }
}

void Executor::run(Work& work) {
  const OpDesc& first = *work.launch.items.front().desc;
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard lock(mutex_);
    transport = transports_.at(first.process_set);
  }
  switch (first.kind) {
    case OpKind::kAllreduce:
      run_allreduce(work, *transport);
      break;
    case OpKind::kBroadcast:
      run_broadcast(work, *transport);
      break;
    case OpKind::kAllgather:
      run_allgather(work.launch.items.front(), *work.operations.front(), *transport);
      break;
    case OpKind::kAlltoall:
      run_alltoall(*work.operations.front(), *transport);
      break;
    case OpKind::kReducescatter:
      run_reducescatter(*work.operations.front(), *transport);
      break;
    case OpKind::kBarrier:
      transport->barrier();
      break;
  }
  for (auto& op : work.operations) {
    if (op->finish) op->finish();
  }
}

void Executor::run_allreduce(Work& work, Transport& transport) {
  const OpDesc& first = *work.launch.items.front().desc;
  const Reduction reduction = reduction_of(first, transport.size());
  if (work.operations.size() == 1) {
    Operation& op = *work.operations.front();
    copy_if_apart(op.output, op.input, first.bytes());
    transport.allreduce(reduction, op.output, first.numel());
    return;
  }
  const Layout layout = layout_of(work.launch);
  std::byte* buffer = arena_.reserve(layout.bytes);
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(buffer + layout.offsets[i], op.input, op.desc->bytes());
  }
  transport.allreduce(reduction, buffer, layout.bytes / size_of(first.dtype));
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(op.output, buffer + layout.offsets[i], op.desc->bytes());
  }
}

void Executor::run_broadcast(Work& work, Transport& transport) {
  const int root = work.launch.items.front().desc->root;
  const bool is_root = transport.rank() == root;
  if (is_root) {
    for (auto& op : work.operations) copy_if_apart(op->output, op->input, op->desc->bytes());
  }
  if (work.operations.size() == 1) {
    Operation& op = *work.operations.front();
    transport.broadcast(op.output, op.desc->bytes(), root);
    return;
  }
  const Layout layout = layout_of(work.launch);
  std::byte* buffer = arena_.reserve(layout.bytes);
  for (size_t i = 0; i < work.operations.size() && is_root; ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(buffer + layout.offsets[i], op.input, op.desc->bytes());
  }
  transport.broadcast(buffer, layout.bytes, root);
  for (size_t i = 0; i < work.operations.size() && !is_root; ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(op.output, buffer + layout.offsets[i], op.desc->bytes());
  }
}

void Executor::run_allgather(const LaunchItem& item, Operation& op, Transport& transport) {
  const int64_t row_bytes = op.desc->row_numel() * size_of(op.desc->dtype);
  op.output = op.allocate(gathered_shape(item, *op.desc));
  transport.allgather(op.input, op.output, scaled(item.rows, row_bytes));
}

void Executor::run_alltoall(Operation& op, Transport& transport) {
  const int size = transport.size();
  const std::vector<int64_t> one(size, sizeof(int64_t));
  op.received_splits.assign(size, 0);
  transport.alltoall(op.splits.data(), one, op.received_splits.data(), one);
  const int64_t row_bytes = op.desc->row_numel() * size_of(op.desc->dtype);
  std::vector<int64_t> shape = op.desc->shape;
  shape[0] = std::accumulate(op.received_splits.begin(), op.received_splits.end(), int64_t{0});
  op.output = op.allocate(shape);
  transport.alltoall(op.input, scaled(op.splits, row_bytes), op.output,
                     scaled(op.received_splits, row_bytes));
}

void Executor::run_reducescatter(Operation& op, Transport& transport) {
  std::vector<int64_t> shape = op.desc->shape;
  const auto rows = split_rows(shape[0], transport.size());
  shape[0] = rows[transport.rank()];
  op.output = op.allocate(shape);
  transport.reduce_scatter(reduction_of(*op.desc, transport.size()), op.input, op.output,
                           scaled(rows, op.desc->row_numel()));
}

}  // namespace hvdtorch
