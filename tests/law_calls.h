// Calls of the laws of ouzel/laws.h through the public API, their inputs found by name.
#pragma once

#include <string>

#include "tests/calls.h"

namespace ouzel {
class MatrixLaw;
}

namespace ouzel::test {

// Whether it is among ouzel::matrix_laws().
bool is_matrix_law(const std::string& op);

// Whether an input holds log decays, which are at most 0.
bool is_log_decay(const Call& call, const Slot& slot);

Results<float> run_law(Context& context, const Call& call, const ByName& arguments);
Results<float> run_law_steps(Context& context, const Call& call, const ByName& arguments);

}  // namespace ouzel::test
