#include "core/runtime.h"

#include <algorithm>
#include <utility>

#include "core/thread.h"

namespace hvdtorch {
namespace {

std::string key_of(uint32_t process_set, const std::string& name) {
  return std::to_string(process_set) + '/' + name;
}
std::string key_of(const OpDesc& desc) { return key_of(desc.process_set, desc.name); }

std::string failure_text(const std::string& name, const std::string& cause) {
  return name + " cannot complete: " + cause;
}

}  // namespace

Runtime::Runtime(RuntimeOptions options, std::unique_ptr<Channel> channel,
                 std::shared_ptr<Transport> transport)
    : options_(std::move(options)),
      channel_(std::move(channel)),
      statement_slots_(options_.cache_capacity),
      log_slots_(options_.cache_capacity) {
  Executor::Hooks hooks;
  hooks.complete = [this](const auto& op, const auto& error) {
    complete(op, error.empty() ? error : failure_text(op->desc->name, error));
  };
  hooks.await_cause = [this](const std::string& text) { return await_cause(text); };
  hooks.launch_finished = [this] {
    if (gathering_) channel_->wake();
  };
  executor_ = std::make_unique<Executor>(std::move(hooks), options_.core);
  executor_->add_transport(0, std::move(transport));
  if (options_.rank == 0) {
    Coordinator::Options c;
    c.size = options_.size;
    c.hosts = options_.hosts;
    c.fusion_threshold = options_.fusion_threshold;
    c.cycle_time = options_.cycle_time;
    c.cache_capacity = options_.cache_capacity;
    c.cause_grace = options_.cause_grace / 2;
    c.divisor = [this](uint32_t set) { return executor_->divisor(set); };
    coordinator_.emplace(std::move(c));
  }
  SignalsBlocked blocked;
  control_thread_ = std::thread([this] { control_loop(); });
}

Runtime::~Runtime() { stop(""); }

void Runtime::submit(std::vector<std::shared_ptr<Operation>> operations) {
  std::lock_guard lock(mutex_);
  if (stopping_) throw InternalError("hvd.shutdown() was called: call hvd.init() first");
  if (down_) throw InternalError("this job cannot run collectives any more: " + *down_);
  for (size_t i = 0; i < operations.size(); ++i) {
    const OpDesc& desc = *operations[i]->desc;
    if (in_flight_.try_emplace(key_of(desc), InFlight{operations[i], false}).second) continue;
    for (size_t j = 0; j < i; ++j) in_flight_.erase(key_of(*operations[j]->desc));
    throw DuplicateName("an operation named " + desc.name +
                        " is still in flight on this rank: synchronize() it before the name is "
                        "used again, or give this one another name");
  }
  const bool first = submitted_.empty();
  submitted_.insert(submitted_.end(), std::make_move_iterator(operations.begin()),
                    std::make_move_iterator(operations.end()));
  stats_.operations.fetch_add(operations.size(), std::memory_order_relaxed);
  if (first) channel_->wake();
}

void Runtime::stop(const std::string& reason) noexcept {
  std::lock_guard once(stop_mutex_);
  if (stopped_) return;
  stopped_ = true;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    stop_reason_ = reason;
  }
  channel_->wake();
  control_thread_.join();
  executor_->stop();
}

std::string Runtime::down_text() const {
  std::lock_guard lock(mutex_);
  return down_.value_or("");
}

std::vector<int> Runtime::thread_ids() const {
  return {control_thread_id_.load(), executor_->thread_id()};
}

// --- control thread ---------------------------------------------------------------------------

void Runtime::control_loop() {
  control_thread_id_ = enter_runtime_thread("hvd-control", options_.core);
  for (;;) {
    try {
      control_step();
    } catch (const std::exception& error) {
      // Not a peer's doing, which is handled where it is read: out of memory, or a defect.
      const std::string what = std::string("the control thread failed: ") + error.what();
      if (coordinator_) append({Down{coordinator_->describe(0) + ": " + what, true, false}});
      apply_down(Down{what, true, false});
    }
    std::lock_guard lock(mutex_);
    if (stopping_) break;
  }
  leave();
}

