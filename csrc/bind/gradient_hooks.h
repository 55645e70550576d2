// GradientHooks: what runs right before and after autograd accumulates into the `.grad` of the
// parameters of one group. The ordinary case, a dense gradient of a bucket in a pass that reduces,
// is dealt with here, without the interpreter; everything else is handed to Python
// (gradient_reducer.py), which also says at the begin of every backward() which of the two ordinary
// things is to be done: count the pass, or reduce.
//
// The hooks sit on the parameters' AccumulateGrad nodes, not on the tensors: the one before runs
// only if something is really accumulated, the one after follows all hooks that users can register
// on the parameter. A parameter refers to its node weakly, so that the nodes are held here.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bind/gradient_bucket.h"

namespace hvdtorch {

class GradientHooks {
 public:
  // Python's part, set once: before(group, index) and after(group, index). Both are kept for ever.
  static void on_gradient(PyObject* before, PyObject* after);
  // Where in the user's script the backward() of this moment was called, for error texts.
  static const std::string& site();

  // `group`: handed to Python; not kept alive.
  explicit GradientHooks(PyObject* group);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // One more parameter, the next of the group. `hooked`: it can have a gradient.
  void add(const at::Tensor& parameter, bool hooked);
  // Where the parameters' marks are, one byte each, and whether Python has to look at what an
  // accumulation will be added to. Both are bytearrays, of fixed size from now on.
  void set_marks(PyObject* marks, PyObject* guards);

  // A backward() has begun: `reduces` or counts as one of those whose gradients are only added up.
  // Until then, Python decides about each gradient.
  void open(int64_t task, bool reduces);
  void close() { task_ = -1; }

  // A parameter that was converted to another type has a new node: hooks it. Whether there was one.
  bool refresh();
  // Nobody uses the group any more. Lets go of the parameters.
  void release();

  uint8_t& mark(size_t index) { return static_cast<uint8_t*>(marks_.buf)[index]; }
  const std::shared_ptr<GradientSlot>& slot(size_t index) const { return slots_.at(index); }

  bool fired = false;  // in the current pass

  void before(GradientSlot& slot);
  void after(GradientSlot& slot);

 private:
  using Node = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  void hook(size_t index);
  void ask_python(PyObject* function, const GradientSlot& slot);

  PyObject* group_;  // a weak reference
  std::vector<std::shared_ptr<GradientSlot>> slots_;
  std::vector<Node> nodes_;
  Py_buffer marks_{}, guards_{};
  int64_t task_ = -1;
  bool reduces_ = false;
};

}  // namespace hvdtorch
