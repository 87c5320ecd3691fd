// The extension module ouzel._core.
#include <nanobind/nanobind.h>

#include <exception>
#include <string_view>

#include "ouzel/error.h"
#include "ouzel/version.h"
#include "python/src/context.h"
#include "python/src/models.h"
#include "python/src/operators.h"

namespace nb = nanobind;

namespace {

const char* exception_of(ouzel::ErrorKind kind) {
  switch (kind) {
    case ouzel::ErrorKind::kInvalidArgument:
      return "InvalidArgumentError";
    case ouzel::ErrorKind::kBadFile:
      return "BadFileError";
    case ouzel::ErrorKind::kIo:
      return "FileAccessError";
    case ouzel::ErrorKind::kOutOfMemory:
      return "OutOfMemoryError";
    case ouzel::ErrorKind::kCancelled:
      return "CancelledError";
  }
  return "Error";
}

}  // namespace

NB_MODULE(_core, module) {
#ifndef __SANITIZE_ADDRESS__
  // What outlives Python in a graph of a framework that refers to itself is no fault of ours to
  // report.
  nb::set_leak_warnings(false);
#endif
  module.attr("__version__") = ouzel::version();
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const ouzel::Error& error) {
      const nb::object type =
          nb::module_::import_("ouzel._errors").attr(exception_of(error.kind()));
      // Names of files need not be UTF-8.
      const std::string_view sentence = error.what();
      const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
          sentence.data(), static_cast<Py_ssize_t>(sentence.size()), "backslashreplace"));
      PyErr_SetObject(type.ptr(), text.ptr());
    }
  });
  ouzel::python::bind_context(module);
  ouzel::python::bind_operators(module);
  ouzel::python::bind_models(module);
}
