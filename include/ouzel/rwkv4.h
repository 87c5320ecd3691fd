// RWKV-4's time mixing (B. Peng et al., arXiv:2305.13048): per channel, an average of values with
// weights e^{k} that decay by d = -e^{w} a token; the current one has the bonus u.
//
//     o = (e^eps alpha + e^(u + k) v) / (e^eps beta + e^(u + k))
//     eps' = max(eps + d, k);  alpha' = e^(eps + d - eps') alpha + e^(k - eps') v;  beta' likewise
//
// with 1 for v: no exponent is above 0.
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// k, v and o [B, T, C]; w (raw: d = -e^w) and u [C]; states [N, 3, 1, C] = alpha, beta, eps. Rows
// of tokens are float32, bfloat16 or float16, each tensor its own, the rest float32; any strides
// with unit last stride; final states may be the memory of the initial ones. NaN propagates within
// its channel.
struct Rwkv4Inputs {
  ConstTensor k = {}, v = {}, w = {}, u = {};
  ConstTensor initial_state = {};  // absent: alpha = beta = 0, eps = -1e38
  // What rounding took from the state, [N, 3, 1, C], absent: zeros. With it a sequence may be cut
  // anywhere: its outputs are those of the unbroken one, bit for bit.
  ConstTensor initial_residue = {};
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

struct Rwkv4Outputs {
  Tensor o = {};
  Tensor final_state = {}, final_residue = {};  // absent: not wanted
};

OUZEL_EXPORT void rwkv4(Context& context, const Rwkv4Inputs& inputs, const Rwkv4Outputs& outputs);

// Gradients of activations and states are assigned, those of w and u added to; absent ones are not
// computed. The gradient of eps is that of the branch that its maximum took.
struct Rwkv4InputGrads {
  Tensor k = {}, v = {}, w = {}, u = {}, initial_state = {};
};

// d_final may be absent (zeros).
OUZEL_EXPORT void rwkv4_backward(Context& context, const Rwkv4Inputs& inputs,
                                 const ConstTensor& d_o, const ConstTensor& d_final,
                                 const Rwkv4InputGrads& grads);

// One token of N sequences, k, v and o [N, 1, C]; state and residue (or none) are updated in place.
OUZEL_EXPORT void rwkv4_step(Context& context, const ConstTensor& k, const ConstTensor& v,
                             const ConstTensor& w, const ConstTensor& u, const Tensor& state,
                             const Tensor& residue, const Tensor& o);

}  // namespace ouzel
