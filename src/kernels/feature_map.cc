#include "src/kernels/feature_map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/feature_map.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/row_math-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using Args = FeatureRowsArgs;
using Grads = FeatureRowsGrads;

// --- maps with a running maximum

// exp(x) 2^-exponent. Arguments beyond 2^21, where a float knows no more than a quarter, are taken
// as that.
HWY_INLINE V exp_at(D d, V x, V exponent) {
  constexpr float kLimit = 2097152;
  const V bounded = math::at_most(d, hn::Set(d, kLimit), math::at_least(d, hn::Set(d, -kLimit), x));
  V r;
  V n = hn::Sub(math::reduce_by_ln2(d, bounded, r), exponent);
  n = math::at_most(d, hn::Set(d, 200.0f), math::at_least(d, hn::Set(d, -200.0f), n));
  const V y = math::scale_by_pow2(d, hn::Add(hn::Set(d, 1.0f), math::expm1_reduced(d, r)), n);
  return hn::IfThenElse(hn::Eq(x, hn::Set(d, kInf)), x, y);
}
// n of exp(x) = 2^n p, p near 1.
HWY_INLINE float exponent_of(float x) {
  constexpr float kLimit = 2097152;
  return std::nearbyint(std::clamp(x, -kLimit, kLimit) * 1.44269504f);
}

// |y|^2 / 2 = n ln(2) + r, in double: as a float number of 50 it would be off by 2e-6.
struct HalfSquare {
  float exponent = 0;
  float rest = 0;

  HalfSquare(Int size, const float* x) {
    double sum = 0;
    for (Int i = 0; i < size; ++i) {
      sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    constexpr double kLn2 = 0.6931471805599453;
    const double half = 0.5 * sum / std::sqrt(static_cast<double>(size));
    if (half < 1e6) {
      const double n = std::nearbyint(half / kLn2);
      exponent = static_cast<float>(n);
      rest = static_cast<float>(half - n * kLn2);
    } else {
      exponent = 2097152;
      rest =
          half <= std::numeric_limits<double>::max() ? 0 : std::numeric_limits<float>::quiet_NaN();
    }
  }
};

// out = factor exp(sign x - rest) 2^-exponent
HWY_INLINE void exp_rows(Int size, float factor, float sign, const float* x, float rest,
                         float exponent, float* out) {
  const D d;
  const V f = hn::Set(d, factor), s = hn::Set(d, sign), r = hn::Set(d, rest),
          e = hn::Set(d, exponent);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    const V y = exp_at(d, hn::MulSub(s, load_first(d, x + i, n), r), e);
    store_first(d, hn::Mul(f, y), out + i, n);
  });
}

float favor_factor(const Args& a) { return 1 / std::sqrt(static_cast<float>(a.features)); }

HWY_INLINE void favor(const Args& a, Int t, float* phi) {
  const HalfSquare norm(a.keys, a.x + t * a.key_pitch);
  const float* y = a.y1 + t * a.row_pitch;
  const float exponent = a.exponent[t] + norm.exponent;
  exp_rows(a.rows, favor_factor(a), 1, y, norm.rest, exponent, phi);
  if (a.kind == FeatureMapKind::kFavorHyperbolic) {
    exp_rows(a.rows, favor_factor(a), -1, y, norm.rest, exponent, phi + a.rows);
  }
}
// With e the exponents: de = phi dphi, dy = de (less that of the other sign), and -sum de reaches x
// through |y|^2 / 2.
HWY_INLINE void favor_adjoint(const Args& a, const Grads& g, Int t, const float* phi,
                              const float* dphi, float* dx) {
  float* dy = g.dy1 + t * a.row_pitch;
  products<false>(a.rows, 1, phi, dphi, dy);
  if (a.kind == FeatureMapKind::kFavorHyperbolic) {
    products<true>(a.rows, -1, phi + a.rows, dphi + a.rows, dy);
  }
  const float sum = dot(a.features, phi, dphi);
  multiples<false>(a.keys, -sum / std::sqrt(static_cast<float>(a.keys)), a.x + t * a.key_pitch, dx);
}

// --- polynomials

