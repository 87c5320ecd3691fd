// Models, states and generation.
#pragma once

#include <nanobind/nanobind.h>

namespace ouzel::python {

void bind_models(nanobind::module_& module);

}  // namespace ouzel::python
