// As hgrn.cc, with the gate and the input formed from r, i and the channel's rate. exp and expm1 of
// small gates are accurate each for itself: 1 - a^2 near a = 1 never cancels.
#include "src/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rg_lru.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "src/base/threads.h"
#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/scan-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// sqrt(1 - a^2) = sqrt((1 - a) (1 + a)), or 1.
HWY_INLINE V Root(D d, V a, V minus_1, bool is_one) {
  const V one = hn::Set(d, 1.0f);
  return is_one ? one : hn::Sqrt(hn::Mul(hn::Neg(minus_1), hn::Add(one, a)));
}

// In two passes over a row: as one, the chain from r to the state would be longer than what the
// processor has in flight.
void RgLruForward(const TokenRange& range, const RgLruRows& rows, TokenRows<float> o, float* high,
                  float* low, float* work) {
  const D d;
  float *gates = work, *inputs = work + range.channels;
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const float* xt = rows.x.data + t * rows.x.stride;
    const float* rt = rows.r.data + t * rows.r.stride;
    const float* it = rows.i.data + t * rows.i.stride;
    float* ot = o.data + t * o.stride;
    const bool is_one = rows.first_is_one && t == 0;
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      fetch(xt + i, rows.x.stride);
      fetch(rt + i, rows.r.stride);
      fetch(it + i, rows.i.stride);
      V open, in;
      two_sigmoids(d, lanes.Load(d, rt + i), lanes.Load(d, it + i), open, in);
      lanes.Store(hn::Neg(hn::Mul(lanes.Load(d, rows.rate + i), open)), d, gates + i);
      lanes.Store(hn::Mul(in, lanes.Load(d, xt + i)), d, inputs + i);
    });
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      V h = lanes.Load(d, high + i), rest = lanes.Load(d, low + i), a, minus_1;
      decay_factors(d, lanes.Load(d, gates + i), a, minus_1);
      const V input = hn::Mul(Root(d, a, minus_1, is_one), lanes.Load(d, inputs + i));
      h = two_part_sum(d, h, rest, a, minus_1, input);
      lanes.Store(h, d, high + i);
      lanes.Store(rest, d, low + i);
      lanes.Output(h, d, ot + i, range.stream);
    });
  }
  if (range.stream) hwy::FlushStream();
}

void RgLruBackward(const TokenRange& range, const RgLruRows& rows, TokenRows<const float> h,
                   const float* h0, TokenRows<const float> d_o, const RgLruGradRows& grads,
                   float* high, float* low) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  for (int64_t t = range.tokens; t-- > 0;) {
    check_cancelled_at(t);
    const float* before = t > 0 ? h.data + (t - 1) * h.stride : h0;
    const bool is_one = rows.first_is_one && t == 0;
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const auto token = [&](const auto& list) HWY_ATTR { return list.data + t * list.stride + i; };
      const auto put = [&](const TokenRows<float>& list, V value) HWY_ATTR {
        if (list.data != nullptr) lanes.Output(value, d, token(list), range.stream);
      };
      const V rate = lanes.Load(d, rows.rate + i);
      for (const TokenRows<const float>& list : {rows.x, rows.r, rows.i, h, d_o}) {
        fetch(token(list), -list.stride);
      }
      V open, in;
      two_sigmoids(d, lanes.Load(d, token(rows.r)), lanes.Load(d, token(rows.i)), open, in);
      const V x = lanes.Load(d, token(rows.x));
      const V log_a = hn::Neg(hn::Mul(rate, open));
      V a, minus_1;
      decay_factors(d, log_a, a, minus_1);
      const V root = Root(d, a, minus_1, is_one);
      V dh = lanes.Load(d, high + i), rest = lanes.Load(d, low + i);
      add_to_sum(d, lanes.Load(d, token(d_o)), dh, rest);

      const V through = hn::Mul(dh, root);
      put(grads.x, hn::Mul(through, in));
      put(grads.i, hn::Mul(hn::Mul(through, x), hn::Mul(in, hn::Sub(one, in))));
      // d root / d L = -a^2 / root; no slope where a is 1 and the root 0.
      const V slope = is_one ? hn::Zero(d)
                             : hn::IfThenZeroElse(hn::Eq(root, hn::Zero(d)),
                                                  hn::Div(hn::Mul(a, a), hn::Neg(root)));
      const V d_log_a =
          hn::Mul(dh, hn::MulAdd(a, lanes.Load(d, before + i), hn::Mul(hn::Mul(slope, in), x)));
      put(grads.r, hn::Neg(hn::Mul(hn::Mul(d_log_a, rate), hn::Mul(open, hn::Sub(one, open)))));
      accumulate(d, lanes, hn::Neg(hn::Mul(d_log_a, open)), grads.rate_high, grads.rate_low, i);
      dh = two_part_sum(d, dh, rest, a, minus_1, hn::Zero(d));
      lanes.Store(dh, d, high + i);
      lanes.Store(rest, d, low + i);
    });
  }
  if (range.stream) hwy::FlushStream();
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(RgLruForward);
HWY_EXPORT(RgLruBackward);

void rg_lru_forward(Isa isa, const TokenRange& range, const RgLruRows& rows, TokenRows<float> o,
                    float* high, float* low, float* work) {
  OUZEL_DISPATCH(isa, RgLruForward)(range, rows, o, high, low, work);
}
void rg_lru_backward(Isa isa, const TokenRange& range, const RgLruRows& rows,
                     TokenRows<const float> h, const float* h0, TokenRows<const float> d_o,
                     const RgLruGradRows& grads, float* high, float* low) {
  OUZEL_DISPATCH(isa, RgLruBackward)(range, rows, h, h0, d_o, grads, high, low);
}

}  // namespace ouzel
#endif
