// Short causal convolution, depthwise: y_t = act(bias + sum_j w[:, j] x_{t-W+1+j}), the last column
// of w multiplying the current token. Cache: the last W inputs, oldest first.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

enum class ConvActivation { kNone, kSilu };

struct ShortConvOptions {
  ConvActivation activation = ConvActivation::kNone;
};

// x [B, T, D], weight [D, W] (or [D, 1, W]), bias [D] or absent, states [N, D, W], y [B, T, D].
// Rows of tokens are float32, bfloat16 or float16, each tensor its own, the rest float32.
struct ShortConvInputs {
  ConstTensor x = {}, weight = {}, bias = {};
  ConstTensor initial_state = {};      // absent: zeros
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

// The final state may be the memory of the initial one.
OUZEL_EXPORT void short_conv(Context& context, const ShortConvOptions& options,
                             const ShortConvInputs& inputs, const Tensor& y,
                             const Tensor& final_state);

// dx and d_initial are assigned, dweight and dbias added to; absent tensors are not computed.
OUZEL_EXPORT void short_conv_backward(Context& context, const ShortConvOptions& options,
                                      const ShortConvInputs& inputs, const ConstTensor& dy,
                                      const ConstTensor& d_final, const Tensor& dx,
                                      const Tensor& dweight, const Tensor& dbias,
                                      const Tensor& d_initial);

// One token of N sequences: x [N, 1, D], y [N, 1, D], state [N, D, W] updated in place. The oldest
// input is not read: a state [N, D, W - 1] will do.
OUZEL_EXPORT void short_conv_step(Context& context, const ShortConvOptions& options,
                                  const ConstTensor& x, const ConstTensor& weight,
                                  const ConstTensor& bias, const Tensor& state, const Tensor& y);

}  // namespace ouzel
