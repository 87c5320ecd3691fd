#include "src/ops/reference/learners.h"

namespace ouzel::reference {
namespace {

using Row = std::vector<Var>;
using Table = std::vector<Row>;

Row row(const Vars& x, Int b, Int t, Int h) {
  Row r;
  for (Int i = 0; i < x.extent(3); ++i) r.push_back(x(b, t, h, i));
  return r;
}

Row unit(Row x, double eps) {
  Var square = eps;
  for (const Var& v : x) square += v * v;
  for (Var& v : x) v = v / sqrt(square);
  return x;
}

Table state_of(const Vars& s0, Int n, Int h, Int rows, Int columns) {
  Table s(static_cast<std::size_t>(rows), Row(static_cast<std::size_t>(columns)));
  for (Int i = 0; i < rows && s0.present(); ++i) {
    for (Int c = 0; c < columns; ++c) {
      s[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)] = s0(n, h, i, c);
    }
  }
  return s;
}

void store(const Table& s, Int n, Int h, Vars& out) {
  for (std::size_t i = 0; i < s.size(); ++i) {
    for (std::size_t c = 0; c < s[i].size(); ++c) out(n, h, i, c) = s[i][c];
  }
}

// S^T x
Row transposed_product(const Table& s, const Row& x) {
  Row y(s.empty() ? 0 : s[0].size());
  for (std::size_t i = 0; i < s.size(); ++i) {
    for (std::size_t c = 0; c < y.size(); ++c) y[c] += s[i][c] * x[i];
  }
  return y;
}

// (x - mean) / sqrt(var + eps), and the root.
Row layer_norm(const Row& x, double eps, Var& deviation) {
  const Var count = static_cast<double>(x.size());
  Var mean = 0, variance = 0;
  for (const Var& v : x) mean += v / count;
  for (const Var& v : x) variance += (v - mean) * (v - mean) / count;
  deviation = sqrt(variance + Var(eps));
  Row y;
  for (const Var& v : x) y.push_back((v - mean) / deviation);
  return y;
}

}  // namespace

Tensors<Var> gated_oja_rule(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v");
  const Vars &beta = find(in, "beta"), &gv = find(in, "gv"), &s0 = find(in, "initial_state");
  const Int heads = v.extent(2), group = heads / q.extent(2), K = q.extent(3), V = v.extent(3);
  const Int N = setting.segments.count();
  const Var scale = default_scale(setting, K);
  const double eps = setting.numbers.at("l2norm_eps");
  Vars o(v.shape), final_state({N, heads, K, V});
  for (Int n = 0; n < N; ++n) {
    const Segment& seq = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int h = 0; h < heads; ++h) {
      Table s = state_of(s0, n, h, K, V);
      for (Int t = seq.begin; t < seq.begin + seq.length; ++t) {
        const Int b = seq.batch;
        Row qt = row(q, b, t, h / group), kt = row(k, b, t, h / group);
        const Row vt = row(v, b, t, h);
        if (flag(setting, "use_q_l2norm")) qt = unit(qt, eps);
        if (flag(setting, "use_k_l2norm")) kt = unit(kt, eps);
        for (std::size_t i = 0; i < s.size(); ++i) {
          Var error = kt[i];
          for (std::size_t c = 0; c < vt.size(); ++c) {
            if (gv.present()) s[i][c] *= exp(gv(b, t, h, c));
            error = error - s[i][c] * vt[c];
          }
          for (std::size_t c = 0; c < vt.size(); ++c) s[i][c] += beta(b, t, h) * error * vt[c];
        }
        const Row out = transposed_product(s, qt);
        for (std::size_t c = 0; c < vt.size(); ++c) o(b, t, h, c) = scale * out[c];
      }
      store(s, n, h, final_state);
    }
  }
  return {{"o", o}, {"final_state", final_state}};
}

Tensors<Var> ttt_linear(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v"), &w = find(in, "w");
  const Vars &bias = find(in, "b"), &eta = find(in, "eta");
  const Vars &s0 = find(in, "initial_state"), &hb0 = find(in, "hb0");
  const Int heads = q.extent(2), D = q.extent(3), N = setting.segments.count();
  const auto size = static_cast<Int>(setting.numbers.at("mini_batch_size"));
  const double eps = setting.numbers.at("eps");
  const Var scale = default_scale(setting, D);
  const auto width = static_cast<std::size_t>(D);
  Vars o(q.shape), final_state({N, heads, D, D}), hbt({N, heads, D});
  for (Int n = 0; n < N; ++n) {
    const Segment& seq = setting.segments.list[static_cast<std::size_t>(n)];
    for (Int h = 0; h < heads; ++h) {
      Table s = state_of(s0, n, h, D, D);
      Row hb(width);
      for (std::size_t i = 0; i < width && hb0.present(); ++i) hb[i] = hb0(n, h, i);
      const Int end = seq.begin + seq.length, b = seq.batch;
      for (Int first = seq.begin; first < end; first += size) {
        // Sums of k grad^T and of grad so far.
        Table sum(width, Row(width));
        Row bias_sum(width);
        const Int last = std::min(first + size, end) - 1;
        for (Int t = first; t <= last; ++t) {
          const Row kt = row(k, b, t, h), vt = row(v, b, t, h);
          Row y = transposed_product(s, kt), a(width);
          Var deviation, mean = 0, along = 0;
          for (std::size_t i = 0; i < width; ++i) y[i] += hb[i];
          const Row x = layer_norm(y, eps, deviation);
          for (std::size_t i = 0; i < width; ++i) {
            a[i] = w(h, i) * (w(h, i) * x[i] + bias(h, i) - (vt[i] - kt[i]));
            mean += a[i] / Var(static_cast<double>(D));
            along += a[i] * x[i] / Var(static_cast<double>(D));
          }
          for (std::size_t c = 0; c < width; ++c) {
            const Var grad = (a[c] - mean - x[c] * along) / deviation;
            for (std::size_t i = 0; i < width; ++i) sum[i][c] += kt[i] * grad;
            bias_sum[c] += grad;
          }
          const Row qt = row(q, b, t, h);
          Row u(width);
          for (std::size_t c = 0; c < width; ++c) {
            u[c] = hb[c] - eta(b, t, h) * bias_sum[c];
            for (std::size_t i = 0; i < width; ++i) {
              u[c] += (s[i][c] - eta(b, t, h) * sum[i][c]) * scale * qt[i];
            }
          }
          Var unused;
          const Row normed = layer_norm(u, eps, unused);
          for (std::size_t c = 0; c < width; ++c) {
            o(b, t, h, c) = u[c] + normed[c] * w(h, c) + bias(h, c);
          }
        }
        for (std::size_t i = 0; i < width; ++i) {
          for (std::size_t c = 0; c < width; ++c) {
            s[i][c] = s[i][c] - eta(b, last, h) * sum[i][c];
          }
          hb[i] = hb[i] - eta(b, last, h) * bias_sum[i];
        }
      }
      store(s, n, h, final_state);
      for (std::size_t i = 0; i < width; ++i) hbt(n, h, i) = hb[i];
    }
  }
  return {{"o", o}, {"final_state", final_state}, {"hbt", hbt}};
}

}  // namespace ouzel::reference
