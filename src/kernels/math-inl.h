// Elementary functions of float vectors: exp, exp2, expm1, log, sigmoid, SiLU, cosine and sine.
// Range reduction to a power of two and a minimax polynomial; correct at infinities and NaN. Errors
// against float64, over every float of the range: tests/math_test.cc. The polynomials were fitted
// by Remez's exchange with the relative error as weight.

// Per-target include guard.
#if defined(OUZEL_KERNELS_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_MATH_INL_H_
#undef OUZEL_KERNELS_MATH_INL_H_
#else
#define OUZEL_KERNELS_MATH_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"

#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace math {

// max(low, x), min(high, x) that keep a NaN of x.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V at_least(D, V low, V x) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::Max(low, x);  // maxps returns its second operand if either is NaN
#else
  return hn::IfThenElse(hn::Lt(x, low), low, x);
#endif
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V at_most(D, V high, V x) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::Min(high, x);
#else
  return hn::IfThenElse(hn::Gt(x, high), high, x);
#endif
}

// p * 2^n for integral n in [-252, 254], rounded once where the result is normal.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V scale_by_pow2(D d, V p, V n) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (sizeof(V) == 64) return V{_mm512_scalef_ps(p.raw, n.raw)};
#endif
  // In two halves, so that 2^128 and 2^-150 pass.
  const hn::RebindToSigned<D> di;
  // Beside 1.5 * 2^23 the bits of a float count in ones: a conversion would look for what is too
  // large.
  const V ones = hn::Set(d, 0x1.8p23f);
  const auto ni = hn::Sub(hn::BitCast(di, hn::Add(n, ones)), hn::BitCast(di, ones));
  const auto half = hn::ShiftRight<1>(ni);
  const auto bias = hn::Set(di, 127);
  const V a = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V b = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(ni, half), bias)));
  return hn::Mul(hn::Mul(p, a), b);
}

// exp(r) - 1 = r + r^2 P(r) for |r| <= ln(2) / 2, relative error 3e-9 before rounding. Of kCount
// vectors side by side: the chain of one is long, and waiting for it fills the scheduler.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void expm1_reduced(D d, const V* r, V* p) {
  constexpr float kP[] = {8.368710056e-03f, 4.166838899e-02f, 1.666652113e-01f, 4.999999404e-01f};
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) p[j] = hn::Set(d, 1.381461159e-03f);
  OUZEL_UNROLL
  for (const float coefficient : kP) {
    OUZEL_UNROLL
    for (int j = 0; j < kCount; ++j) p[j] = hn::MulAdd(p[j], r[j], hn::Set(d, coefficient));
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) p[j] = hn::MulAdd(hn::Mul(r[j], r[j]), p[j], r[j]);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V expm1_reduced(D d, V r) {
  V p;
  expm1_reduced<1>(d, &r, &p);
  return p;
}

// x = n ln(2) + r: n is returned, r is set. ln(2) in two parts, the first short enough (15 bits)
// for n * ln2_high to be exact without fused arithmetic too.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V reduce_by_ln2(D d, V x, V& r) {
  const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504089f)));
  r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 1.428606765e-06f), r);
  return n;
}

// exp(x): within 1 ulp; 0 for -inf, inf from 88.73 on, NaN for NaN. Results below 2^-126 may be 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp(D d, V x) {
  x = at_most(d, hn::Set(d, 89.0f), at_least(d, hn::Set(d, -104.0f), x));
  V r;
  const V n = reduce_by_ln2(d, x, r);
  return scale_by_pow2(d, hn::Add(hn::Set(d, 1.0f), expm1_reduced(d, r)), n);
}

// exp(x) - 1: within 2 ulp, without cancellation near 0; -1 for -inf, inf from 88.73 on.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V expm1(D d, V x) {
  // Below -18 the result rounds to -1.
  x = at_most(d, hn::Set(d, 89.0f), at_least(d, hn::Set(d, -18.0f), x));
  V r;
  const V n = reduce_by_ln2(d, x, r);
  // Half of the result is formed first: 2^128 is no float.
  const V half = scale_by_pow2(d, hn::Set(d, 0.5f), n);
  const V result = hn::MulAdd(half, expm1_reduced(d, r), hn::Sub(half, hn::Set(d, 0.5f)));
  return hn::Add(result, result);
}

// 2^x: within 1 ulp (1.2 without fused multiply-adds), exactly 1 at 0; 0 for -inf and below -150,
// inf from 128 on, NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2(D d, V x) {
  x = at_most(d, hn::Set(d, 129.0f), at_least(d, hn::Set(d, -151.0f), x));
  const V n = hn::Round(x);
  const V f = hn::Sub(x, n);
  // 2^f = 1 + f Q(f) for |f| <= 1/2, relative error 2e-9.
  V p = hn::Set(d, 1.535336196e-04f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.339887385e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.618436918e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550332367e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402264774e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931471825e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return scale_by_pow2(d, p, n);
}

