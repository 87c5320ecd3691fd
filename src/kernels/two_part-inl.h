// A sum in two parts: s, and in low what s has lost to rounding.

// Per-target include guard.
#if defined(OUZEL_KERNELS_TWO_PART_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_TWO_PART_INL_H_
#undef OUZEL_KERNELS_TWO_PART_INL_H_
#else
#define OUZEL_KERNELS_TWO_PART_INL_H_
#endif

#include "hwy/highway.h"
#include "src/kernels/reset-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// s + x, and in low what this sum lost.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V two_part_add(D, V s, V x, V& low) {
  const V sum = hn::Add(s, x);
  const V part = hn::Sub(sum, s);
  low = hn::Add(hn::Sub(s, hn::Sub(sum, part)), hn::Sub(x, part));
  return sum;
}

// (s + low) factor + change; factor_minus_1 is the factor's difference to 1, not rounded through
// it. Factors near 1 are applied as s factor_minus_1: 2,000 products with a rounded factor would be
// off by 6e-5. A factor of exactly 0 drops s and low, even NaN, if kDrops.
template <bool kDrops = true, class D, class V = hn::Vec<D>>
HWY_INLINE V two_part_sum(D d, V s, V& low, V factor, V factor_minus_1, V change) {
  const auto near_one = hn::Gt(factor_minus_1, hn::Set(d, -0.5f));
  const V shrink = hn::IfThenElse(near_one, factor_minus_1, factor);
  if constexpr (kDrops) {
    const auto keep = is_kept(d, factor);
    s = hn::IfThenElseZero(keep, s);
    low = hn::IfThenElseZero(keep, low);
  }
  const V high = hn::IfThenElseZero(near_one, s);
  const V rest = hn::MulAdd(low, shrink, hn::IfThenElseZero(near_one, low));
  change = hn::Add(change, hn::MulAdd(s, shrink, rest));
  return two_part_add(d, high, change, low);
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
