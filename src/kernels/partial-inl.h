// Loads and stores of the first n lanes of a vector.

// Per-target include guard.
#if defined(OUZEL_KERNELS_PARTIAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_PARTIAL_INL_H_
#undef OUZEL_KERNELS_PARTIAL_INL_H_
#else
#define OUZEL_KERNELS_PARTIAL_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Zeros beyond the first n lanes (n <= 0: none, n >= lanes: all). Memory beyond them is not read:
// the emulated MaskedLoad would.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V load_first(D d, const float* p, std::int64_t n) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (n >= lanes) return hn::LoadU(d, p);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(HWY_MAX(n, 0))), d, p);
#else
  HWY_ALIGN float lane[HWY_MAX_BYTES / sizeof(float)] = {};
  for (std::int64_t i = 0; i < n; ++i) lane[i] = p[i];
  return hn::Load(d, lane);
#endif
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void store_first(D d, V x, float* p, std::int64_t n) {
  if (n >= static_cast<std::int64_t>(hn::Lanes(d))) {
    hn::StoreU(x, d, p);
  } else if (n > 0) {
    hn::BlendedStore(x, hn::FirstN(d, static_cast<std::size_t>(n)), d, p);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // OUZEL_KERNELS_PARTIAL_INL_H_
