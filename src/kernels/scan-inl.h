// What the elementwise scans are made of: decays of sums in two parts (two_part-inl.h), and such
// sums in memory.

// Per-target include guard.
#if defined(OUZEL_KERNELS_SCAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_SCAN_INL_H_
#undef OUZEL_KERNELS_SCAN_INL_H_
#else
#define OUZEL_KERNELS_SCAN_INL_H_
#endif

#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "src/kernels/math-inl.h"
#include "src/kernels/two_part-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^g and e^g - 1 for g <= 0, each accurate for itself, by one polynomial.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void decay_factors(D d, V g, V& factor, V& minus_1) {
  V r;
  const V n = math::reduce_by_ln2(d, math::at_least(d, hn::Set(d, -104.0f), g), r);
  const V one = hn::Set(d, 1.0f);
  const V p = math::expm1_reduced(d, r);
  factor = math::scale_by_pow2(d, hn::Add(one, p), n);
  minus_1 = hn::Add(math::scale_by_pow2(d, p, n), hn::Sub(math::scale_by_pow2(d, one, n), one));
}

// 1 / (1 + e^-x) and 1 / (1 + e^-y) by one division, within 4 ulp; from -43 down they stay at
// 2e-19, so that the product of the denominators is a float.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void two_sigmoids(D d, V x, V y, V& sigmoid_x, V& sigmoid_y) {
  const V one = hn::Set(d, 1.0f), most = hn::Set(d, 43.0f);
  const V a = hn::Add(one, math::exp(d, math::at_most(d, most, hn::Neg(x))));
  const V b = hn::Add(one, math::exp(d, math::at_most(d, most, hn::Neg(y))));
  const V inverse = hn::Div(one, hn::Mul(a, b));
  sigmoid_x = hn::Mul(inverse, b);
  sigmoid_y = hn::Mul(inverse, a);
}

// Asks for the row that comes two strides later: blocks of channels are too short for the processor
// to see where the next row begins.
HWY_INLINE void fetch(const float* row, std::int64_t stride) { hwy::Prefetch(row + 2 * stride); }

// s += x
template <class D, class V = hn::Vec<D>>
HWY_INLINE void add_to_sum(D d, V x, V& s, V& low) {
  s = two_part_add(d, s, hn::Add(x, low), low);
}
// The same with element i of a sum in memory; null: the sum is not wanted.
template <class D, class Lanes, class V = hn::Vec<D>>
HWY_INLINE void accumulate(D d, Lanes lanes, V x, float* s, float* low, std::int64_t i) {
  if (s == nullptr) return;
  V sum = lanes.Load(d, s + i), rest = lanes.Load(d, low + i);
  add_to_sum(d, x, sum, rest);
  lanes.Store(sum, d, s + i);
  lanes.Store(rest, d, low + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
