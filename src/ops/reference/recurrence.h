// Reference of linear attention and retention, token by token:
//
//     S_t = e^g S_{t-1} + phi(k_t) v_t^T,  z_t = e^g z_{t-1} + phi(k_t),  u_t = scale phi(q_t)
//     o_t = S_t^T u_t,  divided by z_t . u_t + eps if normalised (cosformer: max(z_t . u_t, eps))
//
// with a log decay g per head (none: linear attention, arXiv:2006.16236; log(1 - 2^(-5-h)):
// retention, arXiv:2307.08621). Non-causal: every token reads the sums over its whole sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "ouzel/segments.h"
#include "src/ops/reference/array.h"
#include "src/ops/reference/feature_map.h"

namespace ouzel::reference {

// q [B, T, HQ, K], k [B, T, HK, K], v [B, T, HV, V]; s0 [N, HV, F, V] and z0 [N, HV, F], or absent:
// zeros. Without causality k and v may have other tokens than q.
template <class Real>
struct RecurrenceArguments {
  Array<Real> q, k, v, s0, z0;
  Segments segments;
  Segments key_segments;      // empty: those of q
  std::int64_t position = 0;  // of the first token of each sequence
  FeatureMapKind map = FeatureMapKind::kIdentity;
  FeatureMapOptions map_options;
  MapWeights<Real> q_map, k_map;  // k_map.w1 absent: q_map serves k too
  std::vector<Real> log_decay;    // HV values; empty: no decay
  Real scale = 1;
  bool normalize = false;
  Real eps = 0;
  bool causal = true;
  bool reverse = false;
};

// o [B, T, max(HQ, HV), V], s and z as the initial states. The same shape holds upstream gradients
// (absent members: zeros).
template <class Real>
struct RecurrenceResults {
  Array<Real> o, s, z;
};

template <class Real>
struct RecurrenceGradients {
  Array<Real> q, k, v, s0, z0;  // s0 and z0 always, as if the initial states had been given
  MapWeights<Real> q_map, k_map;
};

// log(1 - 2^(-5-h)) for h = 0, ..., heads - 1.
template <class Real>
std::vector<Real> retention_log_decay(std::int64_t heads);

// Lightning attention's: -(8/H) (1 - layer/layers) h (arXiv:2401.04658); geometric:
// -2^(-8(h+1)/H) (1 - layer/(layers-1) + 1e-5) (arXiv:2501.08313).
template <class Real>
std::vector<Real> lightning_log_decay(std::int64_t heads, std::int64_t layer, std::int64_t layers,
                                      bool geometric);

template <class Real>
RecurrenceResults<Real> recurrence(const RecurrenceArguments<Real>& arguments);

template <class Real>
RecurrenceGradients<Real> recurrence_backward(const RecurrenceArguments<Real>& arguments,
                                              const RecurrenceResults<Real>& upstream);

// The weights of the parallel form, [B, max(HQ, HV), T, T], without initial states: o = weights v.
template <class Real>
Array<Real> recurrence_weights(const RecurrenceArguments<Real>& arguments);

}  // namespace ouzel::reference
