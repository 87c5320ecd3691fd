// Kernels of the short convolution. Rows of inputs are given by pointers, because those before a
// sequence's first token stand in its state. Types are float32, bfloat16 or float16.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// y_t = act(bias + sum_j weight_j x_{t+j}) over `tokens` tokens; x has tokens + width - 1 rows.
struct ConvTokens {
  const void* const* x = nullptr;
  DType dtype = DType::kF32;  // of x
  std::int64_t tokens = 0, channels = 0, width = 0;
  const float* weight = nullptr;  // [width, channels]
  const float* bias = nullptr;    // [channels]
  bool silu = false;
  // Rows of float32 outputs begin on cache lines and are written past the caches.
  bool stream = false;
};
// y is of `y_type`: that of x, or any if that is float32.
void conv_tokens(Isa isa, const ConvTokens& conv, void* y, DType y_type, std::int64_t y_stride);

// dz_t = dy_t silu'(z_t) with z recomputed, dense rows in dz. dy has the type of x.
void conv_gradients(Isa isa, const ConvTokens& conv, const void* const* dy, float* dz);
// sums_j += sum_t dz_t x_{t+j} to rows of sums [width + 1, channels], and the sum of dz to the
// last.
void conv_sums(Isa isa, const ConvTokens& conv, const void* const* dz, float* sums);

// One token of a sequence: its window of the last `columns` inputs, `width` or one less of them,
// takes x in place.
struct ConvStep {
  std::int64_t channels = 0, width = 0, columns = 0;
  const float* x = nullptr;
  const float* weight = nullptr;  // channel d and column j: d weight_row + j weight_column
  std::int64_t weight_row = 0, weight_column = 0;
  const float* bias = nullptr;  // or null
  std::int64_t bias_stride = 0;
  float* window = nullptr;  // likewise
  std::int64_t window_row = 0, window_column = 0;
  bool silu = false;
};
void conv_step(Isa isa, const ConvStep& step, float* y);

}  // namespace ouzel
