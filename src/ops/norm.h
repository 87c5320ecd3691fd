// RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, over groups of D features, optionally gated: the
// result (flash-linear-attention's FusedRMSNormGated) or, with gate_first, x (Mamba-2's norm) times
// act(g).
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"
#include "src/kernels/norm.h"
#include "src/ops/token_rows.h"

namespace ouzel {

// Rows of a call are float32, bfloat16 or float16, all of one type.
//
// x, y [R, G, D]: R rows of G groups, each normalised on its own; weight [D], shared by the groups,
// or [G, D] (weight_per_group), or null. gate [R, G, D] or absent. rstd [R, G] receives
// 1 / sqrt(mean + eps), or null. y may be x when rstd is null.
void rms_norm(Context& context, const RmsNormOptions& options, AnyView<const void, 3> x,
              const float* weight, AnyView<const void, 3> gate, AnyView<void, 3> y, float* rstd);

// dx and dgate are assigned (dgate only with a gate), dweight is added to, in an order that depends
// on the shape alone. dx may be dy.
void rms_norm_backward(Context& context, const RmsNormOptions& options, AnyView<const void, 3> x,
                       const float* weight, AnyView<const void, 3> gate, const float* rstd,
                       AnyView<const void, 3> dy, AnyView<void, 3> dx, AnyView<void, 3> dgate,
                       float* dweight);

}  // namespace ouzel
