// The engine's recurrence (src/ops/rows.h) and its adjoint in float64, row by row.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "src/ops/rows.h"

namespace ouzel::test {

using Numbers = std::vector<double>;

// Everything that a call takes, or its gradients: rows of the whole sequence, dense.
struct Arrays {
  Numbers q, k, v, g, gv, e, b, c, u, state;

  template <class Body>
  void each(const Arrays& other, Body body) {
    body("q", q, other.q);
    body("k", k, other.k);
    body("v", v, other.v);
    body("g", g, other.g);
    body("gv", gv, other.gv);
    body("e", e, other.e);
    body("b", b, other.b);
    body("c", c, other.c);
    body("u", u, other.u);
    body("state", state, other.state);
  }
};

struct Problem {
  RowsKind kind;
  std::int64_t tokens = 0;
  Arrays in;
  Numbers output_grad;  // [queries][tokens][V]
  Numbers final_grad;   // [K][V]

  std::int64_t rows() const { return tokens * kind.rows_per_token; }
  bool erases() const { return kind.erase != EraseKind::kNone; }
  bool general() const { return kind.erase == EraseKind::kGeneral; }
  std::int64_t gates() const { return kind.decay_per_key ? kind.keys : 1; }
  std::int64_t strengths() const { return kind.strength_per_value ? kind.values : 1; }
  bool is_read(std::int64_t row) const { return (row + 1) % kind.rows_per_token == 0; }
};

// The sum of do * o and of the final state times its gradient, of any kind of numbers; keeps
// S_(t-1) of every row where asked.
template <class Real>
inline Real loss(const Problem& p, const Arrays& a, const Arrays& step, Real unit,
                 std::vector<Numbers>* states) {
  const auto at = [&](const Numbers Arrays::*m, std::int64_t i) {
    const auto n = static_cast<std::size_t>(i);
    return (a.*m)[n] + unit * (step.*m)[n];
  };
  const std::int64_t K = p.kind.keys, V = p.kind.values;
  std::vector<Real> s(static_cast<std::size_t>(K * V));
  for (std::int64_t i = 0; i < K * V; ++i) s[static_cast<std::size_t>(i)] = at(&Arrays::state, i);
  const auto S = [&](std::int64_t i, std::int64_t j) -> Real& {
    return s[static_cast<std::size_t>(i * V + j)];
  };
  Real sum = 0;
  const auto read = [&](std::int64_t t) {
    for (std::int64_t n = 0; n < p.kind.queries; ++n) {
      const std::int64_t row = n * p.tokens + t / p.kind.rows_per_token;
      for (std::int64_t i = 0; i < K; ++i) {
        for (std::int64_t j = 0; j < V; ++j) {
          const double d = p.output_grad[static_cast<std::size_t>(row * V + j)];
          sum += at(&Arrays::q, row * K + i) * S(i, j) * d;
          if (p.kind.bonus) {
            sum += at(&Arrays::q, row * K + i) * at(&Arrays::u, i) * at(&Arrays::k, t * K + i) *
                   at(&Arrays::v, t * V + j) * d;
          }
        }
      }
    }
  };
  for (std::int64_t t = 0; t < p.rows(); ++t) {
    if constexpr (std::is_same_v<Real, double>) {
      if (states != nullptr) states->push_back(s);
    }
    if (p.kind.bonus && p.is_read(t)) read(t);
    std::vector<Real> r(static_cast<std::size_t>(V));
    const auto erase = [&] {
      for (std::int64_t i = 0; i < K; ++i) {
        for (std::int64_t j = 0; j < V; ++j) {
          r[static_cast<std::size_t>(j)] += at(&Arrays::e, t * K + i) * S(i, j);
        }
      }
    };
    if (p.erases() && !p.kind.erase_decayed) erase();
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        Real decay = 1;
        if (p.kind.decay) {
          decay *= std::exp(at(&Arrays::g, t * p.gates() + (p.kind.decay_per_key ? i : 0)));
        }
        if (p.kind.value_decay) decay *= std::exp(at(&Arrays::gv, t * V + j));
        S(i, j) = decay == Real(0) ? Real(0) : S(i, j) * decay;
      }
    }
    if (p.erases() && p.kind.erase_decayed) erase();
    for (std::int64_t j = 0; j < V; ++j) {
      Real w = at(&Arrays::v, t * V + j);
      const Real rj = r[static_cast<std::size_t>(j)];
      if (p.erases() && !p.general()) {
        w -= at(&Arrays::c, t * p.strengths() + (p.kind.strength_per_value ? j : 0)) * rj;
      }
      for (std::int64_t i = 0; i < K; ++i) {
        S(i, j) += at(&Arrays::k, t * K + i) * w;
        if (p.general()) S(i, j) += at(&Arrays::b, t * K + i) * rj;
      }
    }
    if (!p.kind.bonus && p.is_read(t)) read(t);
  }
  for (std::int64_t i = 0; i < K * V; ++i) {
    sum += s[static_cast<std::size_t>(i)] * p.final_grad[static_cast<std::size_t>(i)];
  }
  return sum;
}

inline Arrays zeros_like(const Arrays& a) {
  Arrays zeros;
  zeros.each(a, [](const char*, Numbers& x, const Numbers& y) { x.assign(y.size(), 0.0); });
  return zeros;
}

// Row t of an array of rows of n numbers.
double* row_of(Numbers& x, std::int64_t t, std::int64_t n) { return x.data() + t * n; }
inline const double* row_of(const Numbers& x, std::int64_t t, std::int64_t n) {
  return x.data() + t * n;
}

