// The Python module hvdtorch._C; its contract is hvdtorch/_C.pyi.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/gloo_link.h"
#include "bind/gradient_bucket.h"
#include "bind/gradient_hooks.h"
#include "bind/gradient_memory.h"
#include "bind/job.h"
#include "bind/site.h"
#include "channel/local.h"
#include "channel/shared.h"
#include "channel/tcp.h"
#include "core/log.h"
#include "core/thread.h"
#include "shared/host_group.h"
#include "shared/waiting.h"
#include "transport/choice.h"

namespace hvdtorch {
namespace {

namespace py = pybind11;

class Handle {
 public:
  explicit Handle(Submitted submitted) : submitted_(std::move(submitted)) {}

  // Note [Interruptible wait]
  // The futex wait ends when a signal reaches this thread, so Ctrl-C works. A signal that came
  // just before the wait began would be missed: the slice bounds that delay.
  bool wait(std::optional<double> timeout) {
    using Clock = Completion::Clock;
    if (!done() && on_runtime_thread()) {
      throw std::runtime_error(
          "a callback of a future cannot wait for another operation, which this thread would have "
          "to complete: start it with an _async function and chain its future, or wait in a thread "
          "of your own");
    }
    std::optional<Clock::time_point> deadline;
    if (timeout) {
      deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(*timeout));
    }
    for (;;) {
      if (!submitted_.completion->done()) {
        const CountedAsWaiting counted;
        const auto slice = Clock::now() + std::chrono::seconds(1);
        const auto until = deadline && *deadline < slice ? *deadline : slice;
        std::shared_ptr<Runtime> runtime = Job::instance().shared_runtime();
        py::gil_scoped_release no_gil;
        if (runtime) {
          runtime->wait(*submitted_.completion, until);
        } else {
          submitted_.completion->wait(until);
        }
        runtime.reset();
      }
      if (submitted_.completion->done()) break;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (deadline && Clock::now() >= *deadline) return false;
    }
    if (!submitted_.completion->error().empty()) {
      throw InternalError(submitted_.completion->error());
    }
    return true;
  }

  bool done() const { return submitted_.completion->done(); }

  std::optional<std::string> error() const {
    if (!done() || submitted_.completion->error().empty()) return std::nullopt;
    return submitted_.completion->error();
  }

  std::vector<at::Tensor> outputs() const {
    std::vector<at::Tensor> results;
    results.reserve(submitted_.members.size());
    for (const auto& member : submitted_.members) results.push_back(member->result());
    return results;
  }

  std::vector<int64_t> numbers(size_t member) const {
    return submitted_.operations.at(member)->numbers;
  }

  void add_done_callback(py::object callback) {
    auto shared = std::make_shared<py::object>(std::move(callback));
    submitted_.completion->add_callback([shared]() mutable {
      py::gil_scoped_acquire gil;
      try {
        (*shared)();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("hvdtorch done callback");
      }
      shared.reset();
    });
  }

