// One exponential serves each pair of weights, since the larger of the two is e^0. eps is kept in
// two parts like the sums: near 60 a float's rounding is 4e-6 a token, and would be in all weights.
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

// The weights e^eps of the past and e^(u + k) of the token over the larger of the two; `ahead` is
// eps - k.
HWY_INLINE void Weights(D d, V ahead, V u, V& past, V& now) {
  const V one = hn::Set(d, 1.0f);
  const V lead = hn::Sub(ahead, u);
  const auto is_ahead = hn::Gt(lead, hn::Zero(d));
  const V smaller = math::exp(d, hn::IfThenElse(is_ahead, hn::Neg(lead), lead));
  past = hn::IfThenElse(is_ahead, one, smaller);
  now = hn::IfThenElse(is_ahead, smaller, one);
}

// How the state goes on where eps is `ahead` of k: the factor of the sums, its difference to 1, and
// the weight of the new token. Returns where the new eps is the old one's, d + eps, and not k.
HWY_INLINE hn::Mask<D> Advance(D d, V ahead, V decay, V& keep, V& minus_1, V& add) {
  const V one = hn::Set(d, 1.0f);
  const V lead = hn::Add(ahead, decay);
  const auto holds = hn::Ge(lead, hn::Zero(d));
  V e, change;
  decay_factors(d, hn::IfThenElse(holds, hn::Neg(lead), lead), e, change);
  keep = hn::IfThenElse(holds, one, e);
  minus_1 = hn::IfThenZeroElse(holds, change);
  add = hn::IfThenElse(holds, e, one);
  return holds;
}

void Rwkv4Forward(const TokenRange& range, const Rwkv4Rows& rows, TokenRows<float> o,
                  const Rwkv4State& s, float* before) {
  const D d;
  for (int64_t t = 0; t < range.tokens; ++t) {
    check_cancelled_at(t);
    const float* kt = rows.k.data + t * rows.k.stride;
    const float* vt = rows.v.data + t * rows.v.stride;
    float* ot = o.data == nullptr ? nullptr : o.data + t * o.stride;
    ForVectors(d, range.channels, [&](int64_t i, auto lanes) HWY_ATTR {
      fetch(kt + i, rows.k.stride);
      fetch(vt + i, rows.v.stride);
      const V k = lanes.Load(d, kt + i), v = lanes.Load(d, vt + i);
      V eps = lanes.Load(d, s.eps + i), eps_low = lanes.Load(d, s.eps_low + i);
      const V ahead = hn::Add(hn::Sub(eps, k), eps_low), decay = lanes.Load(d, rows.decay + i);
      V alpha = lanes.Load(d, s.alpha + i), alpha_low = lanes.Load(d, s.alpha_low + i);
      V beta = lanes.Load(d, s.beta + i), beta_low = lanes.Load(d, s.beta_low + i);
      if (before != nullptr) {
        const V parts[] = {alpha, beta, eps, alpha_low, beta_low, eps_low};
        float* to = before + kRwkv4Parts * t * range.channels + i;
        HWY_UNROLL(6)
        for (int part = 0; part < kRwkv4Parts; ++part) {
          lanes.Store(parts[part], d, to + part * range.channels);
        }
      }
      if (ot != nullptr) {
        V past, now;
        Weights(d, ahead, lanes.Load(d, rows.u + i), past, now);
        const V out =
            hn::Div(hn::MulAdd(past, alpha, hn::Mul(now, v)), hn::MulAdd(past, beta, now));
        lanes.Output(out, d, ot + i, range.stream);
      }
      V keep, minus_1, add;
      const auto holds = Advance(d, ahead, decay, keep, minus_1, add);
      add_to_sum(d, decay, eps, eps_low);
      alpha = two_part_sum(d, alpha, alpha_low, keep, minus_1, hn::Mul(add, v));
      beta = two_part_sum(d, beta, beta_low, keep, minus_1, add);
      lanes.Store(alpha, d, s.alpha + i);
      lanes.Store(alpha_low, d, s.alpha_low + i);
      lanes.Store(beta, d, s.beta + i);
      lanes.Store(beta_low, d, s.beta_low + i);
      lanes.Store(hn::IfThenElse(holds, eps, k), d, s.eps + i);
      lanes.Store(hn::IfThenElseZero(holds, eps_low), d, s.eps_low + i);
    });
  }
  if (range.stream) hwy::FlushStream();
}

