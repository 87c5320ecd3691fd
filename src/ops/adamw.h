// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over flat arrays, one pass:
//   g = gradient * gradient_scale, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
//   p -= learning_rate * (weight_decay p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)).
#pragma once

#include <cstdint>
#include <span>

#include "ouzel/context.h"

namespace ouzel {

struct AdamWOptions {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;    // decoupled
  double gradient_scale = 1.0;  // clip factor, or 1 / accumulated batches
};

// Step t = 1, 2, ... of n = p.size() parameters with gradients g, first and second moments m and v
// (zeros before step 1). Every element on its own: any cut of the arrays gives the same bits.
void adamw_step(Context& context, const AdamWOptions& options, std::int64_t step,
                std::span<float> p, std::span<const float> g, std::span<float> m,
                std::span<float> v);

// Sum of squares in float64, in blocks and an order that depend on the length alone. NaN and
// infinities come through.
double sum_of_squares(Context& context, std::span<const float> x);

}  // namespace ouzel
