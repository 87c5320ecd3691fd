// Gated random feature attention (H. Peng et al., arXiv:2103.02143): linear attention over random
// Fourier features, whose state is a moving average.
//
//     f(x) = m^-0.5 [cos(W x^), sin(W x^)],  x^ = sigma * x / sqrt(|x|^2 + 1e-6)
//     S' = gate S + (1 - gate) f(k) v^T;  z' = gate z + (1 - gate) f(k);  o = S'^T f(q) / (z' .
//     f(q))
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// q, k [B, T, H, K], v and o [B, T, H, V]; gate [B, T, H] in [0, 1], a factor and not its
// logarithm; the random projection W [M, K], or [H, M, K] one a head, which has no gradient; sigma
// [K]. States S [N, H, 2M, V] and z [N, H, 2M], cosines first. Rows of tokens are float32, bfloat16
// or float16, each tensor its own, the rest float32; any strides with unit last stride; final
// states may be the memory of the initial ones. Features are signed, and nothing guards the
// denominator. Computed in float64 within a call: exact to the rounding of its outputs and states.
struct RfaGateInputs {
  ConstTensor q = {}, k = {}, v = {}, gate = {}, w = {};
  ConstTensor sigma = {};                          // absent: 1
  ConstTensor initial_state = {}, initial_z = {};  // absent: zeros; both or none
  const Segments* segments = nullptr;              // null: each batch row is one sequence
};

struct RfaGateOutputs {
  Tensor o = {};
  Tensor final_state = {}, z = {};  // absent: not wanted
};

OUZEL_EXPORT void rfa_gate(Context& context, const RfaGateInputs& inputs,
                           const RfaGateOutputs& outputs);

// Upstream gradients; absent ones of states are zeros.
struct RfaGateOutputGrads {
  ConstTensor o = {}, final_state = {}, z = {};
};
// Assigned, that of sigma is added to; absent ones are not computed.
struct RfaGateInputGrads {
  Tensor q = {}, k = {}, v = {}, gate = {}, sigma = {}, initial_state = {}, initial_z = {};
};
OUZEL_EXPORT void rfa_gate_backward(Context& context, const RfaGateInputs& inputs,
                                    const RfaGateOutputGrads& output_grads,
                                    const RfaGateInputGrads& input_grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; states in place.
OUZEL_EXPORT void rfa_gate_step(Context& context, const RfaGateInputs& inputs, const Tensor& state,
                                const Tensor& z, const Tensor& o);

}  // namespace ouzel
