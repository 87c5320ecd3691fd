#include "src/ops/reference/recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ouzel::reference {
namespace {

using Int = std::int64_t;

template <class Real>
Map map_of(const RecurrenceArguments<Real>& a) {
  return {a.map, a.map_options};
}

template <class Real>
struct Sizes {
  explicit Sizes(const RecurrenceArguments<Real>& a)
      : B(a.q.extent(0)),
        T(a.q.extent(1)),
        HQ(a.q.extent(2)),
        HK(a.k.extent(2)),
        HV(a.v.extent(2)),
        HO(std::max(HQ, HV)),
        K(a.q.extent(3)),
        V(a.v.extent(3)),
        F(feature_count(map_of(a), a.q_map, K)),
        N(a.segments.count()) {}
  Int key_head(Int state_head) const { return state_head / (HV / HK); }
  Int state_head(Int output_head) const { return output_head / (HO / HV); }
  Int query_head(Int output_head) const { return output_head / (HO / HQ); }

  Int B, T, HQ, HK, HV, HO, K, V, F, N;
};

template <class Real>
const MapWeights<Real>& key_map(const RecurrenceArguments<Real>& a) {
  return a.k_map.w1.present() ? a.k_map : a.q_map;
}

template <class Real>
Real decay(const RecurrenceArguments<Real>& a, Int head) {
  return a.log_decay.empty() ? Real(1) : std::exp(a.log_decay[static_cast<std::size_t>(head)]);
}

// The i-th token of a sequence in the order of processing.
template <class Real>
Int token(const RecurrenceArguments<Real>& a, const Segment& segment, Int i) {
  return segment.begin + (a.reverse ? segment.length - 1 - i : i);
}

// The keys of a sequence.
template <class Real>
const Segment& keys_of(const RecurrenceArguments<Real>& a, Int sequence) {
  return (a.key_segments.list.empty() ? a.segments : a.key_segments)
      .list[static_cast<std::size_t>(sequence)];
}

// Of the i-th token of a sequence.
template <class Real>
std::vector<Real> query(const RecurrenceArguments<Real>& a, const Segment& segment, Int i,
                        Int head) {
  std::vector<Real> u =
      features(map_of(a), a.q_map, head, &a.q(segment.batch, token(a, segment, i), head, 0),
               a.q.extent(3), a.position + i);
  for (Real& x : u) x *= a.scale;
  return u;
}
template <class Real>
std::vector<Real> key(const RecurrenceArguments<Real>& a, const Segment& segment, Int i, Int head) {
  return features(map_of(a), key_map(a), head, &a.k(segment.batch, token(a, segment, i), head, 0),
                  a.k.extent(3), a.position + i);
}

// S and z of one head while the tokens pass by.
template <class Real>
struct State {
  State(const Array<Real>& s0, const Array<Real>& z0, Int n, Int head, Int features, Int values)
      : s({features, values}), z({features}) {
    for (Int f = 0; f < features; ++f) {
      if (z0.present()) z(f) = z0(n, head, f);
      for (Int v = 0; v < values && s0.present(); ++v) s(f, v) = s0(n, head, f, v);
    }
  }
  void decay(Real factor) {
    for (Real& x : s.data) x *= factor;
    for (Real& x : z.data) x *= factor;
  }
  // S += phi y^T, z += c phi
  void add(const std::vector<Real>& phi, const Real* y, Real c) {
    for (Int f = 0; f < z.extent(0); ++f) {
      z(f) += phi[static_cast<std::size_t>(f)] * c;
      for (Int v = 0; v < s.extent(1); ++v) s(f, v) += phi[static_cast<std::size_t>(f)] * y[v];
    }
  }
  void store(Array<Real>& s_out, Array<Real>& z_out, Int n, Int head) const {
    for (Int f = 0; f < z.extent(0); ++f) {
      z_out(n, head, f) = z(f);
      for (Int v = 0; v < s.extent(1); ++v) s_out(n, head, f, v) = s(f, v);
    }
  }
  Array<Real> s, z;
};

template <class Real>
Real denominator_of(const RecurrenceArguments<Real>& a, Real sum) {
  return a.map == FeatureMapKind::kCosformer ? std::max(sum, a.eps) : sum + a.eps;
}
// The denominator of cosformer where its bound holds: a constant.
template <class Real>
bool is_clamped(const RecurrenceArguments<Real>& a, Real denominator) {
  return a.map == FeatureMapKind::kCosformer && denominator == a.eps;
}

// o = S^T u / denominator; returns the denominator (1 if not normalised).
template <class Real>
Real read(const RecurrenceArguments<Real>& a, const State<Real>& state, const std::vector<Real>& u,
          Real* o) {
  Real denominator = 0;
  for (Int v = 0; v < state.s.extent(1); ++v) o[v] = 0;
  for (Int f = 0; f < state.z.extent(0); ++f) {
    const Real x = u[static_cast<std::size_t>(f)];
    denominator += x * state.z(f);
    for (Int v = 0; v < state.s.extent(1); ++v) o[v] += x * state.s(f, v);
  }
  if (!a.normalize) return 1;
  denominator = denominator_of(a, denominator);
  for (Int v = 0; v < state.s.extent(1); ++v) o[v] /= denominator;
  return denominator;
}

// The gradients that reach the numerator S^T u (one per value) and the denominator.
template <class Real>
struct ReadGradient {
  std::vector<Real> numerator;
  Real denominator = 0;
};
template <class Real>
ReadGradient<Real> read_backward(const RecurrenceArguments<Real>& a, const State<Real>& state,
                                 const std::vector<Real>& u, const Real* d_o) {
  const Int values = state.s.extent(1);
  std::vector<Real> o(static_cast<std::size_t>(values));
  const Real denominator = read(a, state, u, o.data());
  ReadGradient<Real> d;
  for (Int v = 0; v < values; ++v) {
    d.numerator.push_back(d_o[v] / denominator);
    if (a.normalize && !is_clamped(a, denominator))
      d.denominator -= d_o[v] * o[static_cast<std::size_t>(v)] / denominator;
  }
  return d;
}

}  // namespace

