#include "src/ops/reference/averages.h"

#include <limits>

namespace ouzel::reference {
namespace {

// Feature f of the keys of a head, over positions.
std::vector<Var> column(const Vars& k, const Segment& s, Int h, Int f) {
  std::vector<Var> c;
  for (Int t = s.begin; t < s.begin + s.length; ++t) c.push_back(k(s.batch, t, h, f));
  return c;
}

}  // namespace

Tensors<Var> log_linear_attention(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v"), &g = find(in, "g");
  const Vars& lambda = find(in, "level_scales");
  const Int heads = v.extent(2), group = heads / q.extent(2);
  const Var scale = setting.numbers.at("scale");
  Vars o(v.shape);
  for (const Segment& seq : setting.segments.list) {
    for (Int h = 0; h < heads; ++h) {
      for (Int t = 0; t < seq.length; ++t) {
        Var decay = 1;
        for (Int s = t; s >= 0; --s) {
          const Int a = seq.begin + t, b = seq.begin + s;
          Int level = 0;
          while ((t ^ s) >> level != 0) ++level;
          Var score = 0;
          for (Int i = 0; i < q.extent(3); ++i) {
            score += q(seq.batch, a, h / group, i) * k(seq.batch, b, h / group, i);
          }
          const Var weight = lambda(seq.batch, a, h, level) * decay * scale * score;
          for (Int c = 0; c < v.extent(3); ++c) {
            o(seq.batch, a, h, c) += weight * v(seq.batch, b, h, c);
          }
          decay *= exp(g(seq.batch, b, h));
        }
      }
    }
  }
  return {{"o", o}};
}

Tensors<Var> efficient_attention(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v");
  const Vars &s0 = find(in, "initial_state"), &lse0 = find(in, "initial_lse");
  const Int heads = q.extent(2), K = q.extent(3), V = v.extent(3), N = setting.segments.count();
  const bool causal = flag(setting, "causal"), softmaxed = text(setting, "variant") == "softmax";
  Vars o(v.shape), final_state({N, heads, K, V}), lse({N, heads, K});
  for (Int n = 0; n < N; ++n) {
    const Segment& s = setting.segments.list[static_cast<std::size_t>(n)];
    const Var root = 1 / std::sqrt(static_cast<double>(s.length));
    for (Int h = 0; h < heads; ++h) {
      for (Int f = 0; f < K; ++f) {
        // An earlier average is one more position, of weight e^lse0.
        std::vector<Var> logits = column(k, s, h, f);
        if (s0.present()) logits.insert(logits.begin(), lse0(n, h, f));
        const Int extra = s0.present() ? 1 : 0;
        for (Int t = 0; t < s.length; ++t) {
          std::vector<Var> query;
          for (Int i = 0; i < K; ++i) query.push_back(q(s.batch, s.begin + t, h, i));
          const Var weight = softmaxed ? softmax(query)[static_cast<std::size_t>(f)]
                                       : query[static_cast<std::size_t>(f)] * root;
          const Int seen = causal ? t + 1 : s.length;
          std::vector<Var> p(logits.begin(), logits.begin() + seen + extra);
          if (softmaxed) p = softmax(p);
          for (Int c = 0; c < V; ++c) {
            Var sum = extra == 1 ? p[0] * s0(n, h, f, c) : Var(0);
            for (Int j = 0; j < seen; ++j) {
              const Var& value = v(s.batch, s.begin + j, h, c);
              const Var& key = p[static_cast<std::size_t>(j + extra)];
              sum += (softmaxed ? key : key * root) * value;
            }
            o(s.batch, s.begin + t, h, c) += weight * sum;
          }
        }
        Var top = -std::numeric_limits<double>::infinity();
        for (const Var& x : logits) top = log_add(top, x);
        lse(n, h, f) = top;
        const std::vector<Var> p = softmax(logits);
        for (Int c = 0; c < V; ++c) {
          Var sum = extra == 1 ? p[0] * s0(n, h, f, c) : Var(0);
          for (Int j = 0; j < s.length; ++j) {
            sum += p[static_cast<std::size_t>(j + extra)] * v(s.batch, s.begin + j, h, c);
          }
          final_state(n, h, f, c) = sum;
        }
      }
    }
  }
  if (!causal) return {{"o", o}};
  return {{"o", o}, {"final_state", final_state}, {"lse", lse}};
}

Tensors<Var> lambda_layer(const Tensors<Var>& in, const Setting& setting) {
  const Vars &q = find(in, "q"), &k = find(in, "k"), &v = find(in, "v");
  const Int K = q.extent(3), V = v.extent(3);
  Vars o({q.extent(0), q.extent(1), q.extent(2), V});
  for (const Segment& s : setting.segments.list) {
    // Whole rows of queries see whole rows of keys.
    const bool whole = s.begin == 0 && s.length == q.extent(1);
    const Segment keys = whole ? Segment{s.batch, 0, k.extent(1)} : s;
    for (Int f = 0; f < K; ++f) {
      std::vector<Var> lambda(static_cast<std::size_t>(V));
      for (Int u = 0; u < k.extent(2); ++u) {
        const std::vector<Var> p = softmax(column(k, keys, u, f));
        for (Int c = 0; c < V; ++c) {
          for (Int t = 0; t < keys.length; ++t) {
            lambda[static_cast<std::size_t>(c)] +=
                p[static_cast<std::size_t>(t)] * v(keys.batch, keys.begin + t, u, c);
          }
        }
      }
      for (Int t = s.begin; t < s.begin + s.length; ++t) {
        for (Int h = 0; h < q.extent(2); ++h) {
          for (Int c = 0; c < V; ++c) {
            o(s.batch, t, h, c) += lambda[static_cast<std::size_t>(c)] * q(s.batch, t, h, f);
          }
        }
      }
    }
  }
  return {{"o", o}};
}

Tensors<Var> nadaraya_watson(const Tensors<Var>& in, const Setting& setting) {
  const Vars &x = find(in, "x"), &y = find(in, "y"), &queries = find(in, "queries");
  const Int features = x.extent(1);
  const bool gaussian = text(setting, "kernel") == "gaussian";
  const Var scale = default_scale(setting, features);
  Vars o({queries.extent(0), y.extent(1)});
  for (Int i = 0; i < queries.extent(0); ++i) {
    std::vector<Var> w;
    for (Int j = 0; j < x.extent(0); ++j) {
      Var product = 0, distance = 0;
      for (Int d = 0; d < features; ++d) {
        product += queries(i, d) * x(j, d);
        distance += (queries(i, d) - x(j, d)) * (queries(i, d) - x(j, d));
      }
      const double width = setting.numbers.at("bandwidth");
      w.push_back(gaussian ? -distance / Var(2 * width * width) : scale * product);
    }
    w = softmax(std::move(w));
    for (Int c = 0; c < y.extent(1); ++c) {
      for (Int j = 0; j < x.extent(0); ++j) o(i, c) += w[static_cast<std::size_t>(j)] * y(j, c);
    }
  }
  return {{"o", o}};
}

}  // namespace ouzel::reference
