// Kernels of the short convolution. Rows of inputs are given by pointers, because those before a
// sequence's first token stand in its state.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

// y_t = act(bias + sum_j weight_j x_{t+j}) over `tokens` tokens; x has tokens + width - 1 rows.
struct ConvTokens {
  const float* const* x = nullptr;
  std::int64_t tokens = 0, channels = 0, width = 0;
  const float* weight = nullptr;  // [width, channels]
  const float* bias = nullptr;    // [channels]
  bool silu = false;
  // Rows of outputs begin on cache lines and are written past the caches.
  bool stream = false;
};
void conv_tokens(Isa isa, const ConvTokens& conv, float* y, std::int64_t y_stride);

// dz_t = dy_t act'(z_t) with z recomputed, dense rows in dz. Where `sums` [width + 1, channels] is
// not null: sums_j += sum_t dz_t x_{t+j}, and the sum of dz to the last row. Without an activation
// dz is dy: then null, and only the sums are formed.
void conv_gradients(Isa isa, const ConvTokens& conv, const float* const* dy, float* dz,
                    float* sums);

}  // namespace ouzel
