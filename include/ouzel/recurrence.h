// The recurrence: the one operator behind every law of linear attention. One head keeps a state S
// [K, V]:
//
//     S_t = D_t * S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t
//
// Shapes: q [B, T, HQ, K], k [B, T, HK, K], v [B, T, HV, V], o [B, T, max(HQ, HV), V], states
// [N, HV, K, V] for N sequences. HV is a multiple of HK (value head j reads key head j / (HV /
// HK)); HQ is a multiple of HV or divides it, by the same rule. Any strides with unit last stride.
// Inputs and outputs of a call must not overlap, except that a final state may be its initial
// state. Types: float32, bfloat16 or float16, each tensor its own; states are float32.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// The state of one sequence, as pointers into memory that the caller owns. Rows of S are key
// features.
struct SequenceState {
  float* s = nullptr;  // [HV, K, V]
  // What S lost to rounding, same shape (S + residue is the state), or null: S alone is the state
  // and the long-stream bound of docs/numerics.md holds within one call only.
  float* s_residue = nullptr;
  float* z = nullptr;          // [HV, K], the normaliser's sum; null where the law keeps none
  float* z_residue = nullptr;  // [HV, K] or null
  std::int64_t position = 0;   // tokens that the state has seen
  // [HV], whole numbers, of feature maps with a running maximum (exp, favor_positive,
  // favor_hyperbolic): the state is S, z and their residues times 2^exponent. Null: times 1, and
  // what a float cannot hold overflows as the sums do. Gradients likewise.
  float* exponent = nullptr;
};

// The states of N sequences: N base pointers and strides (in floats) shared by all, so that batches
// and forks need no copies. Rows of V and of z are contiguous.
struct StateView {
  std::span<SequenceState> sequences = {};
  std::int64_t heads = 0, keys = 0, values = 0;  // HV, K (features after the map), V
  std::int64_t head_stride = 0, key_stride = 0;  // of s and s_residue
  std::int64_t z_head_stride = 0;

  bool present() const { return heads > 0; }
};

// Views of dense arrays s [N, HV, K, V] and z [N, HV, K] (may be absent), at position 0 without
// residue. `storage` receives the N entries and must outlive the view.
OUZEL_EXPORT StateView state_view(const Tensor& s, const Tensor& z,
                                  std::vector<SequenceState>& storage);

enum class Form {
  kAuto,      // by law, type, K and V alone
  kScan,      // the fast form
  kParallel,  // quadratic, with the T x T weights on request; no states
};

// Inputs of a law: q, k and v, and those of the others that it takes (docs/laws.md; `ouzel attend
// --list`). Log decays are natural logarithms, at most 0 (up to 1e-6 above counts as 0, more is an
// error); -inf is a hard reset.
struct RecurrenceInputs {
  ConstTensor q = {}, k = {}, v = {};  // rwkv5, rwkv6, rwkv7: q is r; mamba2_ssd: C, B and x
  ConstTensor g = {};          // log decay [B, T, HV], of rows of S [B, T, HV, K]; rwkv5: [HV, K]
  ConstTensor gv = {};         // log decay of columns of S [B, T, HV, V]
  ConstTensor beta = {};       // strength of erase and write [B, T, HV] or [B, T, HV, V]
  ConstTensor a = {}, b = {};  // erase: b (S^T a)^T, each [B, T, HK, K]; gdn2: gate b [B, T, HV, K]
  ConstTensor p = {};          // erase key [B, T, HK, K]
  ConstTensor w = {};          // write gate [B, T, HV, V]
  ConstTensor u = {};          // bonus of the current token [HV, K]
  ConstTensor dt = {}, A = {}, D = {};  // step [B, T, HV], rate [HV] <= 0, skip [HV]
  StateView initial_state = {};         // absent: zeros
  const Segments* segments = nullptr;   // null: each batch row is one sequence
};

struct RecurrenceOutputs {
  Tensor o = {};
  StateView final_state = {};  // absent: not wanted. May be the memory of the initial state
  // [B, max(HQ, HV), T, T], as many columns as v has rows; Form::kParallel only; o = weights v.
  Tensor weights = {};
  // For the backward pass, or null in inference: `saved_bytes` of the operator.
  void* saved = nullptr;
};

// Upstream gradients. `final_state` holds d loss / d final state (S and z; residues are ignored).
struct RecurrenceOutputGrads {
  ConstTensor o = {};
  StateView final_state = {};  // absent: zeros
};

// Gradients of activations and initial states are assigned, those of parameters are added to. An
// absent tensor is not computed.
struct RecurrenceInputGrads {
  Tensor q = {}, k = {}, v = {}, g = {}, gv = {}, beta = {}, a = {}, b = {}, p = {}, w = {}, u = {},
         dt = {}, A = {}, D = {};
  StateView initial_state = {};
};

}  // namespace ouzel