// All gradients, row by row from the last one.
inline Arrays adjoint(const Problem& p) {
  const std::int64_t K = p.kind.keys, V = p.kind.values;
  std::vector<Numbers> states;
  const Arrays& in = p.in;
  Arrays out = zeros_like(in);
  loss<double>(p, in, out, 0.0, &states);
  Numbers G = p.final_grad;
  for (std::int64_t t = p.rows() - 1; t >= 0; --t) {
    const Numbers& before = states[static_cast<std::size_t>(t)];
    const double *k = row_of(in.k, t, K), *v = row_of(in.v, t, V);
    double *dk = row_of(out.k, t, K), *dv = row_of(out.v, t, V);
    // P_t, r_t, what is written, and S_t again.
    Numbers decay(static_cast<std::size_t>(K * V), 1.0), P(before), r(static_cast<std::size_t>(V)),
        w(v, v + V), dr(r);
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        double& d = decay[static_cast<std::size_t>(i * V + j)];
        if (p.kind.decay) {
          d *= std::exp(row_of(in.g, t, p.gates())[p.kind.decay_per_key ? i : 0]);
        }
        if (p.kind.value_decay) d *= std::exp(row_of(in.gv, t, V)[j]);
        double& x = P[static_cast<std::size_t>(i * V + j)];
        x = d == 0 ? 0 : x * d;
      }
    }
    const Numbers& X = p.kind.erase_decayed ? P : before;
    const auto c = [&](std::int64_t j) {
      return row_of(in.c, t, p.strengths())[p.kind.strength_per_value ? j : 0];
    };
    Numbers after(P);
    for (std::int64_t j = 0; j < V; ++j) {
      double& rj = r[static_cast<std::size_t>(j)];
      for (std::int64_t i = 0; p.erases() && i < K; ++i) {
        rj += row_of(in.e, t, K)[i] * X[static_cast<std::size_t>(i * V + j)];
      }
      if (p.erases() && !p.general()) w[static_cast<std::size_t>(j)] -= c(j) * rj;
      for (std::int64_t i = 0; i < K; ++i) {
        double& x = after[static_cast<std::size_t>(i * V + j)];
        x += k[i] * w[static_cast<std::size_t>(j)];
        if (p.general()) x += row_of(in.b, t, K)[i] * rj;
      }
    }
    const auto read = [&](const Numbers& S) {
      for (std::int64_t n = 0; n < p.kind.queries; ++n) {
        const std::int64_t row = n * p.tokens + t / p.kind.rows_per_token;
        const double *q = row_of(in.q, row, K), *d = row_of(p.output_grad, row, V);
        double* dq = row_of(out.q, row, K);
        for (std::int64_t i = 0; i < K; ++i) {
          for (std::int64_t j = 0; j < V; ++j) {
            G[static_cast<std::size_t>(i * V + j)] += q[i] * d[j];
            dq[i] += S[static_cast<std::size_t>(i * V + j)] * d[j];
            if (p.kind.bonus) {
              const double u = in.u[static_cast<std::size_t>(i)];
              dq[i] += u * k[i] * v[j] * d[j];
              dk[i] += u * q[i] * v[j] * d[j];
              dv[j] += q[i] * u * k[i] * d[j];
              out.u[static_cast<std::size_t>(i)] += q[i] * k[i] * v[j] * d[j];
            }
          }
        }
      }
    };
    if (!p.kind.bonus && p.is_read(t)) read(after);
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        const double Gij = G[static_cast<std::size_t>(i * V + j)];
        dk[i] += Gij * w[static_cast<std::size_t>(j)];
        dv[j] += Gij * k[i];
        if (p.general()) {
          row_of(out.b, t, K)[i] += Gij * r[static_cast<std::size_t>(j)];
          dr[static_cast<std::size_t>(j)] += Gij * row_of(in.b, t, K)[i];
        }
      }
    }
    if (p.erases() && !p.general()) {
      for (std::int64_t j = 0; j < V; ++j) {
        row_of(out.c, t, p.strengths())[p.kind.strength_per_value ? j : 0] -=
            dv[j] * r[static_cast<std::size_t>(j)];
        dr[static_cast<std::size_t>(j)] = -c(j) * dv[j];
      }
    }
    const auto erase = [&] {
      for (std::int64_t i = 0; i < K; ++i) {
        for (std::int64_t j = 0; j < V; ++j) {
          row_of(out.e, t, K)[i] +=
              X[static_cast<std::size_t>(i * V + j)] * dr[static_cast<std::size_t>(j)];
          G[static_cast<std::size_t>(i * V + j)] +=
              row_of(in.e, t, K)[i] * dr[static_cast<std::size_t>(j)];
        }
      }
    };
    if (p.erases() && p.kind.erase_decayed) erase();
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        const auto at = static_cast<std::size_t>(i * V + j);
        if (decay[at] == 0) G[at] = 0;
        const double product = G[at] * P[at];
        if (p.kind.decay) row_of(out.g, t, p.gates())[p.kind.decay_per_key ? i : 0] += product;
        if (p.kind.value_decay) row_of(out.gv, t, V)[j] += product;
        G[at] *= decay[at];
      }
    }
    if (p.erases() && !p.kind.erase_decayed) erase();
    if (p.kind.bonus && p.is_read(t)) read(before);
  }
  out.state = G;
  return out;
}

}  // namespace ouzel::test
