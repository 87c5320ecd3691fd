#include "python/src/arguments.h"

#include <nanobind/stl/string.h>

namespace ouzel::python {

std::string printable(nb::handle value) {
  const nb::str text(value);
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

std::string type_of(nb::handle value) { return printable(value.type().attr("__name__")); }

nb::object index_of(nb::handle value) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  return index;
}

double number_of(const char* call, const char* name, nb::handle value) {
  return converted(call, name, "float", [&] {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return number;
  });
}

std::string string_of(const char* call, const char* name, nb::handle value) {
  return converted(call, name, "str", [&] {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (data == nullptr) throw nb::python_error();
    return std::string(data, static_cast<std::size_t>(size));
  });
}

std::string path_of(const char* call, const char* name, nb::handle value) {
  return converted(call, name, "str or os.PathLike", [&] {
    PyObject* bytes = nullptr;
    if (PyUnicode_FSConverter(value.ptr(), &bytes) == 0) throw nb::python_error();
    const nb::object path = nb::steal(bytes);
    return std::string(PyBytes_AS_STRING(bytes), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes)));
  });
}

bool flag_of(const std::string& call, const char* name, nb::handle value) {
  const std::string text = printable(nb::str(value).attr("lower")());
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  throw nb::type_error(
      fmt::format("{}: {} is of type {}, not bool", call, name, type_of(value)).c_str());
}

}  // namespace ouzel::python
