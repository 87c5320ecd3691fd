#include "src/ops/reference/normalized.h"

namespace ouzel::reference {
namespace {

// Row (b, t, h) of [B, T, H, size].
std::vector<Var> row(const Vars& x, Int b, Int t, Int h) {
  std::vector<Var> r;
  for (Int i = 0; i < x.extent(3); ++i) r.push_back(x(b, t, h, i));
  return r;
}

Var dot(const std::vector<Var>& a, const std::vector<Var>& b) {
  Var sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The state of one head, with z.
struct Memory {
  Memory(const Vars& s0, const Vars& z0, Int n, Int h, std::size_t keys, std::size_t values)
      : s(keys, std::vector<Var>(values)), z(keys) {
    for (std::size_t i = 0; i < keys && s0.present(); ++i) {
      for (std::size_t c = 0; c < values; ++c) s[i][c] = s0(n, h, i, c);
      z[i] = z0(n, h, i);
    }
  }
  // S' = keep S + write k v^T, z' = keep z + write k.
  void add(const Var& keep, const Var& write, const std::vector<Var>& k,
           const std::vector<Var>& v) {
    for (std::size_t i = 0; i < k.size(); ++i) {
      for (std::size_t c = 0; c < v.size(); ++c) s[i][c] = keep * s[i][c] + write * k[i] * v[c];
      z[i] = keep * z[i] + write * k[i];
    }
  }
  Var value(const std::vector<Var>& q, std::size_t c) const {
    Var sum = 0;
    for (std::size_t i = 0; i < q.size(); ++i) sum += s[i][c] * q[i];
    return sum;
  }
  void store(Vars& s_out, Vars& z_out, Int n, Int h) const {
    for (std::size_t i = 0; i < z.size(); ++i) {
      for (std::size_t c = 0; c < s[i].size(); ++c) s_out(n, h, i, c) = s[i][c];
      z_out(n, h, i) = z[i];
    }
  }
  std::vector<std::vector<Var>> s;
  std::vector<Var> z;
};

}  // namespace

Tensors<Var> mlstm(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v");
  const Vars &i = find(in, "i"), &f = find(in, "f");
  const Vars &s0 = find(in, "initial_state"), &z0 = find(in, "initial_z");
  const Vars& m0 = find(in, "initial_m");
  const Int heads = q.extent(2), K = q.extent(3), V = v.extent(3), N = setting.segments.count();
  const Var scale = default_scale(setting, K);
  Vars o(v.shape), s({N, heads, K, V}), z({N, heads, K}), m_out({N, heads});
  for (Int n = 0; n < N; ++n) {
    const Segment& seq = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int h = 0; h < heads; ++h) {
      Memory memory(s0, z0, n, h, static_cast<std::size_t>(K), static_cast<std::size_t>(V));
      Var m = m0.present() ? m0(n, h) : Var(0);
      for (Int t = seq.begin; t < seq.begin + seq.length; ++t) {
        const Int b = seq.batch;
        const Var kept = std::isinf(f(b, t, h).value) ? f(b, t, h) : log_sigmoid(f(b, t, h)) + m;
        const Var next = maximum(kept, i(b, t, h));
        memory.add(exp(kept - next), exp(i(b, t, h) - next) * scale, row(k, b, t, h),
                   row(v, b, t, h));
        m = next;
        const std::vector<Var> qt = row(q, b, t, h);
        const Var denominator = maximum(abs(dot(memory.z, qt)), exp(-m));
        for (Int c = 0; c < V; ++c) {
          o(b, t, h, c) = memory.value(qt, static_cast<std::size_t>(c)) / denominator;
        }
      }
      memory.store(s, z, n, h);
      m_out(n, h) = m;
    }
  }
  return {{"o", o}, {"final_state", s}, {"z", z}, {"m", m_out}};
}

Tensors<Var> rfa_gate(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v");
  const Vars &gate = find(in, "gate"), &W = find(in, "W"), &sigma = find(in, "sigma");
  const Vars &s0 = find(in, "initial_state"), &z0 = find(in, "initial_z");
  const Int heads = q.extent(2), V = v.extent(3), N = setting.segments.count();
  const Int M = W.extent(W.rank() - 2);
  const auto map = [&](std::vector<Var> x, Int h) {
    const Var norm = sqrt(dot(x, x) + Var(1e-6));
    std::vector<Var> cosines, sines;
    for (Int j = 0; j < M; ++j) {
      Var angle = 0;
      for (std::size_t c = 0; c < x.size(); ++c) {
        const Var w = W.rank() == 3 ? W(h, j, c) : W(j, c);
        angle += w * (sigma.present() ? sigma(c) : Var(1)) * x[c] / norm;
      }
      const Var root = 1 / std::sqrt(static_cast<double>(M));
      cosines.push_back(root * cos(angle));
      sines.push_back(root * sin(angle));
    }
    cosines.insert(cosines.end(), sines.begin(), sines.end());
    return cosines;
  };
  Vars o(v.shape), s({N, heads, 2 * M, V}), z({N, heads, 2 * M});
  for (Int n = 0; n < N; ++n) {
    const Segment& seq = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int h = 0; h < heads; ++h) {
      Memory memory(s0, z0, n, h, static_cast<std::size_t>(2 * M), static_cast<std::size_t>(V));
      for (Int t = seq.begin; t < seq.begin + seq.length; ++t) {
        const Int b = seq.batch;
        memory.add(gate(b, t, h), Var(1) - gate(b, t, h), map(row(k, b, t, h), h), row(v, b, t, h));
        const std::vector<Var> fq = map(row(q, b, t, h), h);
        for (Int c = 0; c < V; ++c) {
          o(b, t, h, c) = memory.value(fq, static_cast<std::size_t>(c)) / dot(memory.z, fq);
        }
      }
      memory.store(s, z, n, h);
    }
  }
  return {{"o", o}, {"final_state", s}, {"z", z}};
}

}  // namespace ouzel::reference