void Rwkv4Backward(const TokenRange& range, const Rwkv4Rows& rows, const float* before,
                   TokenRows<const float> d_o, const Rwkv4GradRows& grads, const Rwkv4State& s) {
  const D d;
  const int64_t channels = range.channels;
  for (int64_t t = range.tokens; t-- > 0;) {
    const float* old = before + kRwkv4Parts * t * channels;
    ForVectors(d, channels, [&](int64_t i, auto lanes) HWY_ATTR {
      const auto token = [&](const auto& list) HWY_ATTR { return list.data + t * list.stride + i; };
      const V k = lanes.Load(d, token(rows.k)), v = lanes.Load(d, token(rows.v));
      const V alpha = lanes.Load(d, old + i), beta = lanes.Load(d, old + channels + i);
      const V eps = lanes.Load(d, old + 2 * channels + i);
      const V eps_low = lanes.Load(d, old + 5 * channels + i);
      const V ahead = hn::Add(hn::Sub(eps, k), eps_low);
      V d_alpha = lanes.Load(d, s.alpha + i), alpha_low = lanes.Load(d, s.alpha_low + i);
      V d_beta = lanes.Load(d, s.beta + i), beta_low = lanes.Load(d, s.beta_low + i);
      V d_eps = lanes.Load(d, s.eps + i), rest = lanes.Load(d, s.eps_low + i);

      // The state after the token, from that before it. Its eps is d + eps, and k pushes the new
      // token's weight; or it is k, and d + eps the sums'.
      V keep, minus_1, add;
      const auto holds = Advance(d, ahead, lanes.Load(d, rows.decay + i), keep, minus_1, add);
      const V d_add = hn::Mul(add, hn::MulAdd(v, d_alpha, d_beta));
      const V d_keep = hn::Mul(keep, hn::MulAdd(alpha, d_alpha, hn::Mul(beta, d_beta)));
      V dv = hn::Mul(add, d_alpha);
      V dk = hn::IfThenElse(holds, d_add, hn::Sub(d_eps, d_keep));
      rest = hn::IfThenElseZero(holds, rest);
      d_eps = hn::IfThenElse(holds, d_eps, d_keep);
      add_to_sum(d, hn::IfThenElseZero(holds, hn::Neg(d_add)), d_eps, rest);
      accumulate(d, lanes, d_eps, grads.decay_high, grads.decay_low, i);
      d_alpha = two_part_sum(d, d_alpha, alpha_low, keep, minus_1, hn::Zero(d));
      d_beta = two_part_sum(d, d_beta, beta_low, keep, minus_1, hn::Zero(d));

      // The output.
      V past, now;
      Weights(d, ahead, lanes.Load(d, rows.u + i), past, now);
      const V denominator = hn::MulAdd(past, beta, now);
      const V out = hn::Div(hn::MulAdd(past, alpha, hn::Mul(now, v)), denominator);
      const V scaled = hn::Div(lanes.Load(d, token(d_o)), denominator);
      const V from_past = hn::Mul(scaled, past), from_now = hn::Mul(scaled, now);
      dv = hn::Add(dv, from_now);
      const V d_now = hn::Mul(from_now, hn::Sub(v, out));
      dk = hn::Add(dk, d_now);
      accumulate(d, lanes, d_now, grads.u_high, grads.u_low, i);
      add_to_sum(d, from_past, d_alpha, alpha_low);
      add_to_sum(d, hn::Neg(hn::Mul(from_past, out)), d_beta, beta_low);
      add_to_sum(d, hn::Mul(from_past, hn::NegMulAdd(beta, out, alpha)), d_eps, rest);

      if (grads.k.data != nullptr) lanes.Output(dk, d, token(grads.k), range.stream);
      if (grads.v.data != nullptr) lanes.Output(dv, d, token(grads.v), range.stream);
      lanes.Store(d_alpha, d, s.alpha + i);
      lanes.Store(alpha_low, d, s.alpha_low + i);
      lanes.Store(d_beta, d, s.beta + i);
      lanes.Store(beta_low, d, s.beta_low + i);
      lanes.Store(d_eps, d, s.eps + i);
      lanes.Store(rest, d, s.eps_low + i);
    });
  }
  if (range.stream) hwy::FlushStream();
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Rwkv4Forward);
HWY_EXPORT(Rwkv4Backward);

void rwkv4_forward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows, TokenRows<float> o,
                   const Rwkv4State& state, float* before) {
  OUZEL_DISPATCH(isa, Rwkv4Forward)(range, rows, o, state, before);
}
void rwkv4_backward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows, const float* before,
                    TokenRows<const float> d_o, const Rwkv4GradRows& grads,
                    const Rwkv4State& state) {
  OUZEL_DISPATCH(isa, Rwkv4Backward)(range, rows, before, d_o, grads, state);
}

}  // namespace ouzel
#endif