// Natural logarithm of normal x > 0: within 2 ulp (near 1 too); -inf at 0, NaN below, inf at inf,
// NaN at NaN. Subnormal x count as 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log(D d, V x) {
  const hn::RebindToSigned<D> di;
  // x = 2^e m with m in [sqrt(1/2), sqrt(2)): the bits are shifted by those of sqrt(1/2).
  const auto offset = hn::Set(di, 0x3F3504F3);
  const auto shifted = hn::Sub(hn::BitCast(di, x), offset);
  const V e = hn::ConvertTo(d, hn::ShiftRight<23>(shifted));
  const V m = hn::BitCast(d, hn::Add(hn::And(shifted, hn::Set(di, 0x007FFFFF)), offset));
  const V f = hn::Sub(m, hn::Set(d, 1.0f));
  // log(1 + f) = f - f^2 / 2 + f^3 R(f), relative error 6e-9.
  V p = hn::Set(d, -7.634571940e-02f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.276161820e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.316017210e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.420175135e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.662335843e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.000122666e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, -2.500081956e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 3.333333135e-01f));
  const V f2 = hn::Mul(f, f);
  V y = hn::Mul(hn::Mul(p, f), f2);
  y = hn::MulAdd(e, hn::Set(d, 1.428606765e-06f), y);
  y = hn::NegMulAdd(hn::Set(d, 0.5f), f2, y);
  y = hn::Add(y, f);
  y = hn::MulAdd(e, hn::Set(d, 0.693145751953125f), y);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const V zero = hn::Zero(d);
  const V inf = hn::Set(d, kInf);
  y = hn::IfThenElse(hn::Lt(x, hn::Set(d, std::numeric_limits<float>::min())), hn::Set(d, -kInf),
                     y);
  y = hn::IfThenElse(hn::Lt(x, zero), hn::Set(d, std::numeric_limits<float>::quiet_NaN()), y);
  y = hn::IfThenElse(hn::Eq(x, inf), inf, y);
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// 1 / (1 + exp(-x)): within 3 ulp; 0 from -88.73 down.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp(d, hn::Neg(x))));
}

// x sigmoid(x); NaN at -inf (-inf * 0), as x * sigmoid(x) is in other libraries.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu(D d, V x) {
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), exp(d, hn::Neg(x))));
}

// Cosine and sine of an angle (of doubles) below 2^32 to float32's last place: the nearest multiple
// of pi/2 is taken off in three parts of 24, 24 and 53 bits (the first two products are exact),
// then Taylor's series on [-pi/4, pi/4] to the 10th power (2e-9).
template <class D, class V = hn::Vec<D>>
HWY_INLINE void cos_sin(D d, V angle, V& cos, V& sin) {
  const V n = hn::Round(hn::Mul(angle, hn::Set(d, 0x1.45f306dc9c883p-1)));
  V r = hn::Sub(angle, hn::Mul(n, hn::Set(d, 0x1.921fb4p+0)));
  r = hn::Sub(r, hn::Mul(n, hn::Set(d, 0x1.4442d0p-24)));
  r = hn::Sub(r, hn::Mul(n, hn::Set(d, 0x1.8469898cc5170p-48)));
  const V r2 = hn::Mul(r, r);
  V s = hn::Set(d, 1.0 / 362880);
  s = hn::MulAdd(s, r2, hn::Set(d, -1.0 / 5040));
  s = hn::MulAdd(s, r2, hn::Set(d, 1.0 / 120));
  s = hn::MulAdd(s, r2, hn::Set(d, -1.0 / 6));
  s = hn::MulAdd(hn::Mul(s, r2), r, r);
  V c = hn::Set(d, -1.0 / 3628800);
  c = hn::MulAdd(c, r2, hn::Set(d, 1.0 / 40320));
  c = hn::MulAdd(c, r2, hn::Set(d, -1.0 / 720));
  c = hn::MulAdd(c, r2, hn::Set(d, 1.0 / 24));
  c = hn::MulAdd(c, r2, hn::Set(d, -0.5));
  c = hn::MulAdd(c, r2, hn::Set(d, 1.0));
  // The quadrant n mod 4 as a double in {0, 1, 2, 3}.
  const V q = hn::NegMulAdd(hn::Floor(hn::Mul(n, hn::Set(d, 0.25))), hn::Set(d, 4.0), n);
  const auto odd = hn::Or(hn::Eq(q, hn::Set(d, 1.0)), hn::Eq(q, hn::Set(d, 3.0)));
  const auto minus_sin = hn::Ge(q, hn::Set(d, 2.0));
  const auto minus_cos = hn::Or(hn::Eq(q, hn::Set(d, 1.0)), hn::Eq(q, hn::Set(d, 2.0)));
  const V turned_sin = hn::IfThenElse(odd, c, s), turned_cos = hn::IfThenElse(odd, s, c);
  sin = hn::IfThenElse(minus_sin, hn::Neg(turned_sin), turned_sin);
  cos = hn::IfThenElse(minus_cos, hn::Neg(turned_cos), turned_cos);
}

}  // namespace math
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
