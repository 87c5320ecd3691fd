// The table of operators, and calls of it.
#pragma once

#include <nanobind/nanobind.h>

namespace ouzel::python {

void bind_operators(nanobind::module_& module);

}  // namespace ouzel::python
