// Kernels of the row-wise operators (src/ops/pointwise.h): one row, or rows [begin, end).
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// y += x over n floats.
void add_to(Isa isa, const float* x, float* y, std::int64_t n);

void swiglu_row(Isa isa, const float* gate, const float* up, float* y, std::int64_t n);
void swiglu_backward_row(Isa isa, const float* gate, const float* up, const float* dy, float* dgate,
                         float* dup, std::int64_t n);

// Rows of x [R, H, D] turned by positions[row] * frequency[i]. `frequency` holds D / 2 values and
// zeros up to a multiple of kAngleBlock; `angles` has room for the cosines and sines of one row,
// twice that many floats.
inline constexpr std::int64_t kAngleBlock = 16;
void rotary_rows(Isa isa, const View<float, 3>& x, const std::int64_t* positions,
                 const double* frequency, bool inverse, std::int64_t begin, std::int64_t end,
                 float* angles);

// Returns logsumexp(logits) - logits[target]; with dlogits (which may be logits) its gradient times
// weight.
float cross_entropy_row(Isa isa, const float* logits, std::int64_t n, std::int64_t target,
                        float weight, float* dlogits);

}  // namespace ouzel
