#include "core/executor.h"

#include <algorithm>
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

std::vector<int64_t> picked(const std::vector<int64_t>& values, const std::vector<int>& indices) {
  std::vector<int64_t> some;
  for (int index : indices) some.push_back(values[static_cast<size_t>(index)]);
  return some;
}

std::vector<int64_t> gathered_shape(const LaunchItem& item, const OpDesc& desc) {
  std::vector<int64_t> shape = desc.shape;
  if (shape.empty()) shape.push_back(1);
  shape[0] = std::accumulate(item.numbers.begin(), item.numbers.end(), int64_t{0});
  return shape;
}

}  // namespace

void place_inline_result(const LaunchItem& item, Operation& op) {
  int64_t bytes = op.desc->bytes();
  op.numbers = item.numbers;
  if (op.desc->kind == OpKind::kAllgather) {
    const auto shape = gathered_shape(item, *op.desc);
    bytes = shape[0] * op.desc->row_numel() * size_of(op.desc->dtype);
    op.output = op.allocate(shape);
  } else if (op.desc->kind >= OpKind::kBarrier) {
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

std::byte* FusionBuffer::reserve(int64_t bytes) {
  if (bytes > capacity_) {
    release();  // before the new one: the sum would not have to fit
    data_ = arena_->allocate(bytes);
    // The gaps between members are reduced along: keep them tame.
    std::memset(data_.get(), 0, static_cast<size_t>(bytes));
    capacity_ = bytes;
  }
  return data_.get();
}

void FusionBuffer::release() noexcept {
  data_.reset();
  capacity_ = 0;
}

Executor::Executor(Hooks hooks, Options options)
    : hooks_(std::move(hooks)), options_(std::move(options)), buffer_(options_.arena) {
  SignalsBlocked blocked;
  thread_ = std::thread([this] { loop(); });
}

Executor::~Executor() { stop(); }

void Executor::submit(Work work) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Executor::close_partial_transports() { submit({}); }

bool Executor::drain(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return queue_.empty() && !busy_; });
}

void Executor::abort(const std::string& why) noexcept {
  std::vector<std::shared_ptr<Transport>> transports;
  {
    std::lock_guard lock(mutex_);
    if (!aborted_) aborted_ = why;
    for (const auto& [absent, party] : parties_) transports.push_back(party.transport);
  }
  for (const auto& transport : transports) transport->abort(why);
}

void Executor::retire() noexcept {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

void Executor::stop() noexcept {
  retire();
  if (thread_.joinable()) thread_.join();
}

void Executor::loop() {
  thread_id_ = enter_runtime_thread("hvd-executor", options_.core);
  for (;;) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) break;
      work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    const bool reported = work.reported;
    if (work.launch.items.empty()) {
      drop_parties([](const std::vector<int>& absent) { return !absent.empty(); });
    } else {
      carry_out(std::move(work));
    }
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
      changed_.notify_all();
    }
    if (!reported) continue;
    finished_.fetch_add(1);
    hooks_.launch_finished();
  }
  // The executor of a removed process set may be kept for a while, but not its memory.
  buffer_.release();
  drop_parties([](const std::vector<int>&) { return true; });
  ended_ = true;
}

// The operations are destroyed before this returns, and so before the launch counts as finished.
void Executor::carry_out(Work work) {
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
}

void Executor::drop_parties(bool (*dropped)(const std::vector<int>& absent)) {
  std::vector<Party> gone;  // destroyed after the lock is free
  std::lock_guard lock(mutex_);
  for (auto it = parties_.begin(); it != parties_.end();) {
    if (dropped(it->first)) gone.push_back(std::move(it->second));
    it = dropped(it->first) ? parties_.erase(it) : std::next(it);
  }
}

Executor::Party& Executor::party_without(const std::vector<int>& absent) {
  {
    std::lock_guard lock(mutex_);
    const auto it = parties_.find(absent);
    if (it != parties_.end()) return it->second;
  }
  Party party;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (!std::binary_search(absent.begin(), absent.end(), rank)) party.members.push_back(rank);
  }
  party.transport = hooks_.open_transport(party.members);
  party.average_divisor = average_divisor(options_.size, absent, options_.average_over_active);
  std::lock_guard lock(mutex_);
  if (aborted_) party.transport->abort(*aborted_);
  return parties_.emplace(absent, std::move(party)).first->second;
}

void Executor::run(Work& work) {
  const Party& party = party_without(work.launch.absent);
  switch (work.launch.items.front().desc->kind) {
    case OpKind::kAllreduce:
      run_allreduce(work, party);
      break;
    case OpKind::kBroadcast:
      run_broadcast(work, party);
      break;
    case OpKind::kAllgather:
      run_allgather(work.launch.items.front(), *work.operations.front(), party);
      break;
    case OpKind::kAlltoall:
      run_alltoall(*work.operations.front(), party);
      break;
    case OpKind::kReducescatter:
      run_reducescatter(*work.operations.front(), party);
      break;
    case OpKind::kBarrier:
      party.transport->barrier();
      break;
    case OpKind::kJoin:
    case OpKind::kAddProcessSet:
    case OpKind::kRemoveProcessSet:
      throw std::runtime_error("the log launches what moves no data");
  }
  for (auto& op : work.operations) {
    if (op->finish) op->finish();
  }
}