// [square x_i^2, cross x_i x_j (i < j)], the pairs row by row.
HWY_INLINE void pairs(Int size, float square, float cross, const float* x, float* out) {
  products<false>(size, square, x, x, out);
  out += size;
  for (Int i = 0; i + 1 < size; ++i) {
    multiples<false>(size - i - 1, cross * x[i], x + i + 1, out);
    out += size - i - 1;
  }
}
// dx += the adjoint
HWY_INLINE void pairs_adjoint(Int size, float square, float cross, const float* x,
                              const float* dout, float* dx) {
  products<true>(size, 2 * square, x, dout, dx);
  dout += size;
  for (Int i = 0; i + 1 < size; ++i) {
    const Int rest = size - i - 1;
    multiples<true>(rest, cross * x[i], dout, dx + i + 1);
    dx[i] += cross * dot(rest, dout, x + i + 1);
    dout += rest;
  }
}

constexpr float kSqrtHalf = 0.70710678f;

HWY_INLINE void polynomial(const Args& a, const float* x, float* phi) {
  const float s = a.kernel_scale;
  if (a.kind == FeatureMapKind::kRebased) return pairs(a.keys, s, s / kSqrtHalf, x, phi);
  *phi++ = 1;
  multiples<false>(a.keys, std::sqrt(s), x, phi);
  phi += a.keys;
  if (a.kind == FeatureMapKind::kTaylor2Symmetric) pairs(a.keys, s * kSqrtHalf, s, x, phi);
  if (a.kind != FeatureMapKind::kTaylor2) return;
  for (Int i = 0; i < a.keys; ++i) {
    multiples<false>(a.keys, s * kSqrtHalf * x[i], x, phi + i * a.keys);
  }
}
HWY_INLINE void polynomial_adjoint(const Args& a, const float* x, const float* dphi, float* dx) {
  const float s = a.kernel_scale;
  if (a.kind == FeatureMapKind::kRebased) {
    std::fill(dx, dx + a.keys, 0.0f);
    return pairs_adjoint(a.keys, s, s / kSqrtHalf, x, dphi, dx);
  }
  multiples<false>(a.keys, std::sqrt(s), ++dphi, dx);
  dphi += a.keys;
  if (a.kind == FeatureMapKind::kTaylor2Symmetric) {
    pairs_adjoint(a.keys, s * kSqrtHalf, s, x, dphi, dx);
  }
  if (a.kind != FeatureMapKind::kTaylor2) return;
  for (Int i = 0; i < a.keys; ++i, dphi += a.keys) {
    multiples<true>(a.keys, s * kSqrtHalf * x[i], dphi, dx);
    dx[i] += s * kSqrtHalf * dot(a.keys, dphi, x);
  }
}

// --- dpfp

// r = [max(x, 0), max(-x, 0)], read around a circle of 2d.
HWY_INLINE float rectified(const Args& a, const float* x, Int i) {
  return i < a.keys ? std::max(x[i], 0.0f) : std::max(-x[i - a.keys], 0.0f);
}
HWY_INLINE void dpfp(const Args& a, const float* x, float* phi) {
  const Int circle = 2 * a.keys;
  for (Int j = 1; j <= a.nu; ++j) {
    Int other = (circle - j % circle) % circle;
    for (Int i = 0; i < circle; ++i) {
      *phi++ = rectified(a, x, i) * rectified(a, x, other);
      if (++other == circle) other = 0;
    }
  }
}
HWY_INLINE void dpfp_adjoint(const Args& a, const float* x, const float* dphi, float* dx) {
  const Int circle = 2 * a.keys;
  std::fill(dx, dx + a.keys, 0.0f);
  const auto add = [&](Int i, float slope) {
    if (i < a.keys) {
      if (x[i] > 0) dx[i] += slope;
    } else if (x[i - a.keys] < 0) {
      dx[i - a.keys] -= slope;
    }
  };
  for (Int j = 1; j <= a.nu; ++j) {
    Int other = (circle - j % circle) % circle;
    for (Int i = 0; i < circle; ++i, ++dphi) {
      add(i, *dphi * rectified(a, x, other));
      add(other, *dphi * rectified(a, x, i));
      if (++other == circle) other = 0;
    }
  }
}

// --- luna

struct Psi {
  const float *u, *c, *U, *e;
  explicit Psi(const Args& a)
      : u(a.psi), c(u + a.hidden), U(c + a.hidden), e(U + a.channels * a.hidden) {}
};