 private:
  Submitted submitted_;
};

Handle submit(int kind, std::string name, std::string label, std::vector<at::Tensor> tensors,
              bool grouped, bool in_place, int reduce_op, double prescale, double postscale,
              int32_t root, std::optional<std::vector<int64_t>> splits, uint32_t process_set,
              bool wait) {
  if (kind < 0 || kind >= kNumOpKinds) throw std::invalid_argument("unknown operation kind");
  if (reduce_op < 0 || reduce_op >= kNumReduceOps) {
    throw std::invalid_argument("unknown reduce op " + std::to_string(reduce_op));
  }
  Request request;
  request.kind = static_cast<OpKind>(kind);
  request.name = std::move(name);
  request.label = std::move(label);
  request.tensors = std::move(tensors);
  request.grouped = grouped;
  request.in_place = in_place;
  request.op = static_cast<ReduceOp>(reduce_op);
  request.prescale = prescale;
  request.postscale = postscale;
  request.root = root;
  if (splits) request.splits = std::move(*splits);
  request.process_set = process_set;
  request.site = current_site();
  request.waits = wait && !on_runtime_thread();
  Handle handle(Job::instance().submit(std::move(request)));
  if (wait) handle.wait(std::nullopt);
  return handle;
}

std::string directory_of(const char* module) {
  const auto file = py::module_::import(module).attr("__file__").cast<std::string>();
  return file.substr(0, file.rfind('/') + 1);
}

// Through shared memory where this rank has any in common with rank 0.
std::unique_ptr<Channel> make_channel(const Topology& topology, const std::vector<int>& fds) {
  const auto& group_of = topology.group_of;
  const int own = group_of[static_cast<size_t>(topology.rank)];
  if (!topology.group || own != group_of[0]) return make_tcp_channel(topology.rank, fds);
  Mailboxes mailboxes;
  for (size_t rank = 0; rank < group_of.size(); ++rank) {
    if (group_of[rank] != own) continue;
    const auto index = static_cast<int>(mailboxes.size());
    mailboxes.push_back({static_cast<int>(rank), topology.group->mailbox(index)});
  }
  return make_shared_channel(topology.rank, fds, mailboxes, topology.group);
}

void start(int rank, int size, std::vector<std::string> hosts, std::vector<int> fds,
           py::object link, std::shared_ptr<HostGroup> group, std::vector<int> group_of,
           const py::dict& settings) {
  set_library_directories(directory_of("hvdtorch"), directory_of("torch"));
  RuntimeOptions options;
  options.rank = rank;
  options.size = size;
  options.hosts = std::move(hosts);
  const auto setting = [&]<typename T>(const char* name, T) { return settings[name].cast<T>(); };
  const auto seconds = [&](const char* name) {
    return std::chrono::microseconds(static_cast<int64_t>(setting(name, 0.0) * 1e6));
  };
  const auto milliseconds = [&](const char* name) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(seconds(name));
  };
  options.planner.fusion_threshold = setting("fusion_threshold", int64_t{});
  options.planner.group_fusion = setting("group_fusion", bool{});
  options.planner.average_over_active = setting("average_over_active", bool{});
  options.cycle_time = seconds("cycle_time");
  options.cache_capacity = setting("cache_capacity", uint32_t{});
  options.inline_limit = setting("inline_limit", int64_t{});
  options.lone_inline_limit = setting("lone_inline_limit", int64_t{});
  options.core = setting("core", int{});
  options.may_spin = setting("spin", bool{});
  options.stall_warn_after = milliseconds("stall_warn_after");
  options.stall_stop_after = milliseconds("stall_stop_after");
  configure_log(static_cast<LogLevel>(setting("log_level", int{})),
                setting("log_hide_time", bool{}));
  std::unique_ptr<Channel> channel;
  options.planner.hosts = group_of;
  Topology topology{rank, std::move(group_of), std::move(group), nullptr};
  if (size == 1) {
    channel = std::move(make_local_channels(1).front());
  } else {
    channel = make_channel(topology, fds);
  }
  if (!link.is_none()) {
    auto* backend = link.cast<c10d::Backend*>();
    topology.network = make_gloo_link(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(backend));
  }
  SharedMemoryOptions shared;
  shared.spin.cores_suffice = options.may_spin;
  if (const auto limit = milliseconds("operation_timeout"); limit.count() > 0) shared.limit = limit;
  if (topology.group) options.arena = topology.group->shared_arena();
  Job::instance().start(std::move(options), std::move(channel),
                        make_transport_factory(std::move(topology), shared));
}

at::Tensor shared_empty(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  const int64_t bytes =
      c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype));
  auto block = Job::instance().allocate(bytes);
  void* data = block.get();
  return at::from_blob(
      data, shape, [block](void*) mutable { block.reset(); }, at::TensorOptions(dtype));
}

std::unique_ptr<GradientBucket> make_bucket(GradientHooks& hooks,
                                            const std::vector<size_t>& members,
                                            std::vector<std::vector<int64_t>> sizes,
                                            std::vector<std::vector<int64_t>> strides,
                                            at::ScalarType type, std::string name, int reduce_op,
                                            double prescale, double postscale,
                                            uint32_t process_set) {
  std::vector<std::shared_ptr<GradientSlot>> slots;
  for (size_t index : members) slots.push_back(hooks.slot(index));
  GradientReduction reduction{std::move(name), static_cast<ReduceOp>(reduce_op), prescale,
                              postscale, process_set};
  return std::make_unique<GradientBucket>(std::move(slots), std::move(sizes), std::move(strides),
                                          type, std::move(reduction));
}

void bind_gradients(py::module_& m) {
  py::class_<GradientHooks>(m, "GradientHooks")
      .def(py::init([](const py::object& group) {
             return std::make_unique<GradientHooks>(group.ptr());
           }),
           py::arg("group"))
      .def("add", &GradientHooks::add, py::arg("parameter"), py::arg("hooked"))
      .def(
          "set_marks",
          [](GradientHooks& hooks, const py::bytearray& marks, const py::bytearray& guards) {
            hooks.set_marks(marks.ptr(), guards.ptr());
          },
          py::arg("marks"), py::arg("guards"))
      .def("open", &GradientHooks::open, py::arg("task"), py::arg("reduces"))
      .def("close", &GradientHooks::close)
      .def("refresh", &GradientHooks::refresh)
      .def("release", &GradientHooks::release)
      .def_readwrite("fired", &GradientHooks::fired);
  m.def(
      "on_gradient",
      [](const py::object& before, const py::object& after) {
        GradientHooks::on_gradient(before.ptr(), after.ptr());
      },
      py::arg("before"), py::arg("after"));
  m.def("end_of_pass", &GradientMemory::end);
  m.def("forget_gradient_memory", &GradientMemory::reset);
  py::class_<GradientBucket>(m, "GradientBucket")
      .def(py::init(&make_bucket), py::arg("hooks"), py::arg("members"), py::arg("sizes"),
           py::arg("strides"), py::arg("dtype"), py::arg("name"), py::arg("reduce_op"),
           py::arg("prescale"), py::arg("postscale"), py::arg("process_set"))
      .def("offer", &GradientBucket::offer, py::arg("member"))
      .def("launch", &GradientBucket::launch)
      .def("launch_zeros", &GradientBucket::launch_zeros)
      .def("retire", &GradientBucket::retire)
      .def("handle", [](const GradientBucket& bucket) { return Handle(bucket.submitted()); })
      .def("gradients", &GradientBucket::gradients)
      .def("land", &GradientBucket::land)
      .def("abandon", &GradientBucket::abandon)
      .def_property_readonly("in_flight", &GradientBucket::in_flight)
      .def_property_readonly("launches", &GradientBucket::launches);
}

