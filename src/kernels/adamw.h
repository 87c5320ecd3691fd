// Kernels of the optimiser (src/ops/adamw.h).
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

// The constants of one step: m += (g - m) * rate1, v += (g^2 - v) * rate2 with g scaled,
// p -= p * decay + m * size / (sqrt(v) * root + epsilon).
struct AdamWStep {
  float gradient_scale, rate1, rate2, decay, size, root, epsilon;
};
void adamw_elements(Isa isa, const AdamWStep& step, float* p, const float* g, float* m, float* v,
                    std::int64_t n);

double sum_of_squares_block(Isa isa, const float* x, std::int64_t n);

}  // namespace ouzel
