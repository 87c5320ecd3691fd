// Calls of the laws of ouzel/laws.h through the public API, their inputs found by name.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "ouzel/laws.h"
#include "src/ops/law.h"
#include "tests/calls.h"
#include "tests/operand.h"

namespace ouzel::test {

// Whether it is among ouzel::matrix_laws().
bool is_matrix_law(const std::string& op);

// Whether an input holds log decays, which are at most 0.
bool is_log_decay(const Call& call, const Slot& slot);

// The arguments of a call in float32, where the members that the law's row names point to.
struct LawInFloat {
  LawInFloat(const Call& call, const ByName& arguments);
  LawInFloat(const LawInFloat&) = delete;

  Operand output(bool strided) const {
    return Operand::output({query[0], query[1], std::max(query[2], value[2]), value[3]}, strided);
  }
  StateOperands state(std::int64_t sequences) const {
    return {Operand::output({sequences, value[2], query[3], value[3]}), {}, {}, {}, 0, {}};
  }

  struct Memory {
    const LawInput* input;
    Operand operand;
  };
  const ouzel::Law& law;
  MatrixLaw op;
  const ByName& arguments;
  LawOptions options;
  std::list<Memory> memory;  // what `inputs` points to
  std::vector<std::int64_t> query, value;
  StateOperands initial;
  RecurrenceInputs inputs;
};

Results<float> run_law(Context& context, const Call& call, const ByName& arguments);
Results<float> run_law_steps(Context& context, const Call& call, const ByName& arguments);

}  // namespace ouzel::test