py::dict stats() {
  const RuntimeStats& stats = Job::instance().runtime().stats();
  py::dict all;
  all["operations"] = stats.operations.load();
  all["launches"] = stats.launches.load();
  all["launched_tensors"] = stats.launched_tensors.load();
  all["inlined_tensors"] = stats.inlined_tensors.load();
  all["frames_sent"] = stats.frames_sent.load();
  all["frame_bytes_sent"] = stats.frame_bytes_sent.load();
  return all;
}

}  // namespace

// Read from the file before it is loaded (hvdtorch/native.py).
[[gnu::used]] const char build_stamp[] = "hvdtorch-built-for-torch=" HVDTORCH_TORCH_VERSION;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("BUILD_TORCH_VERSION") = HVDTORCH_TORCH_VERSION;
#ifdef HVDTORCH_WITH_CUDA
  m.attr("BUILD_WITH_CUDA") = true;
#else
  m.attr("BUILD_WITH_CUDA") = false;
#endif

  static PyObject* internal_error = PyErr_NewExceptionWithDoc(
      "hvdtorch.HorovodInternalError",
      "A failure that every rank of the job is told about: a mismatch between ranks, or a rank "
      "that is gone.",
      PyExc_RuntimeError, nullptr);
  m.attr("HorovodInternalError") = py::handle(internal_error);
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const InternalError& error) {
      PyErr_SetString(internal_error, error.what());
    }
  });

  py::class_<Handle>(m, "Handle")
      .def("wait", &Handle::wait, py::arg("timeout") = py::none())
      .def("done", &Handle::done)
      .def("error", &Handle::error)
      .def("outputs", &Handle::outputs)
      .def("numbers", &Handle::numbers, py::arg("member") = 0)
      .def("add_done_callback", &Handle::add_done_callback, py::arg("callback"));

  bind_gradients(m);

  m.def("submit", &submit, py::arg("kind"), py::arg("name"), py::arg("label"), py::arg("tensors"),
        py::arg("grouped"), py::arg("in_place"), py::arg("reduce_op"), py::arg("prescale"),
        py::arg("postscale"), py::arg("root"), py::arg("splits"), py::arg("process_set"),
        py::arg("wait") = false);
  // How the ranks of one host share memory: see hvdtorch/shared_memory.py.
  py::class_<HostGroup, std::shared_ptr<HostGroup>>(m, "HostGroup")
      .def_static("create", &HostGroup::create, py::arg("size"))
      .def_static(
          "open",
          [](int index, int size, int pid, int fd, uint64_t nonce) {
            return HostGroup::open(index, size, {pid, fd, nonce});
          },
          py::arg("index"), py::arg("size"), py::arg("pid"), py::arg("fd"), py::arg("nonce"))
      .def("address", [](const HostGroup& group) {
        const auto address = group.address();
        return std::make_tuple(address.pid, address.fd, address.nonce);
      });
  m.def("start", &start, py::arg("rank"), py::arg("size"), py::arg("hosts"), py::arg("fds"),
        py::arg("link"), py::arg("group"), py::arg("group_of"), py::arg("settings"));
  m.def("shared_empty", &shared_empty, py::arg("shape"), py::arg("dtype"));
  m.def(
      "stop", [](const std::string& reason) { Job::instance().stop(reason); }, py::arg("reason"),
      py::call_guard<py::gil_scoped_release>());
  m.def("renumber_unnamed", [] { Job::instance().renumber(); });
  m.def(
      "excuse", [](double seconds) { Job::instance().runtime().excuse(seconds); },
      py::arg("seconds"));
  m.def("is_running", [] { return Job::instance().running(); });
  m.def("runtime_threads", [] { return Job::instance().runtime().thread_ids(); });
  m.def("stats", &stats);
}

}  // namespace hvdtorch
