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

// Rows of groups of features, of the type that a call has for all of them.
template <class Void>
struct NormRows {
  Void* data = nullptr;
  std::int64_t row = 0, group = 0;  // strides, in numbers
};

struct RmsNorm {
  RmsNormOptions options;
  DType dtype = DType::kF32;  // of x, gate and y
  std::int64_t groups = 0, size = 0;
  NormRows<const void> x, gate;   // gate.data may be null
  const float* weight = nullptr;  // may be null
  NormRows<void> y;
  float* rstd = nullptr;  // may be null
};
// `work`: [size], of types of 16 bits only.
void rms_norm_rows(Isa isa, const RmsNorm& norm, std::int64_t begin, std::int64_t end, float* work);

struct RmsNormBackward {
  RmsNormOptions options;
  DType dtype = DType::kF32;  // of x, gate, dy, dx and dgate
  std::int64_t groups = 0, size = 0;
  NormRows<const void> x, gate, dy;
  const float* weight = nullptr;
  const float* rstd = nullptr;
  NormRows<void> dx, dgate;
};
// dweight, like the weight, is added to, or null.
void rms_norm_backward_rows(Isa isa, const RmsNormBackward& norm, std::int64_t begin,
                            std::int64_t end, float* work, float* dweight);

}  // namespace ouzel
