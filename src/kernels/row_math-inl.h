// Arithmetic on rows of any length, for the feature maps and their adjoints.

// Per-target include guard.
#if defined(OUZEL_KERNELS_ROW_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_ROW_MATH_INL_H_
#undef OUZEL_KERNELS_ROW_MATH_INL_H_
#else
#define OUZEL_KERNELS_ROW_MATH_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using Int = std::int64_t;

inline constexpr Int kLanes = HWY_LANES(float);
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// body(i, n) for i = 0, L, 2L, ... below `size`, n numbers being left from i on.
template <class Body>
HWY_INLINE void for_vectors(Int size, Body body) {
  for (Int i = 0; i < size; i += kLanes) body(i, size - i);
}

// out (+)= factor a * b
template <bool kAdd>
HWY_INLINE void products(Int size, float factor, const float* a, const float* b, float* out) {
  const D d;
  const V f = hn::Set(d, factor);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    V y = hn::Mul(hn::Mul(f, load_first(d, a + i, n)), load_first(d, b + i, n));
    if constexpr (kAdd) y = hn::Add(y, load_first(d, out + i, n));
    store_first(d, y, out + i, n);
  });
}
// out (+)= factor x
template <bool kAdd>
HWY_INLINE void multiples(Int size, float factor, const float* x, float* out) {
  const D d;
  const V f = hn::Set(d, factor);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    const V v = load_first(d, x + i, n);
    store_first(d, kAdd ? hn::MulAdd(f, v, load_first(d, out + i, n)) : hn::Mul(f, v), out + i, n);
  });
}

HWY_INLINE float dot(Int size, const float* a, const float* b) {
  const D d;
  V sum = hn::Zero(d);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    sum = hn::MulAdd(load_first(d, a + i, n), load_first(d, b + i, n), sum);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// The largest of sign x, or of |x| for sign 0.
HWY_INLINE float largest(Int size, const float* x, float sign) {
  const D d;
  const V low = hn::Set(d, -kInf);
  V top = low;
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    V v = load_first(d, x + i, n);
    v = sign == 0 ? hn::Abs(v) : hn::Mul(v, hn::Set(d, sign));
    if (n < kLanes) v = hn::IfThenElse(hn::FirstN(d, static_cast<std::size_t>(n)), v, low);
    top = hn::Max(v, top);
  });
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

// out = exp(factor x - top), and its sum.
HWY_INLINE float exponentials(Int size, float factor, const float* x, float top, float* out) {
  const D d;
  const V f = hn::Set(d, factor), shift = hn::Set(d, top);
  V sum = hn::Zero(d);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    V y = math::exp(d, hn::Sub(hn::Mul(f, load_first(d, x + i, n)), shift));
    if (n < kLanes) y = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(n)), y);
    store_first(d, y, out + i, n);
    sum = hn::Add(sum, y);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// softmax(sign x)
HWY_INLINE void softmax(Int size, float sign, const float* x, float* out) {
  const float sum = exponentials(size, sign, x, largest(size, x, sign), out);
  multiples<false>(size, 1 / sum, out, out);
}
// out (+)= factor y (dy - y . dy), the adjoint of y = softmax(x) for factor 1.
template <bool kAdd>
HWY_INLINE void softmax_adjoint(Int size, float factor, const float* y, const float* dy,
                                float y_dot_dy, float* out) {
  const D d;
  const V mean = hn::Set(d, y_dot_dy), f = hn::Set(d, factor);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    const V slope = hn::Mul(f, load_first(d, y + i, n));
    V x = hn::Mul(slope, hn::Sub(load_first(d, dy + i, n), mean));
    if constexpr (kAdd) x = hn::Add(x, load_first(d, out + i, n));
    store_first(d, x, out + i, n);
  });
}

// f(x) of each number, filled up by nothing: callers zero what is beyond.
template <class Function>
HWY_INLINE void each(Int size, const float* x, float* out, Function f) {
  const D d;
  for_vectors(size, [&](Int i, Int n)
                        HWY_ATTR { store_first(d, f(d, load_first(d, x + i, n)), out + i, n); });
}
// dx (+)= dy where x > 0, times factor x^power.
template <int kPower, bool kAdd>
HWY_INLINE void relu_adjoint(Int size, float factor, const float* x, const float* dy, float* dx) {
  const D d;
  const V f = hn::Set(d, factor);
  for_vectors(size, [&](Int i, Int n) HWY_ATTR {
    const V v = load_first(d, x + i, n);
    V slope = f;
    if constexpr (kPower == 1) slope = hn::Mul(f, v);
    V y = hn::IfThenElseZero(hn::Gt(v, hn::Zero(d)), hn::Mul(slope, load_first(d, dy + i, n)));
    if constexpr (kAdd) y = hn::Add(y, load_first(d, dx + i, n));
    store_first(d, y, dx + i, n);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
