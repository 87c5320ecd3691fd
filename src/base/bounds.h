// The one table of bounds on errors, repeated in docs/numerics.md. The error of a tensor is the RMS
// of its difference over the RMS of the truth, with a floor of 1e-3 of the largest RMS among the
// call's tensors of the same kind.
#pragma once

#include "ouzel/context.h"

namespace ouzel {

struct Bounds {
  double output, gradient;
};
// float32 operators against float64, inputs of zero mean, up to 4,096 tokens.
inline constexpr Bounds kFloat32{5e-6, 2e-5};
// Any input (constant or narrow positive features too), at any length.
inline constexpr Bounds kAnyInput{3e-5, 3e-5};
// A sequence split and resumed, a step, another form: against the unbroken scan.
inline constexpr Bounds kResumed{5e-6, 2e-5};
// 16-bit inputs.
inline constexpr Bounds kHalf{4e-3, 4e-3};
// A float64 reference against numbers computed elsewhere in float64.
inline constexpr Bounds kFloat64{1e-12, 1e-12};

// The portable instruction set has no fused multiply-add, so products are rounded too: twice.
inline Bounds bounds_on(Isa isa, const Bounds& bounds) {
  const double factor = isa == Isa::kPortable ? 2 : 1;
  return {factor * bounds.output, factor * bounds.gradient};
}

// A tensor's RMS counts as at least this share of the largest of its kind.
inline constexpr double kFloor = 1e-3;
// Gradients through a quotient (a normaliser, a softmax) are small differences of large terms where
// the output hardly depends on queries and keys: few tokens, one feature, values or keys that are
// nearly equal. There the largest gradient of the call is the yardstick: one rounding of its terms.
inline constexpr double kQuotientFloor = 1;

}  // namespace ouzel
