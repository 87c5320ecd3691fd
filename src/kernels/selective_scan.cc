// Forward: for each token what its channels have in common for all columns of the state, then
// vector by vector the columns, so that B and C are broadcasts out of memory. Backward: of few
// tokens at a time and one vector of channels the states and decays are recomputed and stay in the
// first-level cache; the exponentials of the way back are those of the way there.
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

constexpr int64_t kLanes = HWY_LANES(float);
constexpr int kColumns = 4;  // of the state, side by side

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), and its slope, the sigmoid.
template <int kCount>
HWY_INLINE void Softplus(D d, V* x, V* slope) {
  constexpr float kP[] = {-3.006580099e-02f, 7.920455188e-02f, -1.375380307e-01f, 1.915365607e-01f,
                          -2.485716343e-01f, 3.332132399e-01f, -4.999964833e-01f};
  const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  V u[kCount], power[kCount], part[kCount], p[kCount];
  hn::Mask<D> lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) u[j] = hn::Neg(hn::Abs(x[j]));
  decay_parts<kCount>(d, u, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    u[j] = decay_factor(d, lost[j], power[j], part[j]);
    p[j] = hn::Set(d, 5.364826415e-03f);
  }
  // log(1 + u) = u + u^2 P(u) for u in [0, 1], relative error 3e-8.
  OUZEL_UNROLL
  for (const float coefficient : kP) {
    OUZEL_UNROLL
    for (int j = 0; j < kCount; ++j) p[j] = hn::MulAdd(p[j], u[j], hn::Set(d, coefficient));
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V inverse = hn::Div(one, hn::Add(one, u[j]));
    slope[j] = hn::IfThenElse(hn::Lt(x[j], zero), hn::Mul(u[j], inverse), inverse);
    p[j] = hn::MulAdd(hn::Mul(u[j], u[j]), p[j], u[j]);
    x[j] = hn::Add(math::at_least(d, zero, x[j]), p[j]);
  }
}

// dt before the softplus.
template <class Lanes>
HWY_INLINE V Given(D d, Lanes lanes, const SelectiveRows& rows, int64_t t, int64_t i) {
  const V dt = lanes.Load(d, rows.dt.data + t * rows.dt.stride + i);
  return rows.dt_bias == nullptr ? dt : hn::Add(dt, lanes.Load(d, rows.dt_bias + i));
}
template <class Lanes>
HWY_INLINE V Skip(D d, Lanes lanes, const SelectiveRows& rows, V x, int64_t i) {
  return rows.skip == nullptr ? hn::Zero(d) : hn::Mul(lanes.Load(d, rows.skip + i), x);
}

// kCount columns of the state from `at` on; y is added to.
template <int kCount, class Lanes>
HWY_INLINE void ForwardColumns(D d, Lanes lanes, int64_t channels, V step, V input, const float* a,
                               const float* b, const float* c, float* high, float* low, V& top,
                               V& y) {
  V gate[kCount], power[kCount], part[kCount], h[kCount], rest[kCount], x[kCount];
  hn::Mask<D> lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    gate[j] = hn::Mul(step, lanes.Load(d, a + j * channels));
    top = math::at_least(d, gate[j], top);
    gate[j] = math::at_most(d, hn::Zero(d), gate[j]);
  }
  decay_parts<kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    h[j] = lanes.Load(d, high + j * channels);
    rest[j] = lanes.Load(d, low + j * channels);
    x[j] = hn::Mul(input, hn::Set(d, b[j]));
  }
  decay_sums<kCount>(d, h, rest, lost, power, part, x);
  round_sums<kCount>(d, h, rest);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    lanes.Store(h[j], d, high + j * channels);
    lanes.Store(rest[j], d, low + j * channels);
    y = hn::MulAdd(hn::Set(d, c[j]), h[j], y);
  }
}