template <class Real>
std::vector<Real> retention_log_decay(Int heads) {
  std::vector<Real> g;
  for (Int h = 0; h < heads; ++h) g.push_back(std::log1p(-std::exp2(Real(-5 - h))));
  return g;
}

template <class Real>
std::vector<Real> lightning_log_decay(Int heads, Int layer, Int layers, bool geometric) {
  std::vector<Real> g;
  for (Int h = 0; h < heads; ++h) {
    const Real H = static_cast<Real>(heads), l = static_cast<Real>(layer);
    if (geometric) {
      const Real depth = layers > 1 ? l / static_cast<Real>(layers - 1) : 0;
      g.push_back(-std::exp2(-8 * static_cast<Real>(h + 1) / H) * (1 - depth + Real(1e-5L)));
    } else {
      g.push_back(-8 / H * (1 - l / static_cast<Real>(layers)) * static_cast<Real>(h));
    }
  }
  return g;
}

template <class Real>
RecurrenceResults<Real> recurrence(const RecurrenceArguments<Real>& a) {
  const Sizes<Real> n(a);
  RecurrenceResults<Real> r{Array<Real>({n.B, n.T, n.HO, n.V}), Array<Real>({n.N, n.HV, n.F, n.V}),
                            Array<Real>({n.N, n.HV, n.F})};
  for (Int i = 0; i < n.N; ++i) {
    const Segment& segment = a.segments.list[static_cast<std::size_t>(i)];
    const Segment& keys = keys_of(a, i);
    const Int b = segment.batch;
    for (Int h = 0; h < n.HV; ++h) {
      State<Real> state(a.s0, a.z0, i, h, n.F, n.V);
      const auto read_out = [&](Int j) {
        for (Int ho = 0; ho < n.HO; ++ho) {
          if (n.state_head(ho) == h) {
            read(a, state, query(a, segment, j, n.query_head(ho)),
                 &r.o(b, token(a, segment, j), ho, 0));
          }
        }
      };
      for (Int j = 0; j < keys.length; ++j) {
        state.decay(decay(a, h));
        state.add(key(a, keys, j, n.key_head(h)), &a.v(b, token(a, keys, j), h, 0), 1);
        if (a.causal) read_out(j);
      }
      for (Int j = 0; j < segment.length && !a.causal; ++j) read_out(j);
      state.store(r.s, r.z, i, h);
    }
  }
  return r;
}

