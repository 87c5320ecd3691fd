// References of the feature maps (ouzel/feature_map.h), one row at a time. Without running maxima:
// float64 holds the sums as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "ouzel/feature_map.h"
#include "src/ops/reference/array.h"

namespace ouzel::reference {

// w [m, K] for all heads or [H, m, K] one a head, b [m] or [H, m] or absent.
template <class Real>
struct MapWeights {
  Array<Real> w1, b1, w2, b2;
  Array<Real> psi_w1, psi_b1, psi_w2, psi_b2;
};

struct Map {
  FeatureMapKind kind = FeatureMapKind::kIdentity;
  FeatureMapOptions options;
};

template <class Real>
std::int64_t feature_count(const Map& map, const MapWeights<Real>& weights, std::int64_t size);

// phi(x) of a row of `size` numbers at a position of its sequence.
template <class Real>
std::vector<Real> features(const Map& map, const MapWeights<Real>& weights, std::int64_t head,
                           const Real* x, std::int64_t size, std::int64_t position);

// dx += (d phi / d x)^T dphi; gradients of the parameters are added to `d`.
template <class Real>
void features_backward(const Map& map, const MapWeights<Real>& weights, std::int64_t head,
                       const Real* x, std::int64_t size, std::int64_t position,
                       const std::vector<Real>& dphi, MapWeights<Real>& d, Real* dx);

}  // namespace ouzel::reference
