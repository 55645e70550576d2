#include "core/runtime.h"

#include <algorithm>
#include <numeric>
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
                 TransportFactory open_transport)
    : options_(std::move(options)),
      open_transport_(std::move(open_transport)),
      channel_(std::move(channel)),
      statement_slots_(options_.cache_capacity),
      log_slots_(options_.cache_capacity) {
  std::vector<int> everyone(static_cast<size_t>(options_.size));
  std::iota(everyone.begin(), everyone.end(), 0);
  open_set(0, std::move(everyone));
  if (options_.rank == 0) {
    Coordinator::Options c;
    c.size = options_.size;
    c.hosts = options_.hosts;
    c.planner = options_.planner;
    c.cycle_time = options_.cycle_time;
    c.cache_capacity = options_.cache_capacity;
    c.cause_grace = options_.cause_grace / 2;
    c.stall_warn_after = options_.stall_warn_after;
    c.stall_stop_after = options_.stall_stop_after;
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
  const OpDesc& one = *operations.front()->desc;
  const auto set = sets_.find(one.process_set);
  if (set == sets_.end() || set->second.index < 0) {
    throw std::invalid_argument(one.name + ": this rank is not a member of process set " +
                                std::to_string(one.process_set) + ", or the set was removed");
  }
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

int Runtime::set_size(uint32_t process_set) const {
  std::lock_guard lock(mutex_);
  const auto set = sets_.find(process_set);
  if (set == sets_.end()) {
    throw std::invalid_argument("there is no process set " + std::to_string(process_set) +
                                ", or it was removed");
  }
  return static_cast<int>(set->second.ranks.size());
}

void Runtime::excuse(double seconds) {
  {
    std::lock_guard lock(mutex_);
    excuse_ = seconds;
  }
  channel_->wake();
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
  for (auto& [id, set] : sets_) {
    if (set.executor) set.executor->stop();
  }
  for (auto& executor : retired_) executor->stop();
}

std::string Runtime::down_text() const {
  std::lock_guard lock(mutex_);
  return down_.value_or("");
}

std::vector<int> Runtime::thread_ids() const {
  std::vector<int> ids = {control_thread_id_.load()};
  std::lock_guard lock(mutex_);
  for (const auto& [id, set] : sets_) {
    if (set.executor) ids.push_back(set.executor->thread_id());
  }
  return ids;
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
  std::optional<double> excuse;
  bool down, lone;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(submitted_);
    excuse.swap(excuse_);
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
    const OpDesc& desc = *op->desc;
    Ready ready{op->desc, std::nullopt};
    const auto set = sets_.find(desc.process_set);
    if (set == sets_.end()) {  // removed since it was submitted
      complete(op,
               desc.name + ": process set " + std::to_string(desc.process_set) + " was removed");
      continue;
    }
    const bool changes_sets =
        desc.kind == OpKind::kAddProcessSet || desc.kind == OpKind::kRemoveProcessSet;
    if (changes_sets ||
        may_inline(desc, inline_limit, static_cast<int>(set->second.ranks.size()))) {
      const bool silent = desc.kind == OpKind::kBroadcast && desc.root != set->second.index;
      ready.payload.emplace(silent ? std::string_view()
                                   : std::string_view(static_cast<const char*>(op->input),
                                                      static_cast<size_t>(desc.bytes())));
    }
    say(std::move(ready));
  }
  for (auto& [id, set] : sets_) {
    if (coordinator_ || !set.executor) continue;
    if (const int finished = set.executor->take_finished(); finished != 0) {
      say(Finished{id, static_cast<uint32_t>(finished)});
    }
  }
  if (excuse) say(Excuse{*excuse});
  if (failure) say(Failed{std::move(*failure)});
  if (!frame.empty()) send(0, frame);
}

void Runtime::send(int rank, std::string_view frame) {
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
  const auto any_finished = [this] {
    return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) {
      return set.second.executor && set.second.executor->any_finished();
    });
  };
  do {
    for (auto& [id, set] : sets_) {
      if (!set.executor) continue;
      if (const int n = set.executor->take_finished(); n > 0) {
        coordinator_->on_launches_finished(id, n);
      }
    }
    std::vector<Entry> entries = coordinator_->take_entries(Clock::now());
    append(entries);
    for (Entry& entry : entries) apply(std::move(entry));
    report_finished_ = coordinator_->gathering();
    // A launch that finished before the flag was set did not wake this thread.
  } while (report_finished_ && any_finished());
}

void Runtime::append(const std::vector<Entry>& entries) {
  if (options_.size == 1 || entries.empty()) return;
  coordinator_->distribute(entries,
                           [this](int rank, std::string_view frame) { send(rank, frame); });
}

