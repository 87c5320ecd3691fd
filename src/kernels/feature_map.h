// Rows of features of the maps that need more than one number of a row, or a scale: from packed
// rows x and their affine maps y = W x + b, a chunk of at most 64 tokens at a time, and back.
//
// Maps with a running maximum give phi 2^-exponent: exponents are whole numbers, so that another
// one changes nothing but the power of two.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/feature_map.h"

namespace ouzel {

// Exponents that stand for "no token yet": below all others.
inline constexpr float kNoExponent = -4194304;

struct FeatureRowsArgs {
  FeatureMapKind kind = FeatureMapKind::kIdentity;
  std::int64_t tokens = 0;
  std::int64_t keys = 0, rows = 0, features = 0;  // K, m, F
  // Pitches are multiples of 32; x, y1 and y2 hold zeros beyond their sizes, phi is filled up with
  // zeros.
  std::int64_t key_pitch = 0, row_pitch = 0, pitch = 0;
  const float* x = nullptr;   // [tokens][key_pitch]
  const float* y1 = nullptr;  // [tokens][row_pitch]
  const float* y2 = nullptr;
  float* phi = nullptr;             // [tokens][pitch]
  const float* exponent = nullptr;  // [tokens], maps with a running maximum
  float kernel_scale = 1;           // s
  float kernel_eps = 0, l2norm_eps = 0;
  std::int64_t nu = 1;
  const float* cosine = nullptr;  // [tokens], of cosformer's angles
  const float* sine = nullptr;
  // luna: u [J], c [J], U [L][J], e [L], one after the other.
  const float* psi = nullptr;
  std::int64_t hidden = 0, channels = 0;  // J, L
};
void feature_rows(Isa isa, const FeatureRowsArgs& args);

// Of maps with a running maximum: the exponent at which the largest feature of a token is near 1.
void feature_exponents(Isa isa, const FeatureRowsArgs& args, float* exponent);

// Gradients of what feature_rows took, from its arguments and results. Pitches as there.
struct FeatureRowsGrads {
  const float* dphi = nullptr;  // [tokens][pitch]
  float* dy1 = nullptr;         // [tokens][row_pitch], with zeros beyond m
  float* dy2 = nullptr;
  float* dx = nullptr;   // [tokens][key_pitch]: what reaches x other than through y
  float* psi = nullptr;  // as FeatureRowsArgs::psi, added to
};
void feature_rows_adjoint(Isa isa, const FeatureRowsArgs& args, const FeatureRowsGrads& grads);

}  // namespace ouzel
