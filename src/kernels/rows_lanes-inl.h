// Vectors of the kernels of the engine's backward (rows_backward.h), and sums over their lanes.

// Per-target include guard.
#if defined(OUZEL_KERNELS_ROWS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_ROWS_LANES_INL_H_
#undef OUZEL_KERNELS_ROWS_LANES_INL_H_
#else
#define OUZEL_KERNELS_ROWS_LANES_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
inline constexpr std::int64_t kLanes = HWY_MIN(HWY_LANES(float), 16);

// 4 numbers := those at `from` + the sums over lanes of x.
HWY_INLINE void add_lanes(D d, const V* x, const float* from, float* to) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  // Four vectors become one, a sum of each in every block of four lanes.
  const auto pair = [&](V a, V b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const hn::Repartition<double, D> d64;
  const auto low = hn::BitCast(d64, pair(x[0], x[1])), high = hn::BitCast(d64, pair(x[2], x[3]));
  const V four = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, low, high)),
                         hn::BitCast(d, hn::InterleaveUpper(d64, low, high)));
  const hn::CappedTag<float, 4> d4;
#if HWY_TARGET == HWY_AVX3
  const hn::CappedTag<float, 8> d8;
  const auto half = hn::Add(hn::LowerHalf(d8, four), hn::UpperHalf(d8, four));
#else
  const V half = four;
#endif
  const auto sum = hn::Add(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half));
  hn::StoreU(hn::Add(hn::LoadU(d4, from), sum), d4, to);
#else
  for (int i = 0; i < 4; ++i) to[i] = from[i] + hn::GetLane(hn::SumOfLanes(d, x[i]));
#endif
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
