// HGRN (Z. Qin et al., arXiv:2311.04823): an elementwise gated sum, h_t = e^{g_t} h_{t-1} + x_t,
// o_t = h_t.
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// x, g and o [B, T, D]; states [N, D]. Rows of tokens are float32, bfloat16 or float16, each tensor
// its own, the rest float32; any strides with unit last stride; outputs overlap nothing, but final
// states may be the memory of the initial ones.
//
// g is a natural logarithm, at most 0 (up to 1e-6 counts as 0, more is an error and leaves outputs
// unspecified); -inf is a reset: the old state is dropped, even if it is NaN. NaN propagates within
// its channel, and an infinity becomes NaN.
struct HgrnInputs {
  ConstTensor x = {}, g = {};
  ConstTensor initial_state = {};  // absent: zeros
  // What rounding took from the state, [N, D], absent: zeros. With it a sequence may be cut
  // anywhere: its outputs are those of the unbroken one, bit for bit.
  ConstTensor initial_residue = {};
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

struct HgrnOutputs {
  Tensor o = {};
  Tensor final_state = {}, final_residue = {};  // absent: not wanted
};

OUZEL_EXPORT void hgrn(Context& context, const HgrnInputs& inputs, const HgrnOutputs& outputs);

// `o` is what the forward pass gave, float32, or absent: then it is computed again; d_final may be
// absent (zeros). Gradients are assigned; absent ones are not computed. That of a gate of -inf is
// 0.
OUZEL_EXPORT void hgrn_backward(Context& context, const HgrnInputs& inputs, const ConstTensor& o,
                                const ConstTensor& d_o, const ConstTensor& d_final,
                                const Tensor& dx, const Tensor& dg, const Tensor& d_initial);

// One token of N sequences, x, g and o [N, 1, D]; state and residue (or none) are updated in place.
OUZEL_EXPORT void hgrn_step(Context& context, const ConstTensor& x, const ConstTensor& g,
                            const Tensor& state, const Tensor& residue, const Tensor& o);

}  // namespace ouzel
