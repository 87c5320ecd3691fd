// The matrix memory of xLSTM (M. Beck et al., arXiv:2405.04517), with exponential gates.
//
//     lf = logsigmoid(f);  m' = max(lf + m, i)
//     S' = e^(lf + m - m') S + e^(i - m') (scale k) v^T;  z' = e^(lf + m - m') z + e^(i - m') scale
//     k o = S'^T q / max(|z' . q|, e^(-m'))
#pragma once

#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct MlstmOptions {
  std::optional<double> scale = {};  // of k; default K^-0.5
};

// q, k [B, T, H, K], v and o [B, T, H, V], i and f (before their activations) [B, T, H]; states S
// [N, H, K, V], z [N, H, K] and m [N, H]. Rows of tokens are float32, bfloat16 or float16, each
// tensor its own, the rest float32; any strides with unit last stride; final states may be the
// memory of the initial ones. f of -inf forgets everything. Computed in float64 within a call:
// exact to the rounding of its outputs and states.
//
// m is a scale: (S, z, m) and (S e^-a, z e^-a, m + a) are the same state.
struct MlstmInputs {
  ConstTensor q = {}, k = {}, v = {}, i = {}, f = {};
  // absent: zeros; all three or none
  ConstTensor initial_state = {}, initial_z = {}, initial_m = {};
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

struct MlstmOutputs {
  Tensor o = {};
  Tensor final_state = {}, z = {}, m = {};  // absent: not wanted
};

OUZEL_EXPORT void mlstm(Context& context, const MlstmOptions& options, const MlstmInputs& inputs,
                        const MlstmOutputs& outputs);

// Upstream gradients; absent ones of states are zeros. Those of a loss that does not tell a state
// from the same state with another m have m = <S', dS'> + <z', dz'>.
struct MlstmOutputGrads {
  ConstTensor o = {}, final_state = {}, z = {}, m = {};
};
// Assigned; absent ones are not computed.
struct MlstmInputGrads {
  Tensor q = {}, k = {}, v = {}, i = {}, f = {}, initial_state = {}, initial_z = {}, initial_m = {};
};
OUZEL_EXPORT void mlstm_backward(Context& context, const MlstmOptions& options,
                                 const MlstmInputs& inputs, const MlstmOutputGrads& output_grads,
                                 const MlstmInputGrads& input_grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; states in place.
OUZEL_EXPORT void mlstm_step(Context& context, const MlstmOptions& options,
                             const MlstmInputs& inputs, const Tensor& state, const Tensor& z,
                             const Tensor& m, const Tensor& o);

}  // namespace ouzel