void Runtime::control_step() {
  const auto events = channel_->wait(deadline());
  take_submissions();
  for (const auto& event : events) handle(event);
  if (coordinator_) run_coordinator();
}

std::optional<Runtime::Clock::time_point> Runtime::deadline() const {
  return coordinator_ ? coordinator_->deadline() : std::nullopt;
}

void Runtime::take_submissions() {
  // Operations are never destroyed under the mutex: that may take the interpreter's lock, whose
  // holder may be waiting for the mutex.
  std::vector<std::shared_ptr<Operation>> fresh;
  std::optional<std::string> failure;
  bool down, lone;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(submitted_);
    lone = fresh.size() == 1 && in_flight_.size() == 1;
    down = down_.has_value();
    if (transfer_failure_ && !down_) failure = std::exchange(transfer_failure_, std::nullopt);
  }
  if (down) fresh.clear();
  const int64_t inline_limit =
      lone ? std::max(options_.inline_limit, options_.lone_inline_limit) : options_.inline_limit;
  std::string frame;
  const auto say = [&](Statement statement) {
    if (coordinator_) {
      coordinator_->on_statement(0, std::move(statement), Clock::now());
    } else {
      encode(frame, statement, statement_slots_);
    }
  };
  for (auto& op : fresh) {
    Ready ready{op->desc, std::nullopt};
    if (may_inline(*op->desc, inline_limit, options_.size)) {
      const bool silent = op->desc->kind == OpKind::kBroadcast && op->desc->root != options_.rank;
      ready.payload.emplace(silent ? std::string_view()
                                   : std::string_view(static_cast<const char*>(op->input),
                                                      static_cast<size_t>(op->desc->bytes())));
    }
    say(std::move(ready));
  }
  if (failure) say(Failed{std::move(*failure)});
  if (!frame.empty()) send(0, frame);
}

void Runtime::send(int rank, const std::string& frame) {
  stats_.frames_sent.fetch_add(1, std::memory_order_relaxed);
  stats_.frame_bytes_sent.fetch_add(frame.size(), std::memory_order_relaxed);
  channel_->send(rank, frame);
}

void Runtime::handle(const Channel::Event& event) {
  const bool lost = event.kind == Channel::Event::Kind::kLost;
  if (coordinator_) {
    if (lost) {
      coordinator_->on_lost(event.rank, event.data);
    } else {
      coordinator_->on_frame(event.rank, event.data, Clock::now());
    }
  } else if (lost) {
    on_coordinator_lost(event.data);
  } else {
    try {
      for (Entry& entry : decode_entries(event.data, log_slots_)) apply(std::move(entry));
    } catch (const DecodeError& error) {
      apply(Down{std::string("the coordinator (rank 0) sent a log that makes no sense (") +
                     error.what() + "); are all ranks running the same version of hvdtorch?",
                 true, true});
    }
  }
}

void Runtime::on_coordinator_lost(const std::string& why) {
  if (log_ended_) return;
  std::string who = "rank 0";
  if (!options_.hosts.empty()) who += " (host " + options_.hosts[0] + ")";
  apply(Down{
      who + ", the coordinator, is gone without a goodbye: it was killed or crashed (" + why + ")",
      true, true});
}

void Runtime::run_coordinator() {
  do {
    for (int n = executor_->take_finished(); n > 0; --n) coordinator_->on_launch_finished();
    std::vector<Entry> entries = coordinator_->take_entries(Clock::now());
    append(entries);
    for (Entry& entry : entries) apply(std::move(entry));
    gathering_ = coordinator_->gathering();
    // A launch that finished before the flag was set did not wake this thread.
  } while (gathering_ && executor_->any_finished());
}

void Runtime::append(const std::vector<Entry>& entries) {
  if (options_.size == 1 || entries.empty()) return;
  const std::string frame = coordinator_->encode(entries);
  for (int rank = 1; rank < options_.size; ++rank) {
    if (!coordinator_->departed(rank)) send(rank, frame);
  }
}

