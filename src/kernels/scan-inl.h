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

#include "hwy/highway.h"

#include "src/kernels/math-inl.h"
#include "src/kernels/two_part-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// s := e^g (s + low) + x for g <= 0, with `factor` = e^g.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void decay_and_add(D d, V g, V factor, V x, V& s, V& low) {
  const auto is_near = hn::Gt(g, hn::Set(d, -0.34f));  // where expm1_reduced holds
  const V minus_1 =
      hn::IfThenElse(is_near, math::expm1_reduced(d, g), hn::Sub(factor, hn::Set(d, 1.0f)));
  s = two_part_sum(d, s, low, factor, minus_1, x);
}

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