// Lanes are projections; phi holds the channels of one projection together. Four channels share
// each silu.
HWY_INLINE void luna(const Args& a, const float* y, float* phi) {
  constexpr Int kGroup = 4;
  const D d;
  const Psi psi(a);
  const V factor = hn::Set(d, 1 / std::sqrt(static_cast<float>(a.rows)));
  HWY_ALIGN float lane[kLanes];
  for_vectors(a.rows, [&](Int i, Int n) HWY_ATTR {
    const V projected = load_first(d, y + i, n);
    for (Int l = 0; l < a.channels; l += kGroup) {
      const Int count = std::min(a.channels - l, kGroup);
      V sum[kGroup];
      OUZEL_UNROLL
      for (Int c = 0; c < kGroup; ++c) sum[c] = hn::Set(d, psi.e[l + std::min(c, count - 1)]);
      for (Int j = 0; j < a.hidden; ++j) {
        const V h = hn::MulAdd(hn::Set(d, psi.u[j]), projected, hn::Set(d, psi.c[j]));
        const V silu = math::silu(d, h);
        OUZEL_UNROLL
        for (Int c = 0; c < kGroup; ++c) {
          const float weight = psi.U[(l + std::min(c, count - 1)) * a.hidden + j];
          sum[c] = hn::MulAdd(hn::Set(d, weight), silu, sum[c]);
        }
      }
      for (Int c = 0; c < count; ++c) {
        hn::Store(hn::Mul(factor, sum[c]), d, lane);
        for (Int p = 0; p < std::min(n, kLanes); ++p) phi[(i + p) * a.channels + l + c] = lane[p];
      }
    }
  });
}
HWY_INLINE void luna_adjoint(const Args& a, const Grads& g, const float* y, const float* dphi,
                             float* dy) {
  const D d;
  const Psi psi(a);
  float *du = g.psi, *dc = du + a.hidden, *dU = dc + a.hidden, *de = dU + a.channels * a.hidden;
  const V factor = hn::Set(d, 1 / std::sqrt(static_cast<float>(a.rows))), one = hn::Set(d, 1.0f);
  HWY_ALIGN float lane[kLanes];
  const auto total = [&](V v) HWY_ATTR { return hn::GetLane(hn::SumOfLanes(d, v)); };
  for_vectors(a.rows, [&](Int i, Int n) HWY_ATTR {
    const V projected = load_first(d, y + i, n);
    const auto upstream = [&](Int l) HWY_ATTR {
      for (Int p = 0; p < kLanes; ++p) lane[p] = p < n ? dphi[(i + p) * a.channels + l] : 0.0f;
      return hn::Mul(factor, hn::Load(d, lane));
    };
    for (Int l = 0; l < a.channels; ++l) de[l] += total(upstream(l));
    V sum = hn::Zero(d);
    for (Int j = 0; j < a.hidden; ++j) {
      const V h = hn::MulAdd(hn::Set(d, psi.u[j]), projected, hn::Set(d, psi.c[j]));
      const V s = math::sigmoid(d, h), hs = hn::Mul(h, s);
      V dsilu = hn::Zero(d);
      for (Int l = 0; l < a.channels; ++l) {
        const V up = upstream(l);
        dU[l * a.hidden + j] += total(hn::Mul(up, hs));
        dsilu = hn::MulAdd(up, hn::Set(d, psi.U[l * a.hidden + j]), dsilu);
      }
      const V dh = hn::Mul(dsilu, hn::MulAdd(hs, hn::Sub(one, s), s));
      du[j] += total(hn::Mul(dh, projected));
      dc[j] += total(dh);
      sum = hn::MulAdd(dh, hn::Set(d, psi.u[j]), sum);
    }
    store_first(d, sum, dy + i, n);
  });
}

// --- the others

HWY_INLINE void fourier(const Args& a, const float* y, float* phi) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, hn::ScalableTag<double>> dh;
  constexpr Int kHalf = HWY_LANES(double);
  const auto factor = hn::Set(dd, 1 / std::sqrt(static_cast<double>(a.rows)));
  HWY_ALIGN float angle[kHalf], cosine[kHalf], sine[kHalf];
  for (Int i = 0; i < a.rows; i += kHalf) {
    const Int n = std::min(a.rows - i, kHalf);
    for (Int p = 0; p < kHalf; ++p) angle[p] = p < n ? y[i + p] : 0.0f;
    hn::Vec<decltype(dd)> c, s;
    math::cos_sin(dd, hn::PromoteTo(dd, hn::Load(dh, angle)), c, s);
    hn::Store(hn::DemoteTo(dh, hn::Mul(factor, c)), dh, cosine);
    hn::Store(hn::DemoteTo(dh, hn::Mul(factor, s)), dh, sine);
    std::copy(cosine, cosine + n, phi + i);
    std::copy(sine, sine + n, phi + a.rows + i);
  }
}

