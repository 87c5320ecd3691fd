// The real-gated linear recurrent unit of Griffin and Hawk (S. De et al., arXiv:2402.19427):
// L_t = -c softplus(a) sigmoid(r_t); h_t = e^{L_t} h_{t-1} + sqrt(1 - e^{2 L_t}) sigmoid(i_t) x_t,
// o_t = h_t.
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct RgLruOptions {
  double c = 8;
  bool first_multiplier_one = false;  // the root is 1 at the first token of a sequence
};

// x, r, i (before the sigmoid) and o [B, T, D]; a_param [D]; states [N, D]. Rows of tokens are
// float32, bfloat16 or float16, each tensor its own, the rest float32; any strides with unit last
// stride; final states may be the memory of the initial ones. NaN propagates within its channel,
// and an infinity becomes NaN.
struct RgLruInputs {
  ConstTensor x = {}, r = {}, i = {}, a_param = {};
  ConstTensor initial_state = {}, initial_residue = {};  // as in ouzel/hgrn.h
  const Segments* segments = nullptr;
};

struct RgLruOutputs {
  Tensor o = {};
  Tensor final_state = {}, final_residue = {};
};

OUZEL_EXPORT void rg_lru(Context& context, const RgLruOptions& options, const RgLruInputs& inputs,
                         const RgLruOutputs& outputs);

// Gradients are assigned, that of a_param is added to; absent ones are not computed. The root has
// no slope where e^L is 1: it counts as 0 there.
struct RgLruInputGrads {
  Tensor x = {}, r = {}, i = {}, a_param = {}, initial_state = {};
};

// `o` is what the forward pass gave, float32, or absent: then it is computed again; d_final may be
// absent (zeros).
OUZEL_EXPORT void rg_lru_backward(Context& context, const RgLruOptions& options,
                                  const RgLruInputs& inputs, const ConstTensor& o,
                                  const ConstTensor& d_o, const ConstTensor& d_final,
                                  const RgLruInputGrads& grads);

// One token of N sequences, x, r, i and o [N, 1, D], none of them a sequence's first; state and
// residue (or none) are updated in place.
OUZEL_EXPORT void rg_lru_step(Context& context, const RgLruOptions& options, const ConstTensor& x,
                              const ConstTensor& r, const ConstTensor& i,
                              const ConstTensor& a_param, const Tensor& state,
                              const Tensor& residue, const Tensor& o);

}  // namespace ouzel
