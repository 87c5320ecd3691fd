// A decay of exactly 0 drops what it multiplies, even NaN.

// Per-target include guard.
#if defined(OUZEL_KERNELS_RESET_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_RESET_INL_H_
#undef OUZEL_KERNELS_RESET_INL_H_
#else
#define OUZEL_KERNELS_RESET_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Where a factor is not 0. One of NaN drops nothing: it must be seen. (hn::Ne of NaN is false on
// x86.)
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> is_kept(D d, V factor) {
  return hn::Not(hn::Eq(factor, hn::Zero(d)));
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // OUZEL_KERNELS_RESET_INL_H_
