#include "src/ops/reference/slots.h"

#include <limits>

namespace ouzel::reference {
namespace {

Tensors<Var> slots(const Tensors<Var>& in, const Setting& setting, bool averages) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v"), &s = find(in, "s");
  const Vars &g = find(in, "g"), &hk0 = find(in, "hk0"), &hv0 = find(in, "hv0");
  const Vars& lse0 = find(in, "lse0");
  const Int heads = k.extent(2), group = q.extent(2) / heads;
  const Int K = k.extent(3), V = v.extent(3), M = s.extent(3), N = setting.segments.count();
  const Var scale = default_scale(setting, K);
  Vars o({q.extent(0), q.extent(1), q.extent(2), V});
  Vars hk({N, heads, K, M}), hv({N, heads, M, V}), lse({N, heads, M});
  for (Int n = 0; n < N; ++n) {
    const Segment& seq = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int h = 0; h < heads; ++h) {
      for (Int m = 0; m < M; ++m) {
        for (Int i = 0; i < K; ++i) hk(n, h, i, m) = hk0.present() ? hk0(n, h, i, m) : Var(0);
        for (Int c = 0; c < V; ++c) hv(n, h, m, c) = hv0.present() ? hv0(n, h, m, c) : Var(0);
        lse(n, h, m) =
            lse0.present() ? lse0(n, h, m) : Var(-std::numeric_limits<double>::infinity());
      }
      for (Int t = seq.begin; t < seq.begin + seq.length; ++t) {
        const Int b = seq.batch;
        for (Int m = 0; m < M; ++m) {
          Var keep, weight;
          if (averages) {
            const Var next = log_add(lse(n, h, m), s(b, t, h, m));
            keep = std::isinf(lse(n, h, m).value) ? Var(0) : exp(lse(n, h, m) - next);
            weight = exp(s(b, t, h, m) - next);
            lse(n, h, m) = next;
          } else {
            keep = exp(g(b, t, h, m));
            weight = s(b, t, h, m);
          }
          for (Int i = 0; i < K; ++i) {
            hk(n, h, i, m) = keep * hk(n, h, i, m) + k(b, t, h, i) * weight;
          }
          for (Int c = 0; c < V; ++c) {
            hv(n, h, m, c) = keep * hv(n, h, m, c) + weight * v(b, t, h, c);
          }
        }
        for (Int r = h * group; r < (h + 1) * group; ++r) {
          std::vector<Var> p;
          for (Int m = 0; m < M; ++m) {
            Var sum = 0;
            for (Int i = 0; i < K; ++i) sum += hk(n, h, i, m) * q(b, t, r, i);
            p.push_back(scale * sum);
          }
          p = softmax(std::move(p));
          for (Int c = 0; c < V; ++c) {
            for (Int m = 0; m < M; ++m) {
              o(b, t, r, c) += hv(n, h, m, c) * p[static_cast<std::size_t>(m)];
            }
          }
        }
      }
    }
  }
  Tensors<Var> out = {{"o", o}, {"hkt", hk}, {"hvt", hv}};
  if (averages) out["lset"] = lse;
  return out;
}

}  // namespace

Tensors<Var> gsa(const Tensors<Var>& in, const Setting& setting) {
  return slots(in, setting, /*averages=*/false);
}
Tensors<Var> abc(const Tensors<Var>& in, const Setting& setting) {
  return slots(in, setting, /*averages=*/true);
}

}  // namespace ouzel::reference
