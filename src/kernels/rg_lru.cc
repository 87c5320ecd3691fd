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

constexpr int64_t kLanes = HWY_LANES(float);
constexpr int kGroup = 4;  // vectors side by side

// A token of kCount vectors: r and i become their sigmoids, `factor` the decay a, `root` is
// sqrt(1 - a^2) = sqrt((1 - a) (1 + a)), or 1.
template <int kCount, class Lanes>
HWY_INLINE void Gates(D d, Lanes lanes, const float* rate, bool is_one, V* r, V* i,
                      hn::Mask<D>* lost, V* power, V* part, V* factor, V* root) {
  const V one = hn::Set(d, 1.0f);
  two_sigmoids<kCount>(d, r, i);
  V gate[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    gate[j] = hn::Neg(hn::Mul(lanes.Load(d, rate + j * kLanes), r[j]));
  }
  decay_parts<kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    factor[j] = decay_factor(d, lost[j], power[j], part[j]);
    const V gone = hn::NegMulAdd(part[j], power[j], hn::Sub(one, power[j]));
    const V square = hn::Mul(hn::IfThenElse(lost[j], one, gone), hn::Add(one, factor[j]));
    root[j] = is_one ? one : hn::Sqrt(square);
  }
}

template <class In, class Out>
void Forward(const TokenRange& range, const RgLruRows& rows, TokenRows<void> o, float* high,
             float* low) {
  const D d;
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const In* xt = row_of<In>(rows.x, t);
    const In* rt = row_of<In>(rows.r, t);
    const In* it = row_of<In>(rows.i, t);
    Out* ot = row_of<Out>(o, t);
    const bool is_one = rows.first_is_one && t == 0;
    ForGroups<kGroup>(
        d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
          constexpr int kCount = count;
          V open[kCount], in[kCount], power[kCount], part[kCount], a[kCount], root[kCount];
          V h[kCount], rest[kCount];
          hn::Mask<D> lost[kCount];
          fetch<kCount>(xt + first, rows.x.stride);
          fetch<kCount>(rt + first, rows.r.stride);
          fetch<kCount>(it + first, rows.i.stride);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            open[j] = lanes.Load(d, rt + first + j * kLanes);
            in[j] = lanes.Load(d, it + first + j * kLanes);
          }
          Gates<kCount>(d, lanes, rows.rate + first, is_one, open, in, lost, power, part, a, root);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            in[j] = hn::Mul(root[j], hn::Mul(in[j], lanes.Load(d, xt + i)));
            h[j] = lanes.Load(d, high + i);
            rest[j] = lanes.Load(d, low + i);
          }
          decay_sums<kCount>(d, h, rest, lost, power, part, in);
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
}

void RgLruForward(const TokenRange& range, const RgLruRows& rows, TokenRows<void> o, float* high,
                  float* low) {
  for_types(range, [&](auto in, auto out) {
    Forward<decltype(in), decltype(out)>(range, rows, o, high, low);
  });
}

template <class In, class Out>
void Backward(const TokenRange& range, const RgLruRows& rows, TokenRows<const float> h,
              const float* h0, TokenRows<const void> d_o, const RgLruGradRows& grads, float* high,
              float* low) {
  const D d;
  const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  for (int64_t t = range.tokens; t-- > 0;) {
    check_cancelled_at(t);
    const float* before = t > 0 ? h.data + (t - 1) * h.stride : h0;
    const bool is_one = rows.first_is_one && t == 0;
    ForGroups<kGroup>(
        d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
          constexpr int kCount = count;
          V open[kCount], in[kCount], power[kCount], part[kCount], a[kCount], root[kCount];
          V dh[kCount], rest[kCount], zeros[kCount];
          hn::Mask<D> lost[kCount];
          for (const TokenRows<const void>& list : {rows.x, rows.r, rows.i, d_o}) {
            fetch<kCount>(row_of<In>(list, t) + first, -list.stride);
          }
          fetch<kCount>(h.data + t * h.stride + first, -h.stride);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            open[j] = lanes.Load(d, row_of<In>(rows.r, t) + first + j * kLanes);
            in[j] = lanes.Load(d, row_of<In>(rows.i, t) + first + j * kLanes);
          }
          Gates<kCount>(d, lanes, rows.rate + first, is_one, open, in, lost, power, part, a, root);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            dh[j] = lanes.Load(d, high + i);
            rest[j] = hn::Add(lanes.Load(d, row_of<In>(d_o, t) + i), lanes.Load(d, low + i));
            zeros[j] = zero;
          }
          round_sums<kCount>(d, dh, rest);
          V dx[kCount], dr[kCount], di[kCount];
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            const V x = lanes.Load(d, row_of<In>(rows.x, t) + i);
            const V through = hn::Mul(dh[j], root[j]), input = hn::Mul(in[j], x);
            dx[j] = hn::Mul(through, in[j]);
            di[j] = hn::Mul(hn::Mul(through, input), hn::Sub(one, in[j]));
            // d root / d L = -a^2 / root; no slope where a is 1 and the root 0.
            const V slope =
                is_one ? zero
                       : hn::IfThenZeroElse(hn::Eq(root[j], zero),
                                            hn::Div(hn::Mul(a[j], a[j]), hn::Neg(root[j])));
            // L = -rate open.
            const V decayed = hn::MulAdd(a[j], lanes.Load(d, before + i), hn::Mul(slope, input));
            const V d_rate = hn::Neg(hn::Mul(hn::Mul(dh[j], decayed), open[j]));
            accumulate(d, lanes, d_rate, grads.rate_high, grads.rate_low, i);
            dr[j] = hn::Mul(hn::Mul(d_rate, lanes.Load(d, rows.rate + i)), hn::Sub(one, open[j]));
          }
          const auto put = [&](const TokenRows<void>& list, const V(&values)[kCount]) HWY_ATTR {
            if (list.data == nullptr) return;
            lanes.Output(values, d, row_of<Out>(list, t) + first, range.stream);
          };
          put(grads.x, dx);
          put(grads.r, dr);
          put(grads.i, di);
          decay_sums<kCount>(d, dh, rest, lost, power, part, zeros);
          round_sums<kCount>(d, dh, rest);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            lanes.Store(dh[j], d, high + first + j * kLanes);
            lanes.Store(rest[j], d, low + first + j * kLanes);
          }
        });
  }
  if (range.stream) hwy::FlushStream();
}

void RgLruBackward(const TokenRange& range, const RgLruRows& rows, TokenRows<const float> h,
                   const float* h0, TokenRows<const void> d_o, const RgLruGradRows& grads,
                   float* high, float* low) {
  for_types(range, [&](auto in, auto out) {
    Backward<decltype(in), decltype(out)>(range, rows, h, h0, d_o, grads, high, low);
  });
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(RgLruForward);
HWY_EXPORT(RgLruBackward);

void rg_lru_forward(Isa isa, const TokenRange& range, const RgLruRows& rows, TokenRows<void> o,
                    float* high, float* low) {
  OUZEL_DISPATCH(isa, RgLruForward)(range, rows, o, high, low);
}
void rg_lru_backward(Isa isa, const TokenRange& range, const RgLruRows& rows,
                     TokenRows<const float> h, const float* h0, TokenRows<const void> d_o,
                     const RgLruGradRows& grads, float* high, float* low) {
  OUZEL_DISPATCH(isa, RgLruBackward)(range, rows, h, h0, d_o, grads, high, low);
}

}  // namespace ouzel
#endif
