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
#include <initializer_list>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "src/kernels/elementwise.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/two_part-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The functions of kCount vectors work on them side by side, operation by operation: one after the
// other their long chains would fill the processor's scheduler with what has to wait.

// e^x as power (1 + part): a power of two, and a part that is accurate for itself. x in
// [-87.3, 88.3]; the two are meaningless elsewhere.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void exp_parts(D d, const V* x, V* power, V* part) {
  const hn::RebindToUnsigned<D> du;
  // The last place of the sum is 1: its low bits are 127 + n with n ln(2) nearest to x.
  const V shift = hn::Set(d, 0x1.8p23f + 127);
  V n[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) n[j] = hn::MulAdd(x[j], hn::Set(d, 1.44269504089f), shift);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    power[j] = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, n[j])));
    n[j] = hn::Sub(n[j], shift);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) n[j] = hn::NegMulAdd(n[j], hn::Set(d, 0.69314718056f), x[j]);
  math::expm1_reduced<kCount>(d, n, part);
}
// Decays e^g, g <= 0. `lost` is where nothing is left: below -87.3 power and part are meaningless.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void decay_parts(D d, const V* g, hn::Mask<D>* lost, V* power, V* part) {
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) lost[j] = hn::Lt(g[j], hn::Set(d, -87.3f));
  exp_parts<kCount>(d, g, power, part);
}
// A part as it is kept in memory: this one where nothing is left.
inline constexpr float kNothingLeft = -1;
template <class D, class V = hn::Vec<D>>
HWY_INLINE V stored_part(D d, hn::Mask<D> lost, V part) {
  return hn::IfThenElse(lost, hn::Set(d, kNothingLeft), part);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> lost_by(D d, V stored) {
  return hn::Eq(stored, hn::Set(d, kNothingLeft));
}
// e^g itself.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V decay_factor(D, hn::Mask<D> lost, V power, V part) {
  return hn::IfThenZeroElse(lost, hn::MulAdd(part, power, power));
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
HWY_INLINE void decay_sums(D, V* s, V* low, const hn::Mask<D>* lost, const V* power, const V* part,
                           const V* x) {
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) low[j] = hn::MulAdd(s[j], part[j], low[j]);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    low[j] = hn::IfThenElse(lost[j], x[j], hn::MulAdd(low[j], power[j], x[j]));
    s[j] = hn::IfThenZeroElse(lost[j], hn::Mul(s[j], power[j]));
  }
}

// 1 / (1 + e^-x), within 3 ulp; 0 below -87.3.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void sigmoids(D d, const V* x, V* sigmoid) {
  const V one = hn::Set(d, 1.0f), least = hn::Set(d, -87.3f);
  V minus_x[kCount], power[kCount], part[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) minus_x[j] = math::at_least(d, least, hn::Neg(x[j]));
  exp_parts<kCount>(d, minus_x, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V above = hn::Div(one, hn::Add(one, hn::MulAdd(part[j], power[j], power[j])));
    sigmoid[j] = hn::IfThenZeroElse(hn::Lt(x[j], least), above);
  }
}
// x sigmoid(x); NaN at -inf, as math::silu.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void silus(D d, V* x) {
  V sigmoid[kCount];
  sigmoids<kCount>(d, x, sigmoid);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) x[j] = hn::Mul(x[j], sigmoid[j]);
}
// sigmoid(x) and sigmoid(y) from e^-|x| and e^-|y| by one division, within 4 ulp; 0 below -87.3.
template <int kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void two_sigmoids(D d, V* x, V* y) {
  const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  V gate[2 * kCount], power[2 * kCount], part[2 * kCount];
  hn::Mask<D> lost[2 * kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    gate[2 * j] = hn::Neg(hn::Abs(x[j]));
    gate[2 * j + 1] = hn::Neg(hn::Abs(y[j]));
  }
  decay_parts<2 * kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V u = decay_factor(d, lost[2 * j], power[2 * j], part[2 * j]);
    const V w = decay_factor(d, lost[2 * j + 1], power[2 * j + 1], part[2 * j + 1]);
    const V a = hn::Add(one, u), b = hn::Add(one, w), inverse = hn::Div(one, hn::Mul(a, b));
    x[j] = hn::Mul(hn::IfThenElse(hn::Lt(x[j], zero), u, one), hn::Mul(inverse, b));
    y[j] = hn::Mul(hn::IfThenElse(hn::Lt(y[j], zero), w, one), hn::Mul(inverse, a));
  }
}

// Asks for what kCount vectors read two strides later: blocks of channels are too short for the
// processor to see where the next row begins.
template <int kCount, class Element>
HWY_INLINE void fetch(const Element* row, std::int64_t stride) {
  constexpr int kLanes = HWY_LANES(float), kLine = 64 / sizeof(Element);
  OUZEL_UNROLL
  for (int i = 0; i < kCount * kLanes; i += kLine) hwy::Prefetch(row + 2 * stride + i);
}
// Row t of rows whose type is known.
template <class Element>
HWY_INLINE const Element* row_of(const TokenRows<const void>& rows, std::int64_t t) {
  return static_cast<const Element*>(rows.data) + t * rows.stride;
}
template <class Element>
HWY_INLINE Element* row_of(const TokenRows<void>& rows, std::int64_t t) {
  return static_cast<Element*>(rows.data) + t * rows.stride;
}
// f(in, out), of a range's types.
template <class F>
HWY_INLINE auto for_types(const TokenRange& range, const F& f) {
  const bool wide = range.out == DType::kF32;
  if (range.in == DType::kBF16) {
    return wide ? f(BFloat16(), float()) : f(BFloat16(), BFloat16());
  }
  if (range.in == DType::kF16) return wide ? f(Float16(), float()) : f(Float16(), Float16());
  return f(float(), float());
}

// Where to fetch next, counted from the first token and channel of a call on.
struct Ahead {
  std::int64_t token, channel;
};
// Asks for `count` numbers of each list and goes on in the order of memory, in which the processor
// fetches by itself too: kernels that go along the tokens would ask for the smallest pieces.
HWY_INLINE void fetch_ahead(std::initializer_list<TokenRows<const float>> lists, std::int64_t count,
                            std::int64_t channels, Ahead& at) {
  for (const TokenRows<const float>& list : lists) {
    for (std::int64_t i = 0; i < count; i += 16) {
      hwy::Prefetch(list.data + at.token * list.stride + at.channel + i);
    }
  }
  at.channel += count;
  if (at.channel >= channels) {
    at.channel = 0;
    ++at.token;
  }
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
