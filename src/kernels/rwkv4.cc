// One exponential serves each pair of weights, since the larger of the two is e^0, and both pairs
// of a token: e^(u + k) is e^(u + d) times the new weight of k, where that constant is neither very
// large nor very small. eps is kept in two parts like the sums: near 60 a float's rounding is 4e-6
// a token, and would be in all weights.
#include "src/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rwkv4.cc"
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
// On the way back at most two cache lines (the work space has room for no more), but all of these:
// outputs that are written past the caches row by row cost less in longer runs.
constexpr int kGroupBack = static_cast<int>(HWY_MIN(kGroup, 32 / kLanes));
static_assert(kRwkv4Tokens * kRwkv4History * kGroupBack * kLanes <= kRwkv4Work);

// The weights e^eps of the past and e^(u + k) of the token over the larger of the two; `ahead` is
// eps - k.
template <int kCount>
HWY_INLINE void Weights(D d, const V* ahead, const V* u, V* past, V* now) {
  const V one = hn::Set(d, 1.0f);
  V lead[kCount], gate[kCount], power[kCount], part[kCount];
  hn::Mask<D> lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    lead[j] = hn::Sub(ahead[j], u[j]);
    gate[j] = hn::Neg(hn::Abs(lead[j]));
  }
  decay_parts<kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V smaller = decay_factor(d, lost[j], power[j], part[j]);
    const auto is_ahead = hn::Gt(lead[j], hn::Zero(d));
    past[j] = hn::IfThenElse(is_ahead, one, smaller);
    now[j] = hn::IfThenElse(is_ahead, smaller, one);
  }
}

// A token of kCount vectors: how the state goes on. `holds` is where the new eps is the old one's,
// d + eps, and not k; the sums are decayed by `keep`, in parts, and the token has the weight `add`.
// `past` and `now` are the weights of its output, up to a common factor.
template <int kCount, class Lanes>
HWY_INLINE void Advance(D d, Lanes lanes, const Rwkv4Rows& rows, int64_t first, const V* k,
                        const V* eps, const V* eps_low, hn::Mask<D>* holds, hn::Mask<D>* lost,
                        V* power, V* part, V* keep, V* add, V* past, V* now) {
  const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  V ahead[kCount], gate[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    ahead[j] = hn::Add(hn::Sub(eps[j], k[j]), eps_low[j]);
    const V lead = hn::Add(ahead[j], lanes.Load(d, rows.decay + first + j * kLanes));
    holds[j] = hn::Ge(lead, zero);
    gate[j] = hn::Neg(hn::Abs(lead));
  }
  decay_parts<kCount>(d, gate, lost, power, part);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const V smaller = decay_factor(d, lost[j], power[j], part[j]);
    keep[j] = hn::IfThenElse(holds[j], one, smaller);
    add[j] = hn::IfThenElse(holds[j], smaller, one);
    lost[j] = hn::AndNot(holds[j], lost[j]);
    power[j] = hn::IfThenElse(holds[j], one, power[j]);
    part[j] = hn::IfThenZeroElse(holds[j], part[j]);
    past[j] = keep[j];
  }
  V of[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    of[j] = lanes.Load(d, (rows.now == nullptr ? rows.u : rows.now) + first + j * kLanes);
    now[j] = hn::Mul(add[j], of[j]);
  }
  if (rows.now == nullptr) Weights<kCount>(d, ahead, of, past, now);
}

// eps after the token.
template <int kCount, class Lanes>
HWY_INLINE void AdvanceExponent(D d, Lanes lanes, const Rwkv4Rows& rows, int64_t first, const V* k,
                                const hn::Mask<D>* holds, V* eps, V* eps_low) {
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    eps_low[j] = hn::Add(eps_low[j], lanes.Load(d, rows.decay + first + j * kLanes));
  }
  round_sums<kCount>(d, eps, eps_low);
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    eps[j] = hn::IfThenElse(holds[j], eps[j], k[j]);
    eps_low[j] = hn::IfThenElseZero(holds[j], eps_low[j]);
  }
}

