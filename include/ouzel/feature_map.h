// Feature maps phi: R^K -> R^F, applied to every row of q and k before the recurrence; the weight
// of a key is phi(q) . phi(k). Sources and defaults: docs/numerics.md.
#pragma once

#include <cstdint>
#include <optional>

#include "ouzel/export.h"
#include "ouzel/tensor.h"

namespace ouzel {

// d = K; m is the number of rows of W (w1); [a, b]: one after the other.
enum class FeatureMapKind {
  kIdentity,
  kElu1,   // x + 1 for x > 0, else exp(x): elu(x) + 1
  kRelu,   // max(x, 0)
  kRelu2,  // max(x, 0)^2
  kExp,    // exp(x), with a running maximum
  kSoftmax,
  kTaylor1,             // [1, sqrt(s) x], s = kernel_scale: weight 1 + s q.k; signed
  kTaylor2,             // [1, sqrt(s) x, s x_i x_j / sqrt(2)]: weight 1 + s q.k + (s q.k)^2 / 2
  kTaylor2Symmetric,    // the same weight: [1, sqrt(s) x, s x_i^2 / sqrt(2), s x_i x_j (i < j)]
  kRebased,             // [s x_i^2, sqrt(2) s x_i x_j (i < j)]: weight (s q.k)^2
  kFavorPositive,       // m^-1/2 exp(W y - |y|^2 / 2), y = x d^-1/4, with a running maximum
  kFavorHyperbolic,     // (2m)^-1/2 [exp(W y - |y|^2 / 2), exp(-W y - |y|^2 / 2)], likewise
  kFavorRelu,           // max(W x, 0) + kernel_eps
  kRandomFourier,       // m^-1/2 [cos(W x), sin(W x)]; signed
  kCosformer,           // [r cos(a), r sin(a)], r = max(x, 0), a = pi/2 position / max_length
  kDpfp,                // r_i r_(i-j mod 2d), j = 1 ... nu outer; r = [max(x, 0), max(-x, 0)]
  kT2r,                 // max(W x + b, 0)
  kHedgehog,            // softmax([y, -y]), y = 2 (W x + b)
  kHedgehogSeparate,    // [softmax(W x), softmax(-W x)]
  kElementwiseProduct,  // (W1 x + b1) * (W2 x + b2); signed
  kLuna,                // m^-1/2 psi_l(w_i . x), i outer; psi(a) = U silu(u a + c) + e; signed
  kL2Norm,              // x / sqrt(|x|^2 + l2norm_eps); signed
};

// Parameters of a map: w [m, K] shared by all heads or [H, m, K] one a head; b [m] or [H, m],
// absent: no bias. psi (luna): u = psi_w1 [J], c = psi_b1 [J], U = psi_w2 [L, J], e = psi_b2 [L].
struct FeatureMapWeights {
  ConstTensor w1 = {}, b1 = {}, w2 = {}, b2 = {};
  ConstTensor psi_w1 = {}, psi_b1 = {}, psi_w2 = {}, psi_b2 = {};
};

// Numbers that some maps have.
struct FeatureMapOptions {
  std::optional<double> kernel_scale = {};  // s of taylor and rebased; default K^-0.5
  double kernel_eps = 1e-3;
  double l2norm_eps = 1e-6;
  std::int64_t nu = 1;
  std::int64_t max_length = 0;  // cosformer: positions are below it
};

struct FeatureMap {
  FeatureMapKind kind = FeatureMapKind::kIdentity;
  FeatureMapWeights q = {};
  FeatureMapWeights k = {};  // w1 absent: the map of q serves k too
  FeatureMapOptions options = {};
};

// Gradients of the parameters, added to; absent tensors are not computed.
struct FeatureMapWeightGrads {
  Tensor w1 = {}, b1 = {}, w2 = {}, b2 = {};
  Tensor psi_w1 = {}, psi_b1 = {}, psi_w2 = {}, psi_b2 = {};
};
struct FeatureMapGrads {
  FeatureMapWeightGrads q = {};
  FeatureMapWeightGrads k = {};
};

// Fills w [m, K] with the random projection of FAVOR+: Gaussian rows, orthogonal to each other
// within blocks of K (arXiv:2009.14794, appendix B.2). The same numbers for the same seed,
// anywhere; draw another one by another seed. Throws Error(kInvalidArgument) for sizes below 1, or
// beyond memory.
enum class ProjectionNorms {
  kChi,   // of Gaussian rows: unbiased
  kSqrt,  // all sqrt(K)
};
OUZEL_EXPORT void draw_orthogonal_projection(std::uint64_t seed, ProjectionNorms norms,
                                             View<float, 2> w);

}  // namespace ouzel
