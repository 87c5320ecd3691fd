// A token at a time over all channels: the state stays in the first-level cache, every row is read
// or written once, in order.
#include "src/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/hgrn.cc"
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

float HgrnForward(const TokenRange& range, TokenRows<const float> x, TokenRows<const float> g,
                  TokenRows<float> o, float* high, float* low) {
  const D d;
  V top = hn::Zero(d);
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const float* xt = x.data + t * x.stride;
    const float* gt = g.data + t * g.stride;
    float* ot = o.data + t * o.stride;
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      fetch(xt + i, x.stride);
      fetch(gt + i, g.stride);
      const V given = lanes.Load(d, gt + i);
      top = hn::IfThenElse(hn::Gt(given, top), given, top);
      const V gate = math::at_most(d, hn::Zero(d), given);
      V h = lanes.Load(d, high + i), rest = lanes.Load(d, low + i);
      V factor, minus_1;
      decay_factors(d, gate, factor, minus_1);
      h = two_part_sum(d, h, rest, factor, minus_1, lanes.Load(d, xt + i));
      lanes.Store(h, d, high + i);
      lanes.Store(rest, d, low + i);
      lanes.Output(h, d, ot + i, range.stream);
    });
  }
  if (range.stream) hwy::FlushStream();
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

void HgrnBackward(const TokenRange& range, TokenRows<const float> g, TokenRows<const float> h,
                  const float* h0, TokenRows<const float> d_o, TokenRows<float> dx,
                  TokenRows<float> dg, float* high, float* low) {
  const D d;
  const V reset = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t t = range.tokens; t-- > 0;) {
    check_cancelled_at(t);
    const float* gt = g.data + t * g.stride;
    const float* before = t > 0 ? h.data + (t - 1) * h.stride : h0;
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      fetch(gt + i, -g.stride);
      fetch(before + i, -h.stride);
      fetch(d_o.data + t * d_o.stride + i, -d_o.stride);
      const V gate = math::at_most(d, hn::Zero(d), lanes.Load(d, gt + i));
      V factor, minus_1;
      decay_factors(d, gate, factor, minus_1);
      V dh = lanes.Load(d, high + i), rest = lanes.Load(d, low + i);
      add_to_sum(d, lanes.Load(d, d_o.data + t * d_o.stride + i), dh, rest);
      if (dx.data != nullptr) lanes.Output(dh, d, dx.data + t * dx.stride + i, range.stream);
      if (dg.data != nullptr) {
        const V product = hn::Mul(hn::Mul(dh, factor), lanes.Load(d, before + i));
        lanes.Output(hn::IfThenZeroElse(hn::Eq(gate, reset), product), d,
                     dg.data + t * dg.stride + i, range.stream);
      }
      dh = two_part_sum(d, dh, rest, factor, minus_1, hn::Zero(d));
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

HWY_EXPORT(HgrnForward);
HWY_EXPORT(HgrnBackward);

float hgrn_forward(Isa isa, const TokenRange& range, TokenRows<const float> x,
                   TokenRows<const float> g, TokenRows<float> o, float* high, float* low) {
  return OUZEL_DISPATCH(isa, HgrnForward)(range, x, g, o, high, low);
}
void hgrn_backward(Isa isa, const TokenRange& range, TokenRows<const float> g,
                   TokenRows<const float> h, const float* h0, TokenRows<const float> d_o,
                   TokenRows<float> dx, TokenRows<float> dg, float* high, float* low) {
  OUZEL_DISPATCH(isa, HgrnBackward)(range, g, h, h0, d_o, dx, dg, high, low);
}

}  // namespace ouzel
#endif
