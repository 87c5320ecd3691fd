// The yardstick of results (docs/numerics.md): RMS of the difference over RMS of the truth, per
// tensor, with a floor of 1e-3 of the largest RMS among the file's tensors of the same kind.
#pragma once

#include <string>
#include <vector>

#include "src/base/bounds.h"
#include "src/formats/safetensors.h"
#include "src/ops/registry.h"

namespace ouzel::app {

struct Comparison {
  std::string name;
  double error = 0;
  double bound = 0;   // infinite: none
  std::string fault;  // a shape that differs, or a value that is finite on one side only

  bool within() const { return fault.empty() && error <= bound; }
};

// Compares every result of which the file holds the truth. Truths beyond 1e37 only have to be met
// in kind: a state may use them as a mark.
std::vector<Comparison> compare(const SafetensorsReader& file,
                                const std::vector<NamedArray>& results, const Bounds& bounds);

// One line: name, error, bound, verdict.
std::string describe(const Comparison& comparison);

}  // namespace ouzel::app
