// Kernels of the selective scan: tokens of one sequence over a range of channels. States, A and
// their gradients are [width][channels]: vectors run along the channels.
#pragma once

#include "src/kernels/elementwise.h"

namespace ouzel {

struct SelectiveRows {
  TokenRows<const float> x, dt, z;  // of the channels; z may be null
  TokenRows<const float> b, c;      // [width] a token
  std::int64_t width = 0;
  const float *a = nullptr, *skip = nullptr, *dt_bias = nullptr;  // skip, dt_bias may be null
  bool softplus = false;
};

// Floats of work space that the kernels take.
inline constexpr std::int64_t kSelectiveWork = 6;  // times the channels

// o may be null. Returns the largest dt A, at least 0.
float selective_forward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        TokenRows<float> o, float* high, float* low, float* work);

struct SelectiveGradRows {
  TokenRows<float> x, dt, z;  // assigned; may be null
  TokenRows<float> b, c;      // assigned: the share of these channels
  // Added to, in two parts.
  float *a_high = nullptr, *a_low = nullptr;  // [width][channels]
  float *skip_high = nullptr, *skip_low = nullptr, *bias_high = nullptr, *bias_low = nullptr;
};
// `states` holds the state before the first token and after each, [tokens + 1][width][channels];
// high + low is the gradient of the last state, and becomes that of the first.
void selective_backward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        const float* states, TokenRows<const float> d_o,
                        const SelectiveGradRows& grads, float* high, float* low, float* work);

}  // namespace ouzel