// Two sweeps. With S_t in hand (the forward sweep): dn = do / den, dden = -(do . o) / den and
// du = S_t dn + z_t dden. With G = d loss / d S_t and h = d loss / d z_t (the sweep from the last
// token to the first): G += u dn^T, h += u dden; dphi(k) = G v + h, dv = G^T phi(k); then G and h
// decay.
template <class Real>
RecurrenceGradients<Real> recurrence_backward(const RecurrenceArguments<Real>& a,
                                              const RecurrenceResults<Real>& upstream) {
  const Sizes<Real> n(a);
  const auto like = [](const MapWeights<Real>& w) {
    using A = Array<Real>;
    return MapWeights<Real>{A::like(w.w1),     A::like(w.b1),     A::like(w.w2),
                            A::like(w.b2),     A::like(w.psi_w1), A::like(w.psi_b1),
                            A::like(w.psi_w2), A::like(w.psi_b2)};
  };
  RecurrenceGradients<Real> r{Array<Real>::like(a.q),
                              Array<Real>::like(a.k),
                              Array<Real>::like(a.v),
                              Array<Real>({n.N, n.HV, n.F, n.V}),
                              Array<Real>({n.N, n.HV, n.F}),
                              like(a.q_map),
                              like(a.k_map)};
  MapWeights<Real>& d_key_map = a.k_map.w1.present() ? r.k_map : r.q_map;
  for (Int i = 0; i < n.N; ++i) {
    const Segment& segment = a.segments.list[static_cast<std::size_t>(i)];
    const Segment& keys = keys_of(a, i);
    const Int b = segment.batch;
    for (Int h = 0; h < n.HV; ++h) {
      const Int hk = n.key_head(h);
      // Gradients of the read-outs, [token in order of processing][output head of this state].
      std::vector<std::vector<ReadGradient<Real>>> reads(static_cast<std::size_t>(segment.length));
      State<Real> state(a.s0, a.z0, i, h, n.F, n.V);
      const auto read_out_backward = [&](Int j) {
        const Int t = token(a, segment, j);
        for (Int ho = 0; ho < n.HO && upstream.o.present(); ++ho) {
          if (n.state_head(ho) != h) continue;
          const Int hq = n.query_head(ho);
          const ReadGradient<Real> d =
              read_backward(a, state, query(a, segment, j, hq), &upstream.o(b, t, ho, 0));
          std::vector<Real> dphi(static_cast<std::size_t>(n.F));
          for (Int f = 0; f < n.F; ++f) {
            Real sum = state.z(f) * d.denominator;
            for (Int v = 0; v < n.V; ++v) {
              sum += state.s(f, v) * d.numerator[static_cast<std::size_t>(v)];
            }
            dphi[static_cast<std::size_t>(f)] = a.scale * sum;
          }
          features_backward(map_of(a), a.q_map, hq, &a.q(b, t, hq, 0), n.K, a.position + j, dphi,
                            r.q_map, &r.q(b, t, hq, 0));
          reads[static_cast<std::size_t>(j)].push_back(d);
        }
      };
      for (Int j = 0; j < keys.length; ++j) {
        state.decay(decay(a, h));
        state.add(key(a, keys, j, hk), &a.v(b, token(a, keys, j), h, 0), 1);
        if (a.causal) read_out_backward(j);
      }
      for (Int j = 0; j < segment.length && !a.causal; ++j) read_out_backward(j);

      State<Real> g(upstream.s, upstream.z, i, h, n.F, n.V);
      const auto collect_read_out = [&](Int j) {
        std::size_t next = 0;
        for (Int ho = 0; ho < n.HO && upstream.o.present(); ++ho) {
          if (n.state_head(ho) != h) continue;
          const ReadGradient<Real>& d = reads[static_cast<std::size_t>(j)][next++];
          g.add(query(a, segment, j, n.query_head(ho)), d.numerator.data(), d.denominator);
        }
      };
      for (Int j = 0; j < segment.length && !a.causal; ++j) collect_read_out(j);
      for (Int j = keys.length; j-- > 0;) {
        const Int t = token(a, keys, j);
        if (a.causal) collect_read_out(j);
        const std::vector<Real> phi = key(a, keys, j, hk);
        std::vector<Real> dphi(static_cast<std::size_t>(n.F));
        for (Int f = 0; f < n.F; ++f) {
          dphi[static_cast<std::size_t>(f)] = g.z(f);
          for (Int v = 0; v < n.V; ++v) {
            dphi[static_cast<std::size_t>(f)] += g.s(f, v) * a.v(b, t, h, v);
            r.v(b, t, h, v) += g.s(f, v) * phi[static_cast<std::size_t>(f)];
          }
        }
        features_backward(map_of(a), key_map(a), hk, &a.k(b, t, hk, 0), n.K, a.position + j, dphi,
                          d_key_map, &r.k(b, t, hk, 0));
        g.decay(decay(a, h));
      }
      g.store(r.s0, r.z0, i, h);
    }
  }
  return r;
}

