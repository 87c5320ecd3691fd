// RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, over groups of D features, optionally gated:
// y = rmsnorm(x) * w * silu(g) (flash-linear-attention's FusedRMSNormGated: norm before gate).
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// x, y [R, G, D]: R rows of G groups, each normalised on its own; weight [D], shared by the groups,
// or absent (data == nullptr). gate [R, G, D] or absent. rstd [R, G] receives 1 / sqrt(mean + eps),
// or null. y may be x when rstd is null.
void rms_norm(Context& context, View<const float, 3> x, const float* weight, float eps,
              View<const float, 3> gate, View<float, 3> y, float* rstd);

// dx and dgate are assigned (dgate only with a gate), dweight [D] is added to, in an order that
// depends on the shape alone. dx may be dy.
void rms_norm_backward(Context& context, View<const float, 3> x, const float* weight,
                       View<const float, 3> gate, const float* rstd, View<const float, 3> dy,
                       View<float, 3> dx, View<float, 3> dgate, float* dweight);

}  // namespace ouzel