template <class In, class Out>
void Forward(const TokenRange& range, const Rwkv4Rows& rows, TokenRows<void> o,
             const Rwkv4State& s) {
  const D d;
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const In* kt = row_of<In>(rows.k, t);
    const In* vt = row_of<In>(rows.v, t);
    Out* ot = o.data == nullptr ? nullptr : row_of<Out>(o, t);
    ForGroups<kGroup>(
        d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR OUZEL_ALWAYS_INLINE {
          constexpr int kCount = count;
          V k[kCount], v[kCount], eps[kCount], eps_low[kCount], alpha[kCount], alpha_low[kCount];
          V beta[kCount], beta_low[kCount];
          V power[kCount], part[kCount], keep[kCount], add[kCount], past[kCount], now[kCount];
          hn::Mask<D> holds[kCount], lost[kCount];
          fetch<kCount>(kt + first, rows.k.stride);
          fetch<kCount>(vt + first, rows.v.stride);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            k[j] = lanes.Load(d, kt + i);
            eps[j] = lanes.Load(d, s.eps + i);
            eps_low[j] = lanes.Load(d, s.eps_low + i);
          }
          Advance<kCount>(d, lanes, rows, first, k, eps, eps_low, holds, lost, power, part, keep,
                          add, past, now);
          AdvanceExponent<kCount>(d, lanes, rows, first, k, holds, eps, eps_low);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            lanes.Store(eps[j], d, s.eps + i);
            lanes.Store(eps_low[j], d, s.eps_low + i);
            v[j] = lanes.Load(d, vt + i);
            alpha[j] = lanes.Load(d, s.alpha + i);
            beta[j] = lanes.Load(d, s.beta + i);
          }
          if (ot != nullptr) {
            V out[kCount];
            OUZEL_UNROLL
            for (int j = 0; j < kCount; ++j) {
              const V sum = hn::MulAdd(past[j], alpha[j], hn::Mul(now[j], v[j]));
              out[j] = hn::Div(sum, hn::MulAdd(past[j], beta[j], now[j]));
            }
            lanes.Output(out, d, ot + first, range.stream);
          }
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            v[j] = hn::Mul(add[j], v[j]);
            alpha_low[j] = lanes.Load(d, s.alpha_low + first + j * kLanes);
            beta_low[j] = lanes.Load(d, s.beta_low + first + j * kLanes);
          }
          decay_sums<kCount>(d, alpha, alpha_low, lost, power, part, v);
          round_sums<kCount>(d, alpha, alpha_low);
          decay_sums<kCount>(d, beta, beta_low, lost, power, part, add);
          round_sums<kCount>(d, beta, beta_low);
          OUZEL_UNROLL
          for (int j = 0; j < kCount; ++j) {
            const int64_t i = first + j * kLanes;
            lanes.Store(alpha[j], d, s.alpha + i);
            lanes.Store(alpha_low[j], d, s.alpha_low + i);
            lanes.Store(beta[j], d, s.beta + i);
            lanes.Store(beta_low[j], d, s.beta_low + i);
          }
        });
  }
  if (range.stream) hwy::FlushStream();
}

void Rwkv4Forward(const TokenRange& range, const Rwkv4Rows& rows, TokenRows<void> o,
                  const Rwkv4State& s) {
  for_types(range,
            [&](auto in, auto out) { Forward<decltype(in), decltype(out)>(range, rows, o, s); });
}

// What the way back needs of each token: the sums before it, and its weights.
enum History { kAlpha, kBeta, kPower, kPart, kAdd, kPast, kNow, kHistory };
static_assert(kHistory == kRwkv4History);

TokenRows<const float> wide(const TokenRows<const void>& rows) {
  return {static_cast<const float*>(rows.data), rows.stride};
}