template <class Real>
Array<Real> recurrence_weights(const RecurrenceArguments<Real>& a) {
  const Sizes<Real> n(a);
  Array<Real> weights({n.B, n.HO, n.T, a.k.extent(1)});
  for (Int sequence = 0; sequence < n.N; ++sequence) {
    const Segment& segment = a.segments.list[static_cast<std::size_t>(sequence)];
    const Segment& keys = keys_of(a, sequence);
    const Int b = segment.batch;
    for (Int ho = 0; ho < n.HO; ++ho) {
      const Int h = n.state_head(ho);
      for (Int i = 0; i < segment.length; ++i) {
        const Int t = token(a, segment, i);
        const std::vector<Real> u = query(a, segment, i, n.query_head(ho));
        const Int last = a.causal ? i : keys.length - 1;
        Real sum = 0;
        for (Int j = 0; j <= last; ++j) {
          const std::vector<Real> phi = key(a, keys, j, n.key_head(h));
          Real& w = weights(b, ho, t, token(a, keys, j));
          for (std::size_t f = 0; f < phi.size(); ++f) w += u[f] * phi[f];
          if (a.causal) w *= std::pow(decay(a, h), Real(i - j));
          sum += w;
        }
        for (Int j = 0; j <= last && a.normalize; ++j) {
          weights(b, ho, t, token(a, keys, j)) /= denominator_of(a, sum);
        }
      }
    }
  }
  return weights;
}

#define OUZEL_INSTANTIATE(Real)                                                            \
  template std::vector<Real> retention_log_decay<Real>(Int);                               \
  template std::vector<Real> lightning_log_decay<Real>(Int, Int, Int, bool);               \
  template RecurrenceResults<Real> recurrence(const RecurrenceArguments<Real>&);           \
  template RecurrenceGradients<Real> recurrence_backward(const RecurrenceArguments<Real>&, \
                                                         const RecurrenceResults<Real>&);  \
  template Array<Real> recurrence_weights(const RecurrenceArguments<Real>&);
OUZEL_INSTANTIATE(double)
OUZEL_INSTANTIATE(long double)
#undef OUZEL_INSTANTIATE

}  // namespace ouzel::reference
