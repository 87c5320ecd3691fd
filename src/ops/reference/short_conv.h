// Reference of the short causal convolution, depthwise. With e = the W inputs of the state followed
// by those of the sequence: y_t = act(bias + sum_j w[:, j] e_{t+1+j}); the final state is the last
// W of e.
#pragma once

#include "ouzel/segments.h"
#include "src/ops/reference/array.h"

namespace ouzel::reference {

// x [B, T, D], weight [D, W], bias [D] or absent, s0 [N, D, W] or absent: zeros.
template <class Real>
struct ShortConvArguments {
  Array<Real> x, weight, bias, s0;
  Segments segments;
  bool silu = false;
};

// y [B, T, D] and the final states; the same shape holds upstream gradients (absent members:
// zeros).
template <class Real>
struct ShortConvResults {
  Array<Real> y, s;
};

template <class Real>
struct ShortConvGradients {
  Array<Real> x, weight, bias, s0;  // s0 always, as if the initial states had been given
};

template <class Real>
ShortConvResults<Real> short_conv(const ShortConvArguments<Real>& arguments);

template <class Real>
ShortConvGradients<Real> short_conv_backward(const ShortConvArguments<Real>& arguments,
                                             const ShortConvResults<Real>& upstream);

}  // namespace ouzel::reference