// The way there of a group of vectors, `start` the state before it.
template <int kCount, class Lanes>
HWY_INLINE void Recompute(D d, Lanes lanes, const TokenRange& range, const Rwkv4Rows& rows,
                          const TokenRows<const float>& d_o, int64_t first, const Rwkv4State& start,
                          float* history, Ahead& ahead) {
  V eps[kCount], eps_low[kCount], alpha[kCount], beta[kCount], k[kCount], v[kCount];
  V power[kCount], part[kCount], keep[kCount], add[kCount], past[kCount], now[kCount];
  hn::Mask<D> holds[kCount], lost[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const int64_t i = first + j * kLanes;
    eps[j] = lanes.Load(d, start.eps + i);
    eps_low[j] = lanes.Load(d, start.eps_low + i);
    alpha[j] = lanes.Load(d, start.alpha + i);
    beta[j] = lanes.Load(d, start.beta + i);
  }
  for (int64_t t = 0; t < range.tokens; ++t) {
    fetch_ahead({wide(rows.k), wide(rows.v), d_o}, kCount * kLanes, range.channels, ahead);
    OUZEL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const int64_t i = first + j * kLanes;
      k[j] = lanes.Load(d, row_of<float>(rows.k, t) + i);
      v[j] = lanes.Load(d, row_of<float>(rows.v, t) + i);
    }
    Advance<kCount>(d, lanes, rows, first, k, eps, eps_low, holds, lost, power, part, keep, add,
                    past, now);
    AdvanceExponent<kCount>(d, lanes, rows, first, k, holds, eps, eps_low);
    OUZEL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      float* to = history + (t * kCount + j) * kHistory * kLanes;
      const V given = hn::Mul(add[j], v[j]);
      hn::Store(alpha[j], d, to + kAlpha * kLanes);
      hn::Store(beta[j], d, to + kBeta * kLanes);
      hn::Store(power[j], d, to + kPower * kLanes);
      hn::Store(stored_part(d, lost[j], part[j]), d, to + kPart * kLanes);
      // Where eps does not hold the weight is 1, and 2 says so.
      hn::Store(hn::IfThenElse(holds[j], add[j], hn::Set(d, 2.0f)), d, to + kAdd * kLanes);
      hn::Store(past[j], d, to + kPast * kLanes);
      hn::Store(now[j], d, to + kNow * kLanes);
      alpha[j] = hn::IfThenElse(lost[j], given, hn::MulAdd(keep[j], alpha[j], given));
      beta[j] = hn::IfThenElse(lost[j], add[j], hn::MulAdd(keep[j], beta[j], add[j]));
    }
  }
}

