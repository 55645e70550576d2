#include "bind/gradient_hooks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <utility>

#include "bind/gradient_memory.h"
#include "bind/site.h"

namespace hvdtorch {
namespace {

using torch::autograd::variable_list;

PyObject* python_before = nullptr;
PyObject* python_after = nullptr;
std::string current_backward;  // its site

// Under compiled autograd, which traces hooks, both do nothing; then step() reduces the gradients,
// like those that were put there by hand.
struct Before final : torch::autograd::FunctionPreHook {
  explicit Before(std::shared_ptr<GradientSlot> slot) : slot(std::move(slot)) {}
  variable_list operator()(const variable_list& gradients) override {
    if (slot->hooks != nullptr && slot->parameter.defined()) slot->hooks->before(*slot);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  std::shared_ptr<GradientSlot> slot;
};

struct After final : torch::autograd::FunctionPostHook {
  explicit After(std::shared_ptr<GradientSlot> slot) : slot(std::move(slot)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    // Neither an undefined gradient nor one of a parameter that needs none is accumulated.
    if (slot->hooks != nullptr && slot->parameter.defined() && gradients[0].defined() &&
        slot->parameter.requires_grad()) {
      slot->hooks->after(*slot);
    }
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  std::shared_ptr<GradientSlot> slot;
};

void hold(Py_buffer& buffer, PyObject* bytes) {
  if (buffer.obj != nullptr) PyBuffer_Release(&buffer);
  if (bytes != nullptr && PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE) != 0) {
    throw pybind11::error_already_set();
  }
}

}  // namespace

void GradientHooks::on_gradient(PyObject* before, PyObject* after) {
  python_before = Py_NewRef(before);
  python_after = Py_NewRef(after);
}

const std::string& GradientHooks::site() { return current_backward; }

GradientHooks::GradientHooks(PyObject* group) : group_(PyWeakref_NewRef(group, nullptr)) {
  if (group_ == nullptr) throw pybind11::error_already_set();
}

GradientHooks::~GradientHooks() {
  release();
  for (const auto& slot : slots_) slot->hooks = nullptr;
  hold(marks_, nullptr);
  hold(guards_, nullptr);
  Py_DECREF(group_);
}

void GradientHooks::add(const at::Tensor& parameter, bool hooked) {
  auto slot = std::make_shared<GradientSlot>();
  slot->hooks = this;
  slot->index = slots_.size();
  slot->parameter = parameter;
  slots_.push_back(std::move(slot));
  nodes_.emplace_back();
  if (hooked) hook(slots_.size() - 1);
}

void GradientHooks::hook(size_t index) {
  const auto& slot = slots_[index];
  const bool required = slot->parameter.requires_grad();
  slot->parameter.set_requires_grad(true);  // there is a node only then; it outlives later changes
  nodes_[index] = torch::autograd::impl::grad_accumulator(slot->parameter);
  slot->parameter.set_requires_grad(required);
  nodes_[index]->add_pre_hook(std::make_unique<Before>(slot));
  nodes_[index]->add_post_hook(std::make_unique<After>(slot));
}

void GradientHooks::set_marks(PyObject* marks, PyObject* guards) {
  hold(marks_, marks);
  hold(guards_, guards);
}

bool GradientHooks::refresh() {
  bool changed = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!nodes_[i] || !slots_[i]->parameter.defined() ||
        torch::autograd::impl::try_get_grad_accumulator(slots_[i]->parameter) == nodes_[i]) {
      continue;
    }
    hook(i);
    changed = true;
  }
  return changed;
}

void GradientHooks::release() {
  close();
  for (const auto& slot : slots_) slot->parameter.reset();
  nodes_.assign(nodes_.size(), Node());  // and with them, if no graph has them, the hooks
}

void GradientHooks::open(int64_t task, bool reduces) {
  task_ = task;
  reduces_ = reduces;
  current_backward = current_site();
  if (reduces) GradientMemory::begin();
  for (const auto& slot : slots_) {
    slot->fresh = false;
    if (slot->bucket != nullptr && slot->member == 0) slot->bucket->recount();
  }
}

void GradientHooks::before(GradientSlot& slot) {
  // What is in flight must not be added to.
  if (mark(slot.index) >= kLaunched || static_cast<uint8_t*>(guards_.buf)[slot.index] != 0) {
    ask_python(python_before, slot);
  }
  if (!slot.parameter.grad().defined()) slot.fresh = true;
}

void GradientHooks::after(GradientSlot& slot) {
  uint8_t& mark = this->mark(slot.index);
  if (torch::autograd::get_current_graph_task_id() == task_ && mark <= kHeld) {
    if (!reduces_) {
      mark = kHeld;
      fired = true;
      return;
    }
    try {
      if (slot.bucket != nullptr && slot.bucket->offer(slot.member)) {
        fired = true;
        return;
      }
    } catch (const std::exception&) {
      // Python tries again, and raises what is the matter in the user's terms.
    }
  }
  ask_python(python_after, slot);
}

void GradientHooks::ask_python(PyObject* function, const GradientSlot& slot) {
  const pybind11::gil_scoped_acquire gil;
  PyObject* group = PyObject_CallNoArgs(group_);
  PyObject* result =
      group == nullptr || group == Py_None
          ? Py_XNewRef(group)
          : PyObject_CallFunction(function, "On", group, static_cast<Py_ssize_t>(slot.index));
  Py_XDECREF(group);
  if (result == nullptr) {
    python_error error;  // how torch carries a Python exception through the engine
    error.persist();
    throw error;
  }
  Py_DECREF(result);
}

}  // namespace hvdtorch