void Runtime::apply(Entry entry) {
  if (auto* launch = std::get_if<Launch>(&entry)) {
    apply_launch(std::move(*launch));
  } else if (const auto* error = std::get_if<Error>(&entry)) {
    const auto set = sets_.find(error->process_set);
    const int index = set == sets_.end() ? -1 : set->second.index;
    if (std::binary_search(error->absent.begin(), error->absent.end(), index)) return;
    for (const std::string& name : error->names) {
      std::shared_ptr<Operation> op;
      {
        std::lock_guard lock(mutex_);
        const auto it = in_flight_.find(key_of(error->process_set, name));
        // Of a removed set, an earlier operation of that name may still run.
        if (it == in_flight_.end() || it->second.launched) continue;
        op = it->second.operation;
      }
      complete(op, error->text);
    }
  } else {
    apply_down(std::get<Down>(entry));
  }
}

void Runtime::apply_launch(Launch launch) {
  const auto found = sets_.find(launch.items.front().desc->process_set);
  if (found == sets_.end() || found->second.index < 0) return;
  const Set& set = found->second;
  if (std::binary_search(launch.absent.begin(), launch.absent.end(), set.index)) return;
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
    // The lowest rank that takes part reports. (The absent are ascending.)
    int lowest = 0;
    for (int rank : launch.absent) lowest += rank == lowest;
    work.reported = set.index == lowest;
    work.launch = std::move(launch);
    set.executor->submit(std::move(work));
    return;
  }
  stats_.inlined_tensors.fetch_add(work.operations.size(), std::memory_order_relaxed);
  for (size_t i = 0; i < work.operations.size(); ++i) {
    const auto& op = work.operations[i];
    std::string error;
    try {
      apply_inlined(launch.items[i], *op);
    } catch (const std::exception& failure) {
      error = failure_text(op->desc->name, failure.what());
    }
    complete(op, error);
    // The other ranks have the set: a rank without it is out of step with them.
    if (!error.empty() && op->desc->kind == OpKind::kAddProcessSet) {
      throw std::runtime_error(error);
    }
  }
}

void Runtime::apply_inlined(const LaunchItem& item, Operation& op) {
  if (op.desc->kind == OpKind::kAddProcessSet) {
    const auto* ranks = static_cast<const int64_t*>(op.input);
    open_set(static_cast<uint32_t>(item.numbers.at(0)), {ranks, ranks + op.desc->numel()});
  } else if (op.desc->kind == OpKind::kRemoveProcessSet) {
    close_set(static_cast<uint32_t>(*static_cast<const int64_t*>(op.input)));
  } else if (op.desc->kind == OpKind::kJoin) {
    for (auto& [id, set] : sets_) {
      if (set.executor) set.executor->close_partial_transports();
    }
  }
  place_inline_result(item, op);
}

void Runtime::open_set(uint32_t id, std::vector<int> ranks) {
  Set set;
  set.ranks = std::move(ranks);
  const auto it = std::lower_bound(set.ranks.begin(), set.ranks.end(), options_.rank);
  if (it != set.ranks.end() && *it == options_.rank) {
    set.index = static_cast<int>(it - set.ranks.begin());
    Executor::Hooks hooks;
    hooks.complete = [this](const auto& op, const auto& error) {
      complete(op, error.empty() ? error : failure_text(op->desc->name, error));
    };
    hooks.await_cause = [this](const std::string& text) { return await_cause(text); };
    hooks.launch_finished = [this] {
      if (options_.rank != 0 || report_finished_) channel_->wake();
    };
    hooks.open_transport = [this, id, all = set.ranks](const std::vector<int>& members) {
      std::vector<int> global;
      for (int member : members) global.push_back(all[static_cast<size_t>(member)]);
      return open_transport_(id, global);
    };
    set.executor = std::make_unique<Executor>(
        std::move(hooks),
        Executor::Options{static_cast<int>(set.ranks.size()), options_.planner.average_over_active,
                          options_.core, options_.arena});
  }
  std::lock_guard lock(mutex_);
  sets_.insert_or_assign(id, std::move(set));
}

void Runtime::close_set(uint32_t id) {
  log_slots_.forget(id);
  std::erase_if(retired_, [](const auto& executor) { return executor->ended(); });
  std::lock_guard lock(mutex_);
  const auto it = sets_.find(id);
  if (it == sets_.end()) return;
  if (it->second.executor) {
    it->second.executor->retire();  // what the set agreed on before is still carried out
    retired_.push_back(std::move(it->second.executor));
  }
  sets_.erase(it);
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
  if (!down.abort || std::exchange(aborted_, true)) return;
  for (auto& [id, set] : sets_) {
    if (set.executor) set.executor->abort(down.text);
  }
  for (auto& executor : retired_) executor->abort(down.text);
}

// True once everything launched is finished; false if `limit` passes first.
bool Runtime::drain(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  const auto drained = [&](const std::unique_ptr<Executor>& executor) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return !executor || executor->drain(std::max(left, std::chrono::milliseconds(0)));
  };
  bool all = true;
  for (auto& [id, set] : sets_) all &= drained(set.executor);
  for (auto& executor : retired_) all &= drained(executor);
  return all;
}

void Runtime::leave() {
  // Launched operations may finish: their peers count on this rank.
  const bool clean = drain(options_.leave_grace);
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
  drain(options_.leave_grace);
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
