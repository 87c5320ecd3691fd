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
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The functions of kCount vectors work on them side by side, operation by operation: one after the
// other their long chains would fill the processor's scheduler with what has to wait.

// Decays e^g, g <= 0, as power (1 + part): a power of two, and a part that is accurate for itself.
// `kept` is where anything is left: below -87.3 the two are meaningless.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void decay_parts(D d, const V* g, hn::Mask<D>* kept, V* power, V* part) {
  const hn::RebindToUnsigned<D> du;
  // The last place of the sum is 1: its low bits are 127 + n with n ln(2) nearest to g.
  const V shift = hn::Set(d, 0x1.8p23f + 127);
  V n[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) n[j] = hn::MulAdd(g[j], hn::Set(d, 1.44269504089f), shift);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    power[j] = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, n[j])));
    n[j] = hn::Sub(n[j], shift);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    kept[j] = hn::Not(hn::Lt(g[j], hn::Set(d, -87.3f)));
    n[j] = hn::NegMulAdd(n[j], hn::Set(d, 0.69314718056f), g[j]);
  }
  math::expm1_reduced<kCount>(d, n, part);
}
// e^g itself.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V decay_factor(D, hn::Mask<D> kept, V power, V part) {
  return hn::IfThenElseZero(kept, hn::MulAdd(part, power, power));
}

// s + low as a sum in two parts: s is rounded, low what this loses. Either may be the larger
// before.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void round_sums(D, V* s, V* low) {
  V old[kCount], part[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    old[j] = s[j];
    s[j] = hn::Add(s[j], low[j]);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) part[j] = hn::Sub(s[j], old[j]);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    low[j] = hn::Sub(low[j], part[j]);
    part[j] = hn::Sub(s[j], part[j]);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) low[j] = hn::Add(hn::Sub(old[j], part[j]), low[j]);
}
// s + low = (s + low) e^g + x, for round_sums to round. s times the power is exact, so that nothing
// of a weak decay is rounded; of low times part, which is left out, a sum over any number of tokens
// is at most a last place of s.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void decay_sums(D, V* s, V* low, const hn::Mask<D>* kept, const V* power, const V* part,
                           const V* x) {
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) low[j] = hn::MulAdd(s[j], part[j], low[j]);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    low[j] = hn::IfThenElse(kept[j], hn::MulAdd(low[j], power[j], x[j]), x[j]);
    s[j] = hn::IfThenElseZero(kept[j], hn::Mul(s[j], power[j]));
  }
}

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
