// Rows on their way into packed scratch, a vector at a time: the feature maps that act on each
// number alone, and the stores into the keyed layout (recurrence.h).

// Per-target include guard.
#if defined(OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#undef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#else
#define OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/recurrence.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(min(x, 0)), NaN for NaN: half of elu1, and its slope.
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec exp_of_negative(Tag d, Vec x) {
  x = math::at_least(d, hn::Set(d, -104.0f), math::at_most(d, hn::Zero(d), x));
  Vec r;
  const Vec n = math::reduce_by_ln2(d, x, r);
  return math::scale_by_pow2(d, hn::Add(hn::Set(d, 1.0f), math::expm1_reduced(d, r)), n);
}

template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec mapped(Tag d, Vec x) {
  if constexpr (kMap == ElementMap::kElu1) {
    return hn::Add(hn::Max(x, hn::Zero(d)), exp_of_negative(d, x));
  } else if constexpr (kMap == ElementMap::kRelu) {
    return math::at_least(d, hn::Zero(d), x);
  } else {
    return x;
  }
}

// Stores keys that are read (q) and written (k) into the keyed array at `out`.
template <bool kRead, bool kWrite, class D, class Vec = hn::Vec<D>>
HWY_INLINE void store_keyed(D d, Vec q, Vec k, float* out) {
#if HWY_TARGET == HWY_AVX3
  // Two blocks of 8. Stores of halves: joining q and k would take a port from the arithmetic.
  const hn::Half<D> dh;
  float* next = out + kKeyedBlockPitch;
  if constexpr (kRead) {
    hn::Store(hn::LowerHalf(dh, q), dh, out);
    hn::Store(hn::UpperHalf(dh, q), dh, next);
  }
  if constexpr (kWrite) {
    hn::Store(hn::LowerHalf(dh, k), dh, out + kKeyBlock);
    hn::Store(hn::UpperHalf(dh, k), dh, next + kKeyBlock);
  }
#else
  if constexpr (kRead) hn::Store(q, d, out);
  if constexpr (kWrite) hn::Store(k, d, out + kKeyBlock);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
