// Kernels of RMSNorm: rows [begin, end) of the operator's arrays (src/ops/norm.h).
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

enum class GateActivation { kSilu, kSigmoid };

struct RmsNormOptions {
  float eps = 1e-6f;
  GateActivation activation = GateActivation::kSilu;
  bool gate_first = false;        // the gate multiplies x, not the result
  bool weight_per_group = false;  // weight [G, D], not [D]
};

struct RmsNorm {
  RmsNormOptions options;
  View<const float, 3> x, gate;   // gate.data may be null
  const float* weight = nullptr;  // may be null
  View<float, 3> y;
  float* rstd = nullptr;  // may be null
};
void rms_norm_rows(Isa isa, const RmsNorm& norm, std::int64_t begin, std::int64_t end);

struct RmsNormBackward {
  RmsNormOptions options;
  View<const float, 3> x, gate, dy;
  const float* weight = nullptr;
  const float* rstd = nullptr;
  View<float, 3> dx, dgate;
};
// dweight, like the weight, is added to, or null.
void rms_norm_backward_rows(Isa isa, const RmsNormBackward& norm, std::int64_t begin,
                            std::int64_t end, float* dweight);

}  // namespace ouzel
