// Feature maps phi: R^K -> R^F, applied to every row of q and k before the recurrence.
#pragma once

#include "ouzel/export.h"
#include "ouzel/tensor.h"

namespace ouzel {

enum class FeatureMapKind {
  kIdentity,
  kElu1,                // x + 1 for x > 0, else exp(x): elu(x) + 1 (arXiv:2006.16236)
  kRelu,                // max(x, 0)
  kElementwiseProduct,  // (W1 x + b1) * (W2 x + b2), learned: flash-linear-attention's default
};

// Parameters of a learned map: w [F, K] shared by all heads or [H, F, K] one a head; b [F] or [H,
// F], absent: no bias.
struct FeatureMapWeights {
  ConstTensor w1, b1, w2, b2;
};

struct FeatureMap {
  FeatureMapKind kind = FeatureMapKind::kIdentity;
  FeatureMapWeights q;
  FeatureMapWeights k;  // w1 absent: the map of q serves k too
};

// Gradients of the parameters, added to; absent tensors are not computed.
struct FeatureMapWeightGrads {
  Tensor w1, b1, w2, b2;
};
struct FeatureMapGrads {
  FeatureMapWeightGrads q;
  FeatureMapWeightGrads k;
};

}  // namespace ouzel