template <int kCount, class Lanes>
HWY_INLINE void Return(D d, Lanes lanes, const TokenRange& range, const Rwkv4Rows& rows,
                       const TokenRows<const float>& d_o, int64_t first, const float* history,
                       const Rwkv4GradRows& grads, const Rwkv4State& s) {
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  V d_alpha[kCount], alpha_low[kCount], d_beta[kCount], beta_low[kCount], d_eps[kCount];
  V eps_low[kCount], d_decay[kCount], d_u[kCount];
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const int64_t i = first + j * kLanes;
    d_alpha[j] = lanes.Load(d, s.alpha + i);
    alpha_low[j] = lanes.Load(d, s.alpha_low + i);
    d_beta[j] = lanes.Load(d, s.beta + i);
    beta_low[j] = lanes.Load(d, s.beta_low + i);
    d_eps[j] = lanes.Load(d, s.eps + i);
    eps_low[j] = lanes.Load(d, s.eps_low + i);
    d_decay[j] = d_u[j] = zero;
  }
  for (int64_t t = range.tokens; t-- > 0;) {
    V power[kCount], part[kCount], to_alpha[kCount], to_beta[kCount], dk[kCount], dv[kCount];
    hn::Mask<D> lost[kCount];
    OUZEL_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const int64_t i = first + j * kLanes;
      const float* from = history + (t * kCount + j) * kHistory * kLanes;
      const V alpha = hn::Load(d, from + kAlpha * kLanes);
      const V beta = hn::Load(d, from + kBeta * kLanes);
      const V past = hn::Load(d, from + kPast * kLanes), now = hn::Load(d, from + kNow * kLanes);
      const V v = lanes.Load(d, row_of<float>(rows.v, t) + i);
      power[j] = hn::Load(d, from + kPower * kLanes);
      part[j] = hn::Load(d, from + kPart * kLanes);
      lost[j] = lost_by(d, part[j]);
      V add = hn::Load(d, from + kAdd * kLanes);
      const auto holds = hn::Le(add, one);
      add = hn::Min(add, one);

      // The state after the token, from that before it. Its eps is d + eps, and k pushes the new
      // token's weight; or it is k, and d + eps the sums'.
      const V d_add = hn::Mul(add, hn::MulAdd(v, d_alpha[j], d_beta[j]));
      const V d_keep = hn::Mul(decay_factor(d, lost[j], power[j], part[j]),
                               hn::MulAdd(alpha, d_alpha[j], hn::Mul(beta, d_beta[j])));
      dk[j] = hn::IfThenElse(holds, d_add, hn::Sub(d_eps[j], d_keep));
      d_eps[j] = hn::IfThenElse(holds, d_eps[j], d_keep);
      const V pushed = hn::IfThenElseZero(holds, d_add);
      d_decay[j] = hn::Add(d_decay[j], hn::Sub(d_eps[j], pushed));

      // The output.
      const V inverse = hn::Div(one, hn::MulAdd(past, beta, now));
      const V out = hn::Mul(hn::MulAdd(past, alpha, hn::Mul(now, v)), inverse);
      const V scaled = hn::Mul(lanes.Load(d, d_o.data + t * d_o.stride + i), inverse);
      const V from_past = hn::Mul(scaled, past), from_now = hn::Mul(scaled, now);
      // v - out is past times this, and alpha - beta out less than 0 by now times this.
      const V apart = hn::Mul(hn::MulSub(beta, v, alpha), inverse);
      const V d_now = hn::Mul(hn::Mul(from_now, past), apart);
      dk[j] = hn::Add(dk[j], d_now);
      dv[j] = hn::MulAdd(add, d_alpha[j], from_now);
      d_u[j] = hn::Add(d_u[j], d_now);
      to_alpha[j] = from_past;
      to_beta[j] = hn::Neg(hn::Mul(from_past, out));
      eps_low[j] = hn::Sub(hn::IfThenElseZero(holds, eps_low[j]), hn::Add(pushed, d_now));
    }
    if (grads.k.data != nullptr) {
      lanes.Output(dk, d, grads.k.data + t * grads.k.stride + first, range.stream);
    }
    if (grads.v.data != nullptr) {
      lanes.Output(dv, d, grads.v.data + t * grads.v.stride + first, range.stream);
    }
    decay_sums<kCount>(d, d_alpha, alpha_low, lost, power, part, to_alpha);
    decay_sums<kCount>(d, d_beta, beta_low, lost, power, part, to_beta);
    round_sums<kCount>(d, d_alpha, alpha_low);
    round_sums<kCount>(d, d_beta, beta_low);
    round_sums<kCount>(d, d_eps, eps_low);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kCount; ++j) {
    const int64_t i = first + j * kLanes;
    lanes.Store(d_alpha[j], d, s.alpha + i);
    lanes.Store(alpha_low[j], d, s.alpha_low + i);
    lanes.Store(d_beta[j], d, s.beta + i);
    lanes.Store(beta_low[j], d, s.beta_low + i);
    lanes.Store(d_eps[j], d, s.eps + i);
    lanes.Store(eps_low[j], d, s.eps_low + i);
    accumulate(d, lanes, d_decay[j], grads.decay_high, grads.decay_low, i);
    accumulate(d, lanes, d_u[j], grads.u_high, grads.u_low, i);
  }
}

void Rwkv4Backward(const TokenRange& range, const Rwkv4Rows& rows, const Rwkv4State& start,
                   TokenRows<const float> d_o, const Rwkv4GradRows& grads, const Rwkv4State& s,
                   float* history) {
  const D d;
  Ahead ahead{-kRwkv4Tokens, 0};
  ForGroups<kGroupBack>(d, range.channels, [&](int64_t first, auto lanes, auto count) HWY_ATTR {
    Recompute<count>(d, lanes, range, rows, d_o, first, start, history, ahead);
    Return<count>(d, lanes, range, rows, d_o, first, history, grads, s);
  });
  if (range.stream) hwy::FlushStream();
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Rwkv4Forward);
HWY_EXPORT(Rwkv4Backward);

void rwkv4_forward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows, TokenRows<void> o,
                   const Rwkv4State& state) {
  OUZEL_DISPATCH(isa, Rwkv4Forward)(range, rows, o, state);
}
void rwkv4_backward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows,
                    const Rwkv4State& start, TokenRows<const float> d_o, const Rwkv4GradRows& grads,
                    const Rwkv4State& state, float* work) {
  OUZEL_DISPATCH(isa, Rwkv4Backward)(range, rows, start, d_o, grads, state, work);
}

}  // namespace ouzel
#endif
