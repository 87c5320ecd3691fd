// For each token: what its channels have in common for all columns of the state, then column by
// column over the channels, so that B and C are one broadcast a column and their gradients one sum.
#include "src/kernels/selective_scan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/selective_scan.cc"
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

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|); log1p(u) = log(w) u / (w - 1) with w = 1 + u rounded.
HWY_INLINE V Softplus(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V u = math::exp(d, hn::Neg(hn::Abs(x)));
  const V w = hn::Add(one, u);
  const V change = hn::Sub(w, one);
  const V log1p =
      hn::IfThenElse(hn::Eq(change, hn::Zero(d)), u, hn::Mul(math::log(d, w), hn::Div(u, change)));
  return hn::Add(math::at_least(d, hn::Zero(d), x), log1p);
}

// dt before the softplus.
template <class Lanes>
HWY_INLINE V Step(D d, Lanes lanes, const SelectiveRows& rows, int64_t t, int64_t i) {
  const V dt = lanes.Load(d, rows.dt.data + t * rows.dt.stride + i);
  return rows.dt_bias == nullptr ? dt : hn::Add(dt, lanes.Load(d, rows.dt_bias + i));
}
template <class Lanes>
HWY_INLINE V Skip(D d, Lanes lanes, const SelectiveRows& rows, V x, int64_t i) {
  return rows.skip == nullptr ? hn::Zero(d) : hn::Mul(lanes.Load(d, rows.skip + i), x);
}

float SelectiveForward(const TokenRange& range, const SelectiveRows& rows, TokenRows<float> o,
                       float* high, float* low, float* work) {
  const D d;
  const int64_t channels = range.channels;
  float *dt = work, *dtx = work + channels, *y = work + 2 * channels;
  V top = hn::Zero(d);
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t * rows.width);
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const V x = lanes.Load(d, rows.x.data + t * rows.x.stride + i);
      V step = Step(d, lanes, rows, t, i);
      if (rows.softplus) step = Softplus(d, step);
      lanes.Store(step, d, dt + i);
      lanes.Store(hn::Mul(step, x), d, dtx + i);
      lanes.Store(Skip(d, lanes, rows, x, i), d, y + i);
    });
    for (int64_t n = 0; n < rows.width; ++n) {
      const V b = hn::Set(d, rows.b.data[t * rows.b.stride + n]);
      const V c = hn::Set(d, rows.c.data[t * rows.c.stride + n]);
      const float* a = rows.a + n * channels;
      ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
        const V given = hn::Mul(lanes.Load(d, dt + i), lanes.Load(d, a + i));
        top = hn::IfThenElse(hn::Gt(given, top), given, top);
        const V gate = math::at_most(d, hn::Zero(d), given);
        V h = lanes.Load(d, high + n * channels + i), rest = lanes.Load(d, low + n * channels + i);
        V factor, minus_1;
        decay_factors(d, gate, factor, minus_1);
        h = two_part_sum(d, h, rest, factor, minus_1, hn::Mul(lanes.Load(d, dtx + i), b));
        lanes.Store(h, d, high + n * channels + i);
        lanes.Store(rest, d, low + n * channels + i);
        lanes.Store(hn::MulAdd(c, h, lanes.Load(d, y + i)), d, y + i);
      });
    }
    if (o.data == nullptr) continue;
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      V out = lanes.Load(d, y + i);
      if (rows.z.data != nullptr) {
        out = hn::Mul(out, math::silu(d, lanes.Load(d, rows.z.data + t * rows.z.stride + i)));
      }
      lanes.Output(out, d, o.data + t * o.stride + i, range.stream);
    });
  }
  if (range.stream) hwy::FlushStream();
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