float SelectiveForward(const TokenRange& range, const SelectiveRows& rows, TokenRows<float> o,
                       float* high, float* low, float* work) {
  const D d;
  const int64_t channels = range.channels, width = rows.width;
  float *dt = work, *dtx = work + channels;
  V top = hn::Zero(d);
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t * width);
    const float* x = rows.x.data + t * rows.x.stride;
    const float* b = rows.b.data + t * rows.b.stride;
    const float* c = rows.c.data + t * rows.c.stride;
    ForGroups<4>(d, channels, [&](int64_t i, auto lanes, auto count) HWY_ATTR {
      constexpr int kCount = count;
      V step[kCount], slope[kCount];
      fetch<kCount>(x + i, rows.x.stride);
      fetch<kCount>(rows.dt.data + t * rows.dt.stride + i, rows.dt.stride);
      OUZEL_UNROLL
      for (int j = 0; j < kCount; ++j) step[j] = Given(d, lanes, rows, t, i + j * kLanes);
      if (rows.softplus) Softplus<kCount>(d, step, slope);
      OUZEL_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const int64_t at = i + j * kLanes;
        lanes.Store(step[j], d, dt + at);
        lanes.Store(hn::Mul(step[j], lanes.Load(d, x + at)), d, dtx + at);
      }
    });
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const V step = lanes.Load(d, dt + i), input = lanes.Load(d, dtx + i);
      V y = Skip(d, lanes, rows, lanes.Load(d, x + i), i);
      int64_t n = 0, at = i;
      for (; n + kColumns <= width; n += kColumns, at += kColumns * channels) {
        ForwardColumns<kColumns>(d, lanes, channels, step, input, rows.a + at, b + n, c + n,
                                 high + at, low + at, top, y);
      }
      for (; n < width; ++n, at += channels) {
        ForwardColumns<1>(d, lanes, channels, step, input, rows.a + at, b + n, c + n, high + at,
                          low + at, top, y);
      }
      if (o.data == nullptr) return;
      if (rows.z.data != nullptr) {
        y = hn::Mul(y, math::silu(d, lanes.Load(d, rows.z.data + t * rows.z.stride + i)));
      }
      lanes.Output(y, d, o.data + t * o.stride + i, range.stream);
    });
  }
  if (range.stream) hwy::FlushStream();
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

// A token's columns of the state from those before, and their decays; y is added to.
template <int kCount, class Lanes>
HWY_INLINE void AgainColumns(D d, Lanes lanes, int64_t channels, V step, V input, const float* a,
                             const float* b, const float* c, const float* before, float* after,
                             float* powers, float* parts, V& y) {
  V gate[kCount], power[kCount], part[kCount];
  hn::Mask<D> lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    gate[j] = math::at_most(d, hn::Zero(d), hn::Mul(step, lanes.Load(d, a + j * channels)));
  }
  decay_parts<kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V x = hn::Mul(input, hn::Set(d, b[j])), old = hn::Load(d, before + j * kLanes);
    const V h = hn::MulAdd(hn::MulAdd(old, part[j], old), power[j], x);
    const V now = hn::IfThenElse(lost[j], x, h);
    hn::Store(now, d, after + j * kLanes);
    hn::Store(power[j], d, powers + j * kLanes);
    hn::Store(stored_part(d, lost[j], part[j]), d, parts + j * kLanes);
    y = hn::MulAdd(hn::Set(d, c[j]), now, y);
  }
}

