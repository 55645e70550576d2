#include "bind/site.h"

#include <Python.h>
#include <frameobject.h>

#include <string_view>
#include <utility>

namespace hvdtorch {
namespace {

std::string own_directory, torch_directory;

bool is_library(std::string_view file) {
  return file.starts_with('<') || (!own_directory.empty() && file.starts_with(own_directory)) ||
         (!torch_directory.empty() && file.starts_with(torch_directory));
}

std::string_view utf8(PyObject* text) {
  Py_ssize_t length = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &length);
  if (data == nullptr) {
    PyErr_Clear();  // a file name that is no text: leave it out
    return {};
  }
  return {data, static_cast<size_t>(length)};
}

}  // namespace

void set_library_directories(std::string own, std::string torch) {
  own_directory = std::move(own);
  torch_directory = std::move(torch);
}

std::string current_site() {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string site;
  while (frame != nullptr && site.empty()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const std::string_view file = utf8(code->co_filename);
    if (!file.empty() && !is_library(file)) {
      site = file.substr(file.rfind('/') + 1);  // npos + 1 is 0: the whole name
      site += ':' + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return site;
}

}  // namespace hvdtorch
