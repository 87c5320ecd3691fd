#include "src/ops/reference/scans.h"

namespace ouzel::reference {

Tensors<Var> hgrn(const Tensors<Var>& in, const Setting& setting) {
  const Vars &x = find(in, "x"), &g = find(in, "g"), &h0 = find(in, "initial_state");
  const Int channels = x.extent(2), sequences = setting.segments.count();
  Vars o(x.shape), final_state({sequences, channels});
  for (Int n = 0; n < sequences; ++n) {
    const Segment& s = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int c = 0; c < channels; ++c) {
      Var h = h0.present() ? h0(n, c) : Var(0);
      for (Int t = s.begin; t < s.begin + s.length; ++t) {
        h = exp(g(s.batch, t, c)) * h + x(s.batch, t, c);
        o(s.batch, t, c) = h;
      }
      final_state(n, c) = h;
    }
  }
  return {{"o", o}, {"final_state", final_state}};
}

Tensors<Var> rg_lru(const Tensors<Var>& in, const Setting& setting) {
  const Vars &x = find(in, "x"), &r = find(in, "r"), &i = find(in, "i");
  const Vars &a = find(in, "a_param"), &h0 = find(in, "initial_state");
  const Int channels = x.extent(2), sequences = setting.segments.count();
  Vars o(x.shape), final_state({sequences, channels});
  for (Int n = 0; n < sequences; ++n) {
    const Segment& s = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int c = 0; c < channels; ++c) {
      Var h = h0.present() ? h0(n, c) : Var(0);
      for (Int t = s.begin; t < s.begin + s.length; ++t) {
        const Var log_a =
            Var(-setting.numbers.at("c")) * softplus(a(c)) * sigmoid(r(s.batch, t, c));
        const bool one = flag(setting, "first_multiplier_one") && t == s.begin;
        const Var root = one ? Var(1) : sqrt(-expm1(Var(2) * log_a));
        h = exp(log_a) * h + root * sigmoid(i(s.batch, t, c)) * x(s.batch, t, c);
        o(s.batch, t, c) = h;
      }
      final_state(n, c) = h;
    }
  }
  return {{"o", o}, {"final_state", final_state}};
}

Tensors<Var> rwkv4(const Tensors<Var>& in, const Setting& setting) {
  const Vars &k = find(in, "k"), &v = find(in, "v"), &w = find(in, "w"), &u = find(in, "u");
  const Vars& s0 = find(in, "initial_state");
  const Int channels = k.extent(2), sequences = setting.segments.count();
  Vars o(k.shape), final_state({sequences, 3, 1, channels});
  for (Int n = 0; n < sequences; ++n) {
    const Segment& s = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int c = 0; c < channels; ++c) {
      Var alpha = 0, beta = 0, eps = -1e38;
      if (s0.present()) {
        alpha = s0(n, 0, 0, c);
        beta = s0(n, 1, 0, c);
        eps = s0(n, 2, 0, c);
      }
      const Var decay = -exp(w(c));
      for (Int t = s.begin; t < s.begin + s.length; ++t) {
        const Var kt = k(s.batch, t, c), vt = v(s.batch, t, c);
        const Var top = maximum(eps, u(c) + kt);
        const Var past = exp(eps - top), now = exp(u(c) + kt - top);
        o(s.batch, t, c) = (past * alpha + now * vt) / (past * beta + now);
        const Var next = maximum(decay + eps, kt);
        const Var keep = exp(decay + eps - next), add = exp(kt - next);
        alpha = keep * alpha + add * vt;
        beta = keep * beta + add;
        eps = next;
      }
      final_state(n, 0, 0, c) = alpha;
      final_state(n, 1, 0, c) = beta;
      final_state(n, 2, 0, c) = eps;
    }
  }
  return {{"o", o}, {"final_state", final_state}};
}

Tensors<Var> selective_scan(const Tensors<Var>& in, const Setting& setting) {
  const Vars &x = find(in, "x"), &dt_in = find(in, "dt"), &dt_bias = find(in, "dt_bias");
  const Vars &A = find(in, "A"), &B = find(in, "B"), &C = find(in, "C"), &D = find(in, "D");
  const Vars &z = find(in, "z"), &s0 = find(in, "initial_state");
  const Int channels = x.extent(2), width = A.extent(1), sequences = setting.segments.count();
  Vars o(x.shape), final_state({sequences, channels, width});
  for (Int n = 0; n < sequences; ++n) {
    const Segment& s = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int c = 0; c < channels; ++c) {
      std::vector<Var> state;
      for (Int m = 0; m < width; ++m) state.push_back(s0.present() ? s0(n, c, m) : Var(0));
      for (Int t = s.begin; t < s.begin + s.length; ++t) {
        Var dt = dt_in(s.batch, t, c);
        if (dt_bias.present()) dt += dt_bias(c);
        if (flag(setting, "dt_softplus")) dt = softplus(dt);
        const Var xt = x(s.batch, t, c);
        Var y = D.present() ? D(c) * xt : Var(0);
        for (Int m = 0; m < width; ++m) {
          Var& h = state[static_cast<std::size_t>(m)];
          h = exp(dt * A(c, m)) * h + dt * B(s.batch, t, m) * xt;
          y += C(s.batch, t, m) * h;
        }
        o(s.batch, t, c) = z.present() ? y * silu(z(s.batch, t, c)) : y;
      }
      for (Int m = 0; m < width; ++m) final_state(n, c, m) = state[static_cast<std::size_t>(m)];
    }
  }
  return {{"o", o}, {"final_state", final_state}};
}

}  // namespace ouzel::reference
