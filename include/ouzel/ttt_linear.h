// Test-time training with a linear model (Y. Sun et al., arXiv:2407.04620): the state is a
// layer-normed linear map S [D, D] with bias hb [D], trained on the keys and values of each
// mini-batch.
//
//     y_t = S^T k_t + hb;  grad_t = gradient by y_t of 1/2 |LN(y_t) w + b - (v_t - k_t)|^2
//     u_t = (S - eta_t sum_(s<=t) k_s grad_s^T)^T (scale q_t) + hb - eta_t sum_(s<=t) grad_s
//     o_t = u_t + LN(u_t) w + b
//
// with the S and hb that the mini-batch began with; at its end they take the step with eta of its
// last token. LN(x) = (x - mean) / sqrt(var + eps).
#pragma once

#include <cstdint>
#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct TttLinearOptions {
  std::optional<double> scale = {};   // default D^-0.5
  std::int64_t mini_batch_size = 16;  // tokens; at least 1
  double eps = 1e-6;
};

// q, k, v and o [B, T, H, D], w and b [H, D], eta [B, T, H]; states S [N, H, D, D] and hb [N, H,
// D]. Mini-batches are counted from the begin of each sequence; the last may be short. A sequence
// that is continued should be cut at a multiple of their size. Rows of tokens are float32, bfloat16
// or float16, each tensor its own, the rest float32; any strides with unit last stride; final
// states may be the memory of the initial ones. Computed in float64 within a call: exact to the
// rounding of its outputs and states.
struct TttLinearInputs {
  ConstTensor q = {}, k = {}, v = {}, w = {}, b = {}, eta = {};
  ConstTensor initial_state = {}, initial_bias = {};  // absent: zeros
  const Segments* segments = nullptr;                 // null: each batch row is one sequence
};

struct TttLinearOutputs {
  Tensor o = {};
  Tensor final_state = {}, final_bias = {};  // absent: not wanted
};

OUZEL_EXPORT void ttt_linear(Context& context, const TttLinearOptions& options,
                             const TttLinearInputs& inputs, const TttLinearOutputs& outputs);

// Upstream gradients; absent ones of states are zeros.
struct TttLinearOutputGrads {
  ConstTensor o = {}, final_state = {}, final_bias = {};
};
// Assigned, those of w and b are added to; absent ones are not computed.
struct TttLinearInputGrads {
  Tensor q = {}, k = {}, v = {}, w = {}, b = {}, eta = {}, initial_state = {}, initial_bias = {};
};
OUZEL_EXPORT void ttt_linear_backward(Context& context, const TttLinearOptions& options,
                                      const TttLinearInputs& inputs,
                                      const TttLinearOutputGrads& output_grads,
                                      const TttLinearInputGrads& input_grads);

}  // namespace ouzel
