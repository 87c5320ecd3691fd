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

constexpr int64_t kLanes = HWY_LANES(float);
constexpr int kGroup = 4;  // vectors side by side

template <class In, class Out>
float Forward(const TokenRange& range, TokenRows<const void> x_rows, TokenRows<const void> g_rows,
              TokenRows<void> o, float* high, float* low) {
  const D d;
  V top = hn::Zero(d);
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const In* xt = row_of<In>(x_rows, t);
    const In* gt = row_of<In>(g_rows, t);
    Out* ot = row_of<Out>(o, t);
    ForGroups<kGroup>(
        d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
          constexpr int kCount = count;
          V gate[kCount], power[kCount], part[kCount], h[kCount], rest[kCount], x[kCount];
          hn::Mask<D> lost[kCount];
          fetch<kCount>(xt + first, x_rows.stride);
          fetch<kCount>(gt + first, g_rows.stride);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            gate[j] = lanes.Load(d, gt + i);
            top = math::at_least(d, gate[j], top);
            gate[j] = math::at_most(d, hn::Zero(d), gate[j]);
            h[j] = lanes.Load(d, high + i);
            rest[j] = lanes.Load(d, low + i);
            x[j] = lanes.Load(d, xt + i);
          }
          decay_parts<kCount>(d, gate, lost, power, part);
          decay_sums<kCount>(d, h, rest, lost, power, part, x);
          round_sums<kCount>(d, h, rest);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            lanes.Store(h[j], d, high + i);
            lanes.Store(rest[j], d, low + i);
          }
          lanes.Output(h, d, ot + first, range.stream);
        });
  }
  if (range.stream) hwy::FlushStream();
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

float HgrnForward(const TokenRange& range, TokenRows<const void> x, TokenRows<const void> g,
                  TokenRows<void> o, float* high, float* low) {
  return for_types(range, [&](auto in, auto out) {
    return Forward<decltype(in), decltype(out)>(range, x, g, o, high, low);
  });
}

template <class In, class Out>
void Backward(const TokenRange& range, TokenRows<const void> g, TokenRows<const float> h,
              const float* h0, TokenRows<const void> d_o, TokenRows<void> dx, TokenRows<void> dg,
              float* high, float* low) {
  const D d;
  for (int64_t t = range.tokens; t-- > 0;) {
    check_cancelled_at(t);
    const In* gt = row_of<In>(g, t);
    const float* before = t > 0 ? h.data + (t - 1) * h.stride : h0;
    const In* d_ot = row_of<In>(d_o, t);
    ForGroups<kGroup>(
        d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
          constexpr int kCount = count;
          V gate[kCount], power[kCount], part[kCount], dh[kCount], rest[kCount], zeros[kCount];
          hn::Mask<D> lost[kCount];
          fetch<kCount>(gt + first, -g.stride);
          fetch<kCount>(before + first, -h.stride);
          fetch<kCount>(d_ot + first, -d_o.stride);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            zeros[j] = hn::Zero(d);
            gate[j] = math::at_most(d, zeros[j], lanes.Load(d, gt + i));
            dh[j] = lanes.Load(d, high + i);
            rest[j] = hn::Add(lanes.Load(d, d_ot + i), lanes.Load(d, low + i));
          }
          decay_parts<kCount>(d, gate, lost, power, part);
          round_sums<kCount>(d, dh, rest);
          if (dx.data != nullptr) {
            lanes.Output(dh, d, row_of<Out>(dx, t) + first, range.stream);
          }
          if (dg.data != nullptr) {
            V slope[kCount];
            OUZEL_UNROLL
            for (int j = 0; j < kCount; ++j) {
              const V factor = decay_factor(d, lost[j], power[j], part[j]);
              const V old = lanes.Load(d, before + first + j * kLanes);
              slope[j] = hn::IfThenZeroElse(lost[j], hn::Mul(hn::Mul(dh[j], factor), old));
            }
            lanes.Output(slope, d, row_of<Out>(dg, t) + first, range.stream);
          }
          decay_sums<kCount>(d, dh, rest, lost, power, part, zeros);
          round_sums<kCount>(d, dh, rest);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            lanes.Store(dh[j], d, high + i);
            lanes.Store(rest[j], d, low + i);
          }
        });
  }
  if (range.stream) hwy::FlushStream();
}

void HgrnBackward(const TokenRange& range, TokenRows<const void> g, TokenRows<const float> h,
                  const float* h0, TokenRows<const void> d_o, TokenRows<void> dx,
                  TokenRows<void> dg, float* high, float* low) {
  for_types(range, [&](auto in, auto out) {
    Backward<decltype(in), decltype(out)>(range, g, h, h0, d_o, dx, dg, high, low);
  });
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(HgrnForward);
HWY_EXPORT(HgrnBackward);

float hgrn_forward(Isa isa, const TokenRange& range, TokenRows<const void> x,
                   TokenRows<const void> g, TokenRows<void> o, float* high, float* low) {
  return OUZEL_DISPATCH(isa, HgrnForward)(range, x, g, o, high, low);
}
void hgrn_backward(Isa isa, const TokenRange& range, TokenRows<const void> g,
                   TokenRows<const float> h, const float* h0, TokenRows<const void> d_o,
                   TokenRows<void> dx, TokenRows<void> dg, float* high, float* low) {
  OUZEL_DISPATCH(isa, HgrnBackward)(range, g, h, h0, d_o, dx, dg, high, low);
}

}  // namespace ouzel
#endif