void features_of(const Args& a, Int t) {
  const float* x = a.x + t * a.key_pitch;
  const float* y = a.y1 + t * a.row_pitch;
  float* phi = a.phi + t * a.pitch;
  const auto relu = [](D d, V v) HWY_ATTR { return math::at_least(d, hn::Zero(d), v); };
  switch (a.kind) {
    case FeatureMapKind::kIdentity:  // these three are applied while packing
    case FeatureMapKind::kElu1:
    case FeatureMapKind::kRelu:
      return;
    case FeatureMapKind::kRelu2:
      return each(a.keys, x, phi, [&](D d, V v) HWY_ATTR {
        const V r = relu(d, v);
        return hn::Mul(r, r);
      });
    case FeatureMapKind::kExp:
      return exp_rows(a.keys, 1, 1, x, 0, a.exponent[t], phi);
    case FeatureMapKind::kSoftmax:
      return softmax(a.keys, 1, x, phi);
    case FeatureMapKind::kTaylor1:
    case FeatureMapKind::kTaylor2:
    case FeatureMapKind::kTaylor2Symmetric:
    case FeatureMapKind::kRebased:
      return polynomial(a, x, phi);
    case FeatureMapKind::kFavorPositive:
    case FeatureMapKind::kFavorHyperbolic:
      return favor(a, t, phi);
    case FeatureMapKind::kFavorRelu:
      return each(a.rows, y, phi,
                  [&](D d, V v) HWY_ATTR { return hn::Add(relu(d, v), hn::Set(d, a.kernel_eps)); });
    case FeatureMapKind::kRandomFourier:
      return fourier(a, y, phi);
    case FeatureMapKind::kCosformer:
      each(a.keys, x, phi,
           [&](D d, V v) HWY_ATTR { return hn::Mul(relu(d, v), hn::Set(d, a.cosine[t])); });
      return each(a.keys, x, phi + a.keys,
                  [&](D d, V v) HWY_ATTR { return hn::Mul(relu(d, v), hn::Set(d, a.sine[t])); });
    case FeatureMapKind::kDpfp:
      return dpfp(a, x, phi);
    case FeatureMapKind::kT2r:
      return each(a.rows, y, phi, relu);
    case FeatureMapKind::kHedgehog: {
      const float top = 2 * largest(a.rows, y, 0);
      const float sum =
          exponentials(a.rows, 2, y, top, phi) + exponentials(a.rows, -2, y, top, phi + a.rows);
      return multiples<false>(a.features, 1 / sum, phi, phi);
    }
    case FeatureMapKind::kHedgehogSeparate:
      softmax(a.rows, 1, y, phi);
      return softmax(a.rows, -1, y, phi + a.rows);
    case FeatureMapKind::kElementwiseProduct:
      return products<false>(a.rows, 1, y, a.y2 + t * a.row_pitch, phi);
    case FeatureMapKind::kLuna:
      return luna(a, y, phi);
    case FeatureMapKind::kL2Norm:
      return multiples<false>(a.keys, 1 / std::sqrt(dot(a.keys, x, x) + a.l2norm_eps), x, phi);
  }
}

