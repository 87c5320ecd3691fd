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

// Tokens of one call of the backward kernel: its work space stays in the first-level cache (16
// columns: 40 KiB).
inline constexpr std::int64_t kSelectiveTokens = 8;

// o may be null. work: [2][channels]. Returns the largest dt A, at least 0.
float selective_forward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        TokenRows<float> o, float* high, float* low, float* work);

struct SelectiveGradRows {
  TokenRows<float> x, dt, z;  // assigned; may be null
  TokenRows<float> b, c;      // assigned: the share of these channels
  // Added to, in two parts.
  float *a_high = nullptr, *a_low = nullptr;  // [width][channels]
  float *skip_high = nullptr, *skip_low = nullptr, *bias_high = nullptr, *bias_low = nullptr;
};
// At most kSelectiveTokens tokens. `start` is the state before the first
// (and after that of an earlier call, which comes next), high + low the gradient
// of that after the last, which becomes that of the first.
void selective_backward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        const float* start, TokenRows<const float> d_o,
                        const SelectiveGradRows& grads, float* high, float* low, float* work);
// Floats of its work space, which is aligned to vectors.
inline std::int64_t selective_backward_work(std::int64_t width) {
  constexpr std::int64_t kLanes = 16;
  return kLanes * (kSelectiveTokens * (5 * width + 4) + 2 * width);
}

}  // namespace ouzel