// The gradient dh of a token's columns, high + low, from that of the next token's; g is the
// gradient of y. Added to: db, dc, da; the gradients of dt x in d_input and of the gates in d_step.
template <int kCount, class Lanes>
HWY_INLINE void BackwardColumns(D d, Lanes lanes, int64_t channels, V step, V input, V g,
                                const float* a, const float* b, const float* c, const float* before,
                                const float* after, const float* powers, const float* parts,
                                float* high, float* low, float* db, float* dc, float* da,
                                V& d_input, V& d_step) {
  V dh[kCount], rest[kCount], power[kCount], part[kCount], zeros[kCount];
  hn::Mask<D> lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    zeros[j] = hn::Zero(d);
    dh[j] = lanes.Load(d, high + j * channels);
    rest[j] = hn::MulAdd(hn::Set(d, c[j]), g, lanes.Load(d, low + j * channels));
  }
  round_sums<kCount>(d, dh, rest);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const int64_t at = j * kLanes;
    hn::Store(hn::MulAdd(g, hn::Load(d, after + at), hn::Load(d, dc + at)), d, dc + at);
    hn::Store(hn::MulAdd(dh[j], input, hn::Load(d, db + at)), d, db + at);
    d_input = hn::MulAdd(dh[j], hn::Set(d, b[j]), d_input);
    power[j] = hn::Load(d, powers + at);
    part[j] = hn::Load(d, parts + at);
    lost[j] = lost_by(d, part[j]);
    const V decayed =
        hn::Mul(decay_factor(d, lost[j], power[j], part[j]), hn::Load(d, before + at));
    const V d_gate = hn::IfThenZeroElse(lost[j], hn::Mul(dh[j], decayed));
    d_step = hn::MulAdd(d_gate, lanes.Load(d, a + j * channels), d_step);
    hn::Store(hn::MulAdd(d_gate, step, hn::Load(d, da + at)), d, da + at);
  }
  decay_sums<kCount>(d, dh, rest, lost, power, part, zeros);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    lanes.Store(dh[j], d, high + j * channels);
    lanes.Store(rest[j], d, low + j * channels);
  }
}

