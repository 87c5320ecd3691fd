// The selective scan of Mamba (A. Gu and T. Dao, arXiv:2312.00752): per channel d a state of M
// numbers, S'[d, m] = e^(dt_d A_dm) S[d, m] + dt_d B_m x_d; o_d = (C . S'_d + D_d x_d) silu(z_d).
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct SelectiveScanOptions {
  bool dt_softplus = false;  // dt := softplus(dt + dt_bias)
};

// x, dt, z and o [B, T, D]; A [D, M]; B and C [B, T, M]; D and dt_bias [D]; states [N, D, M]. Rows
// of tokens are float32, bfloat16 or float16, each tensor its own, the rest float32; any strides
// with unit last stride; final states may be the memory of the initial ones. dt A is a log decay:
// at most 0 (up to 1e-6 counts as 0, more is an error and leaves outputs unspecified). NaN
// propagates within its channel, from B and C to all; an infinity becomes NaN.
struct SelectiveScanInputs {
  ConstTensor x = {}, dt = {}, a = {}, b = {}, c = {};
  ConstTensor d = {}, z = {}, dt_bias = {};              // absent: 0, no gate, 0
  ConstTensor initial_state = {}, initial_residue = {};  // as in ouzel/hgrn.h
  const Segments* segments = nullptr;
};

struct SelectiveScanOutputs {
  Tensor o = {};
  Tensor final_state = {}, final_residue = {};
};

OUZEL_EXPORT void selective_scan(Context& context, const SelectiveScanOptions& options,
                                 const SelectiveScanInputs& inputs,
                                 const SelectiveScanOutputs& outputs);

// Gradients of activations and states are assigned, those of a, d and dt_bias added to; absent ones
// are not computed.
struct SelectiveScanInputGrads {
  Tensor x = {}, dt = {}, a = {}, b = {}, c = {}, d = {}, z = {}, dt_bias = {}, initial_state = {};
};

// d_final may be absent (zeros).
OUZEL_EXPORT void selective_scan_backward(Context& context, const SelectiveScanOptions& options,
                                          const SelectiveScanInputs& inputs, const ConstTensor& d_o,
                                          const ConstTensor& d_final,
                                          const SelectiveScanInputGrads& grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; state and residue (or
// none) are updated in place.
OUZEL_EXPORT void selective_scan_step(Context& context, const SelectiveScanOptions& options,
                                      const SelectiveScanInputs& inputs, const Tensor& state,
                                      const Tensor& residue, const Tensor& o);

}  // namespace ouzel
