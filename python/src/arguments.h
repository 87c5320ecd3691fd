// Arguments of Python as values of C++. Those of another type are a TypeError that names the call,
// the argument and the type; what their own conversion raised is its cause.
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <limits>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel::python {

namespace nb = nanobind;

std::string printable(nb::handle value);  // str(value), with lone surrogates escaped
std::string type_of(nb::handle value);    // the name of its type

// Calls `convert`, which raises what Python's conversion to `type` raises.
template <class Convert>
auto converted(const std::string& call, const std::string& name, const char* type,
               Convert&& convert) {
  try {
    return convert();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt
    nb::raise_from(error, PyExc_TypeError, "%s: %s was not given a value of type %s", call.c_str(),
                   name.c_str(), type);
  }
}

nb::object index_of(nb::handle value);  // of an int; raises as Python does

template <std::integral T>
T whole_of(const char* call, const char* name, nb::handle value) {
  const nb::object index = converted(call, name, "int", [&] { return index_of(value); });
  T number{};
  if (!nb::try_cast(index, number, /*convert=*/false)) {
    using Limits = std::numeric_limits<T>;
    throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {} is not within {} and {}", call,
                                                         name, Limits::min(), Limits::max()));
  }
  return number;
}
double number_of(const char* call, const char* name, nb::handle value);
std::string string_of(const char* call, const char* name, nb::handle value);
std::string path_of(const char* call, const char* name, nb::handle value);
// True and False of Python and of NumPy, 0 and 1.
bool flag_of(const std::string& call, const char* name, nb::handle value);

// Nothing for None, else read(call, name, value).
template <class Read>
auto optional_of(Read&& read, const char* call, const char* name, nb::handle value)
    -> std::optional<decltype(read(call, name, value))> {
  if (value.is_none()) return std::nullopt;
  return read(call, name, value);
}

}  // namespace ouzel::python