void Runtime::apply(Entry entry) {
  if (auto* launch = std::get_if<Launch>(&entry)) {
    apply_launch(std::move(*launch));
  } else if (const auto* error = std::get_if<Error>(&entry)) {
    for (const std::string& name : error->names) {
      std::shared_ptr<Operation> op;
      {
        std::lock_guard lock(mutex_);
        const auto it = in_flight_.find(key_of(error->process_set, name));
        if (it == in_flight_.end()) continue;
        op = it->second.operation;
      }
      complete(op, error->text);
    }
  } else {
    apply_down(std::get<Down>(entry));
  }
}

void Runtime::apply_launch(Launch launch) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    for (const LaunchItem& item : launch.items) {
      const auto it = in_flight_.find(key_of(*item.desc));
      if (it == in_flight_.end()) {
        // Only after this rank gave up on it: it is leaving, and its peers will be told.
        return;
      }
      it->second.launched = true;
      work.operations.push_back(it->second.operation);
    }
  }
  if (!launch.inlined) {
    ++launches_;
    stats_.launches.fetch_add(1, std::memory_order_relaxed);
    stats_.launched_tensors.fetch_add(work.operations.size(), std::memory_order_relaxed);
    work.launch = std::move(launch);
    executor_->submit(std::move(work));
    return;
  }
  stats_.inlined_tensors.fetch_add(work.operations.size(), std::memory_order_relaxed);
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const LaunchItem& item = launch.items[i];
    const auto& op = work.operations[i];
    std::string error;
    try {
      place_inline_result(item, *op);
    } catch (const std::exception& failure) {
      error = failure_text(op->desc->name, failure.what());
    }
    complete(op, error);
  }
}

void Runtime::apply_down(const Down& down) {
  std::vector<std::shared_ptr<Operation>> failed, unsaid;
  log_ended_ |= down.last;
  {
    std::lock_guard lock(mutex_);
    // The first cause stays, unless it was a clean leave and now something broke.
    if (!down_ || (down.abort && !aborted_)) down_ = down.text;
    unsaid.swap(submitted_);
    // What was launched belongs to the executor: it finishes, or fails through the abort.
    for (const auto& [key, entry] : in_flight_) {
      if (!entry.launched) failed.push_back(entry.operation);
    }
    cause_known_.notify_all();
  }
  for (const auto& op : failed) complete(op, failure_text(op->desc->name, down.text));
  if (down.abort && !std::exchange(aborted_, true)) executor_->abort(down.text);
}

void Runtime::leave() {
  // Launched operations may finish: their peers count on this rank.
  const bool clean = executor_->drain(options_.leave_grace);
  std::string reason;
  {
    std::lock_guard lock(mutex_);
    reason = stop_reason_;
  }
  if (coordinator_) {
    append({Down{coordinator_->farewell(0, reason), !clean, true}});
  } else {
    std::string frame;
    encode(frame, Bye{reason, clean, launches_}, statement_slots_);
    send(0, frame);
  }
  apply_down(Down{"hvd.shutdown() was called on this rank first", !clean, true});
  executor_->drain(options_.leave_grace);
  channel_->close(options_.leave_grace);
}

// --- any thread -------------------------------------------------------------------------------

void Runtime::complete(const std::shared_ptr<Operation>& operation, const std::string& error) {
  {
    // The name is free again before the waiter can know that it is.
    std::lock_guard lock(mutex_);
    in_flight_.erase(key_of(*operation->desc));
  }
  operation->completion->member_done(error);
}

std::string Runtime::await_cause(const std::string& text) {
  std::unique_lock lock(mutex_);
  transfer_failure_ = text;
  channel_->wake();
  cause_known_.wait_for(lock, options_.cause_grace, [this] { return down_.has_value(); });
  if (!down_) down_ = text;
  return *down_;
}

}  // namespace hvdtorch