void SelectiveBackward(const TokenRange& range, const SelectiveRows& rows, const float* start,
                       TokenRows<const float> d_o, const SelectiveGradRows& grads, float* high,
                       float* low, float* work) {
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const int64_t channels = range.channels, width = rows.width;
  const int64_t row = width * kLanes, all = kSelectiveTokens * row;
  // Vectors, of each column: token by token, and sums over tokens; and a token's own.
  float *states = work, *powers = states + all + row, *parts = powers + all;
  float *db = parts + all, *dc = db + all, *da = dc + all;
  float *steps = da + row, *inputs = steps + kSelectiveTokens * kLanes;
  float *slopes = inputs + kSelectiveTokens * kLanes, *dys = slopes + kSelectiveTokens * kLanes;
  for (int64_t i = 0; i < 2 * all; i += kLanes) hn::Store(zero, d, db + i);

  ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
    const float* a = rows.a + i;
    for (int64_t n = 0; n < width; ++n) {
      hwy::Prefetch(start + (n - width) * channels + i);  // what is needed next stands before
      hn::Store(lanes.Load(d, start + n * channels + i), d, states + n * kLanes);
      hn::Store(zero, d, da + n * kLanes);
    }
    const auto make_steps = [&](int64_t t, auto count) HWY_ATTR {
      constexpr int kCount = count;
      V step[kCount], slope[kCount];
      OUZEL_UNROLL
      for (int j = 0; j < kCount; ++j) {
        step[j] = Given(d, lanes, rows, t + j, i);
        slope[j] = one;
      }
      if (rows.softplus) Softplus<kCount>(d, step, slope);
      OUZEL_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const int64_t at = (t + j) * kLanes;
        hn::Store(step[j], d, steps + at);
        hn::Store(slope[j], d, slopes + at);
      }
    };
    int64_t first = 0;
    for (; first + 4 <= range.tokens; first += 4)
      make_steps(first, std::integral_constant<int, 4>());
    for (; first < range.tokens; ++first) make_steps(first, std::integral_constant<int, 1>());

    for (int64_t t = 0; t < range.tokens; ++t) {
      for (const TokenRows<const float>& list : {rows.x, rows.dt, d_o}) {
        hwy::Prefetch(list.data + (t - kSelectiveTokens) * list.stride + i);  // of the next call
      }
      const float* b = rows.b.data + t * rows.b.stride;
      const float* c = rows.c.data + t * rows.c.stride;
      const V step = hn::Load(d, steps + t * kLanes);
      const V x = lanes.Load(d, rows.x.data + t * rows.x.stride + i), input = hn::Mul(step, x);
      V y = Skip(d, lanes, rows, x, i);
      int64_t n = 0, at = t * row;
      for (; n + kColumns <= width; n += kColumns, at += kColumns * kLanes) {
        AgainColumns<kColumns>(d, lanes, channels, step, input, a + n * channels, b + n, c + n,
                               states + at, states + at + row, powers + at, parts + at, y);
      }
      for (; n < width; ++n, at += kLanes) {
        AgainColumns<1>(d, lanes, channels, step, input, a + n * channels, b + n, c + n,
                        states + at, states + at + row, powers + at, parts + at, y);
      }
      V g = lanes.Load(d, d_o.data + t * d_o.stride + i);
      if (rows.z.data != nullptr) {
        const V z = lanes.Load(d, rows.z.data + t * rows.z.stride + i), s = math::sigmoid(d, z);
        if (grads.z.data != nullptr) {
          const V silu_slope = hn::MulAdd(hn::Mul(z, s), hn::Sub(one, s), s);
          lanes.Output(hn::Mul(hn::Mul(g, y), silu_slope), d, grads.z.data + t * grads.z.stride + i,
                       range.stream);
        }
        g = hn::Mul(g, hn::Mul(z, s));
      }
      accumulate(d, lanes, hn::Mul(g, x), grads.skip_high, grads.skip_low, i);
      hn::Store(input, d, inputs + t * kLanes);
      hn::Store(g, d, dys + t * kLanes);
    }
    for (int64_t t = range.tokens; t-- > 0;) {
      const float* b = rows.b.data + t * rows.b.stride;
      const float* c = rows.c.data + t * rows.c.stride;
      const V step = hn::Load(d, steps + t * kLanes), input = hn::Load(d, inputs + t * kLanes);
      const V g = hn::Load(d, dys + t * kLanes);
      V d_input = zero, d_step = zero;
      const auto columns = [&](int64_t n, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
        const int64_t at = t * row + n * kLanes, column = n * channels;
        BackwardColumns<count>(d, lanes, channels, step, input, g, a + column, b + n, c + n,
                               states + at, states + at + row, powers + at, parts + at,
                               high + column + i, low + column + i, db + at, dc + at,
                               da + n * kLanes, d_input, d_step);
      };
      int64_t n = 0;
      for (; n + kColumns <= width; n += kColumns)
        columns(n, std::integral_constant<int, kColumns>());
      for (; n < width; ++n) columns(n, std::integral_constant<int, 1>());

      const V x = lanes.Load(d, rows.x.data + t * rows.x.stride + i);
      d_step = hn::Mul(hn::MulAdd(d_input, x, d_step), hn::Load(d, slopes + t * kLanes));
      accumulate(d, lanes, d_step, grads.bias_high, grads.bias_low, i);
      if (grads.dt.data != nullptr) {
        lanes.Output(d_step, d, grads.dt.data + t * grads.dt.stride + i, range.stream);
      }
      if (grads.x.data != nullptr) {
        lanes.Output(hn::MulAdd(d_input, step, Skip(d, lanes, rows, g, i)), d,
                     grads.x.data + t * grads.x.stride + i, range.stream);
      }
    }
    for (int64_t n = 0; n < width; ++n) {
      const int64_t column = n * channels + i;
      accumulate(d, lanes, zero, high, low, column);
      accumulate(d, lanes, hn::Load(d, da + n * kLanes), grads.a_high, grads.a_low, column);
    }
  });
  const auto sum = [&](const float* of, TokenRows<float> to) HWY_ATTR {
    if (to.data == nullptr) return;
    for (int64_t t = 0; t < range.tokens; ++t) {
      for (int64_t n = 0; n < width; ++n) {
        const V lane_sums = hn::Load(d, of + t * row + n * kLanes);
        to.data[t * to.stride + n] = hn::GetLane(hn::SumOfLanes(d, lane_sums));
      }
    }
  };
  sum(db, grads.b);
  sum(dc, grads.c);
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
                        const float* start, TokenRows<const float> d_o,
                        const SelectiveGradRows& grads, float* high, float* low, float* work) {
  OUZEL_DISPATCH(isa, SelectiveBackward)(range, rows, start, d_o, grads, high, low, work);
}

}  // namespace ouzel
#endif