void adjoint_of(const Args& a, const Grads& g, Int t) {
  const float* x = a.x + t * a.key_pitch;
  const float* y = a.y1 + t * a.row_pitch;
  const float* phi = a.phi + t * a.pitch;
  const float* dphi = g.dphi + t * a.pitch;
  float* dy = g.dy1 + t * a.row_pitch;
  float* dx = g.dx + t * a.key_pitch;
  switch (a.kind) {
    case FeatureMapKind::kIdentity:
    case FeatureMapKind::kElu1:
    case FeatureMapKind::kRelu:
      return;
    case FeatureMapKind::kRelu2:
      return relu_adjoint<1, false>(a.keys, 2, x, dphi, dx);
    case FeatureMapKind::kExp:
      return products<false>(a.keys, 1, phi, dphi, dx);
    case FeatureMapKind::kSoftmax:
      return softmax_adjoint<false>(a.keys, 1, phi, dphi, dot(a.keys, phi, dphi), dx);
    case FeatureMapKind::kTaylor1:
    case FeatureMapKind::kTaylor2:
    case FeatureMapKind::kTaylor2Symmetric:
    case FeatureMapKind::kRebased:
      return polynomial_adjoint(a, x, dphi, dx);
    case FeatureMapKind::kFavorPositive:
    case FeatureMapKind::kFavorHyperbolic:
      return favor_adjoint(a, g, t, phi, dphi, dx);
    case FeatureMapKind::kFavorRelu:
    case FeatureMapKind::kT2r:
      return relu_adjoint<0, false>(a.rows, 1, y, dphi, dy);
    case FeatureMapKind::kRandomFourier:
      products<false>(a.rows, 1, phi, dphi + a.rows, dy);
      return products<true>(a.rows, -1, phi + a.rows, dphi, dy);
    case FeatureMapKind::kCosformer:
      relu_adjoint<0, false>(a.keys, a.cosine[t], x, dphi, dx);
      return relu_adjoint<0, true>(a.keys, a.sine[t], x, dphi + a.keys, dx);
    case FeatureMapKind::kDpfp:
      return dpfp_adjoint(a, x, dphi, dx);
    case FeatureMapKind::kHedgehog: {
      const float mean = dot(a.features, phi, dphi);
      softmax_adjoint<false>(a.rows, 2, phi, dphi, mean, dy);
      return softmax_adjoint<true>(a.rows, -2, phi + a.rows, dphi + a.rows, mean, dy);
    }
    case FeatureMapKind::kHedgehogSeparate:
      softmax_adjoint<false>(a.rows, 1, phi, dphi, dot(a.rows, phi, dphi), dy);
      return softmax_adjoint<true>(a.rows, -1, phi + a.rows, dphi + a.rows,
                                   dot(a.rows, phi + a.rows, dphi + a.rows), dy);
    case FeatureMapKind::kElementwiseProduct:
      products<false>(a.rows, 1, a.y2 + t * a.row_pitch, dphi, dy);
      return products<false>(a.rows, 1, y, dphi, g.dy2 + t * a.row_pitch);
    case FeatureMapKind::kLuna:
      return luna_adjoint(a, g, y, dphi, dy);
    case FeatureMapKind::kL2Norm: {
      // phi = r x: dx = r (dphi - phi (phi . dphi))
      const float r = 1 / std::sqrt(dot(a.keys, x, x) + a.l2norm_eps);
      multiples<false>(a.keys, r, dphi, dx);
      return multiples<true>(a.keys, -r * dot(a.keys, phi, dphi), phi, dx);
    }
  }
}

}  // namespace

void FeatureRows(const Args& a) {
  for (Int t = 0; t < a.tokens; ++t) {
    std::fill(a.phi + t * a.pitch + a.features, a.phi + (t + 1) * a.pitch, 0.0f);
    features_of(a, t);
  }
}

void FeatureExponents(const Args& a, float* exponent) {
  for (Int t = 0; t < a.tokens; ++t) {
    const float* x = a.x + t * a.key_pitch;
    const float* y = a.y1 + t * a.row_pitch;
    if (a.kind == FeatureMapKind::kExp) {
      exponent[t] = exponent_of(largest(a.keys, x, 1));
    } else {
      const HalfSquare norm(a.keys, x);
      const float sign = a.kind == FeatureMapKind::kFavorHyperbolic ? 0 : 1;
      exponent[t] = exponent_of(largest(a.rows, y, sign) - norm.rest) - norm.exponent;
    }
    // NaN has none: it is passed on by the features.
    if (!(exponent[t] >= kNoExponent)) exponent[t] = kNoExponent;
  }
}

void FeatureRowsAdjoint(const Args& a, const Grads& g) {
  for (Int t = 0; t < a.tokens; ++t) adjoint_of(a, g, t);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(FeatureRows);
HWY_EXPORT(FeatureExponents);
HWY_EXPORT(FeatureRowsAdjoint);

void feature_rows(Isa isa, const FeatureRowsArgs& args) { OUZEL_DISPATCH(isa, FeatureRows)(args); }
void feature_exponents(Isa isa, const FeatureRowsArgs& args, float* exponent) {
  OUZEL_DISPATCH(isa, FeatureExponents)(args, exponent);
}
void feature_rows_adjoint(Isa isa, const FeatureRowsArgs& args, const FeatureRowsGrads& grads) {
  OUZEL_DISPATCH(isa, FeatureRowsAdjoint)(args, grads);
}
}  // namespace ouzel
#endif
