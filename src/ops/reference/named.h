// References by name: operators whose reference is one function of named arrays, and whose
// gradients come from the tape of its operations (autodiff.h). Names of tensors, attributes and
// outputs are those of the operator's row in the table.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ouzel/segments.h"
#include "src/ops/reference/array.h"

namespace ouzel::reference {

// What a call says beside its tensors. Numbers and texts that are not set have no default here.
struct Setting {
  Segments segments;
  std::map<std::string, double> numbers;  // flags: 0 or 1
  std::map<std::string, std::string> texts;
};

struct NamedResults {
  Tensors<double> outputs;
  Tensors<double> gradients;  // by the name of the input; empty without upstream gradients
};

// The names that `evaluate` knows.
std::vector<std::string> named_references();

// Outputs, and the gradients of sum(output * upstream) over the outputs named in `upstream`.
NamedResults evaluate(const std::string& op, const Tensors<double>& inputs, const Setting& setting,
                      const Tensors<double>& upstream);

}  // namespace ouzel::reference