void Executor::run_allreduce(Work& work, const Party& party) {
  const OpDesc& first = *work.launch.items.front().desc;
  const Reduction reduction = reduction_of(first, party.average_divisor);
  const bool adasum = first.op == ReduceOp::kAdasum;
  if (work.operations.size() == 1) {
    Operation& op = *work.operations.front();
    copy_if_apart(op.output, op.input, first.bytes());
    if (adasum) {
      party.transport->adasum(reduction, op.output, {{0, first.numel()}});
    } else {
      party.transport->allreduce(reduction, op.output, first.numel());
    }
    return;
  }
  const Layout layout = layout_of(work.launch);
  std::byte* buffer = buffer_.reserve(layout.bytes);
  const int64_t element = size_of(first.dtype);
  std::vector<Span> tensors;
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(buffer + layout.offsets[i], op.input, op.desc->bytes());
    if (adasum) tensors.push_back({layout.offsets[i] / element, op.desc->numel()});
  }
  if (adasum) {
    party.transport->adasum(reduction, buffer, tensors);
  } else {
    party.transport->allreduce(reduction, buffer, layout.bytes / element);
  }
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const Operation& op = *work.operations[i];
    copy_if_apart(op.output, buffer + layout.offsets[i], op.desc->bytes());
  }
}

void Executor::run_broadcast(Work& work, const Party& party) {
  const auto& members = party.members;
  const int root = static_cast<int>(
      std::lower_bound(members.begin(), members.end(), work.launch.items.front().desc->root) -
      members.begin());
  Transport& transport = *party.transport;
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
  std::byte* buffer = buffer_.reserve(layout.bytes);
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

void Executor::run_allgather(const LaunchItem& item, Operation& op, const Party& party) {
  const int64_t row_bytes = op.desc->row_numel() * size_of(op.desc->dtype);
  op.output = op.allocate(gathered_shape(item, *op.desc));
  op.numbers = item.numbers;
  party.transport->allgather(op.input, op.output,
                             scaled(picked(item.numbers, party.members), row_bytes));
}

// The rows of a tensor that go to members of the party, one after the other; `bytes`: of the rows
// for each rank of the set.
const void* Executor::pack_rows(const void* input, const std::vector<int64_t>& bytes,
                                const Party& party) {
  if (party.members.size() == bytes.size()) return input;
  const auto* rows = static_cast<const std::byte*>(input);
  std::byte* packed = buffer_.reserve(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
  std::byte* end = packed;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    if (std::binary_search(party.members.begin(), party.members.end(), static_cast<int>(rank))) {
      copy_if_apart(end, rows, bytes[rank]);
      end += bytes[rank];
    }
    rows += bytes[rank];
  }
  return packed;
}

void Executor::run_alltoall(Operation& op, const Party& party) {
  const std::vector<int64_t> one(party.members.size(), sizeof(int64_t));
  const auto sent = picked(op.splits, party.members);
  std::vector<int64_t> received(party.members.size());
  party.transport->alltoall(sent.data(), one, received.data(), one);
  const int64_t row_bytes = op.desc->row_numel() * size_of(op.desc->dtype);
  std::vector<int64_t> shape = op.desc->shape;
  shape[0] = std::accumulate(received.begin(), received.end(), int64_t{0});
  op.output = op.allocate(shape);
  op.numbers.assign(static_cast<size_t>(options_.size), 0);
  for (size_t i = 0; i < received.size(); ++i) {
    op.numbers[static_cast<size_t>(party.members[i])] = received[i];
  }
  party.transport->alltoall(pack_rows(op.input, scaled(op.splits, row_bytes), party),
                            scaled(sent, row_bytes), op.output, scaled(received, row_bytes));
}

void Executor::run_reducescatter(Operation& op, const Party& party) {
  std::vector<int64_t> shape = op.desc->shape;
  const auto rows = split_rows(shape[0], options_.size);
  const int64_t row_numel = op.desc->row_numel();
  shape[0] = picked(rows, party.members)[static_cast<size_t>(party.transport->rank())];
  op.output = op.allocate(shape);
  const void* input = pack_rows(op.input, scaled(rows, row_numel * size_of(op.desc->dtype)), party);
  party.transport->reduce_scatter(reduction_of(*op.desc, party.average_divisor), input, op.output,
                                  scaled(picked(rows, party.members), row_numel));
}

}  // namespace hvdtorch