void SelectiveBackward(const TokenRange& range, const SelectiveRows& rows, const float* states,
                       TokenRows<const float> d_o, const SelectiveGradRows& grads, float* high,
                       float* low, float* work) {
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const V reset = hn::Set(d, -std::numeric_limits<float>::infinity());
  const int64_t channels = range.channels, size = rows.width * channels;
  float *dt = work, *slope = dt + channels, *dy = slope + channels;
  float *y = dy + channels, *ddt = y + channels, *dx = ddt + channels;
  for (int64_t t = range.tokens; t-- > 0;) {
    const float *before = states + t * size, *after = before + size;
    const float *x = rows.x.data + t * rows.x.stride, *z = nullptr;
    if (rows.z.data != nullptr) {
      z = rows.z.data + t * rows.z.stride;
      ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
        lanes.Store(Skip(d, lanes, rows, lanes.Load(d, x + i), i), d, y + i);
      });
      for (int64_t n = 0; n < rows.width; ++n) {
        const V c = hn::Set(d, rows.c.data[t * rows.c.stride + n]);
        ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
          const V h = lanes.Load(d, after + n * channels + i);
          lanes.Store(hn::MulAdd(c, h, lanes.Load(d, y + i)), d, y + i);
        });
      }
    }
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const V xt = lanes.Load(d, x + i);
      const V step = Step(d, lanes, rows, t, i);
      lanes.Store(rows.softplus ? Softplus(d, step) : step, d, dt + i);
      lanes.Store(rows.softplus ? math::sigmoid(d, step) : one, d, slope + i);
      V g = lanes.Load(d, d_o.data + t * d_o.stride + i);
      if (z != nullptr) {
        const V zt = lanes.Load(d, z + i), s = math::sigmoid(d, zt);
        if (grads.z.data != nullptr) {
          const V silu_slope = hn::MulAdd(hn::Mul(zt, s), hn::Sub(one, s), s);
          lanes.Output(hn::Mul(hn::Mul(g, lanes.Load(d, y + i)), silu_slope), d,
                       grads.z.data + t * grads.z.stride + i, range.stream);
        }
        g = hn::Mul(g, hn::Mul(zt, s));
      }
      lanes.Store(g, d, dy + i);
      lanes.Store(zero, d, ddt + i);
      lanes.Store(Skip(d, lanes, rows, g, i), d, dx + i);
      accumulate(d, lanes, hn::Mul(g, xt), grads.skip_high, grads.skip_low, i);
    });
    for (int64_t n = 0; n < rows.width; ++n) {
      const V b = hn::Set(d, rows.b.data[t * rows.b.stride + n]);
      const V c = hn::Set(d, rows.c.data[t * rows.c.stride + n]);
      const int64_t column = n * channels;
      V db = zero, dc = zero;
      ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
        const V xt = lanes.Load(d, x + i), step = lanes.Load(d, dt + i);
        const V a = lanes.Load(d, rows.a + column + i), g = lanes.Load(d, dy + i);
        V dh = lanes.Load(d, high + column + i), rest = lanes.Load(d, low + column + i);
        add_to_sum(d, hn::Mul(c, g), dh, rest);
        dc = hn::MulAdd(g, lanes.Load(d, after + column + i), dc);
        db = hn::MulAdd(hn::Mul(dh, step), xt, db);

        const V gate = math::at_most(d, zero, hn::Mul(step, a));
        V factor, minus_1;
        decay_factors(d, gate, factor, minus_1);
        const V product = hn::Mul(hn::Mul(dh, factor), lanes.Load(d, before + column + i));
        const V d_gate = hn::IfThenZeroElse(hn::Eq(gate, reset), product);
        const V dhb = hn::Mul(dh, b);
        const V d_step = hn::MulAdd(d_gate, a, hn::Mul(dhb, xt));
        lanes.Store(hn::Add(lanes.Load(d, ddt + i), d_step), d, ddt + i);
        lanes.Store(hn::MulAdd(dhb, step, lanes.Load(d, dx + i)), d, dx + i);
        accumulate(d, lanes, hn::Mul(d_gate, step), grads.a_high, grads.a_low, column + i);
        dh = two_part_sum(d, dh, rest, factor, minus_1, hn::Zero(d));
        lanes.Store(dh, d, high + column + i);
        lanes.Store(rest, d, low + column + i);
      });
      if (grads.b.data != nullptr) {
        grads.b.data[t * grads.b.stride + n] = hn::GetLane(hn::SumOfLanes(d, db));
      }
      if (grads.c.data != nullptr) {
        grads.c.data[t * grads.c.stride + n] = hn::GetLane(hn::SumOfLanes(d, dc));
      }
    }
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const V d_step = hn::Mul(lanes.Load(d, ddt + i), lanes.Load(d, slope + i));
      accumulate(d, lanes, d_step, grads.bias_high, grads.bias_low, i);
      if (grads.dt.data != nullptr) {
        lanes.Output(d_step, d, grads.dt.data + t * grads.dt.stride + i, range.stream);
      }
      if (grads.x.data != nullptr) {
        lanes.Output(lanes.Load(d, dx + i), d, grads.x.data + t * grads.x.stride + i, range.stream);
      }
    });
  }
  if (range.stream) hwy::FlushStream();
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(SelectiveForward);
HWY_EXPORT(SelectiveBackward);

float selective_forward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        TokenRows<float> o, float* high, float* low, float* work) {
  return OUZEL_DISPATCH(isa, SelectiveForward)(range, rows, o, high, low, work);
}
void selective_backward(Isa isa, const TokenRange& range, const SelectiveRows& rows,
                        const float* states, TokenRows<const float> d_o,
                        const SelectiveGradRows& grads, float* high, float* low, float* work) {
  OUZEL_DISPATCH(isa, SelectiveBackward)(range, rows, states, d_o, grads, high, low, work);
}

}  // namespace ouzel
#endif
