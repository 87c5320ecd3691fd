// The one table of bounds on errors, repeated in docs/numerics.md. The error of a tensor is the RMS
// of its difference over the RMS of the truth, with a floor of 1e-3 of the largest RMS among the
// call's tensors of the same kind.
#pragma once

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

}  // namespace ouzel
