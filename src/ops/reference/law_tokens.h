// One token of each law: what it does to the state S [K, V] of a head and what it reads from it,
// and the same in reverse. Sources: Mamba-2 arXiv:2405.21060, GLA 2312.06635, HGRN2 2404.07904,
// RWKV-5/6 2404.05892, RWKV-7 2503.14456, the delta rule 2102.11174 and 2406.06484, gated
// 2412.06464, its products 2502.10297, KDA 2510.26692, Comba 2506.02475.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/ops/reference/array.h"

namespace ouzel::reference {

template <class Real>
struct LawTokens {
  using State = Array<Real>;
  using Row = std::vector<Real>;
  // The tensors of one token as one head sees them: K or V numbers, or one for all of them. They
  // are few, and found by looking at each: a map of strings would take most of the time.
  class Token {
   public:
    using Entry = std::pair<std::string_view, Row>;  // the name lives elsewhere

    Token() = default;
    Token(std::initializer_list<Entry> entries) : entries_(entries) {}
    Row& operator[](std::string_view name) {  // added if there is none
      Row* row = find(name);
      return row != nullptr ? *row : entries_.emplace_back(name, Row()).second;
    }
    Row& at(std::string_view name) {
      Row* row = find(name);
      if (row == nullptr) throw std::out_of_range("no tensor " + std::string(name));
      return *row;
    }
    const Row& at(std::string_view name) const { return const_cast<Token*>(this)->at(name); }
    bool contains(std::string_view name) const {
      return const_cast<Token*>(this)->find(name) != nullptr;
    }
    auto begin() { return entries_.begin(); }
    auto end() { return entries_.end(); }
    auto begin() const { return entries_.begin(); }
    auto end() const { return entries_.end(); }

   private:
    Row* find(std::string_view name) {
      for (Entry& entry : entries_) {
        if (entry.first == name) return &entry.second;
      }
      return nullptr;
    }
    std::vector<Entry> entries_;
  };
  using In = std::span<const Real>;
  using Out = std::span<Real>;

  struct Law {
    const char* name;
    const char* query;
    const char* value;
    bool scaled;  // the query by K^-0.5, if nothing is said
    // S_{t-1} in, S_t out; returns o_t.
    Row (*token)(const Token& x, State& s);
    // `s` is S_{t-1}; `ds` the gradient of S_t, then that of S_{t-1}. Adds to dx.
    void (*token_backward)(const Token& x, const State& s, In d_o, State& ds, Token& dx);
  };
  static const std::vector<Law>& laws();

  // --- what the laws are made of

  // Row i of the state.
  static Out row(State& s, std::size_t i) {
    const auto size = static_cast<std::size_t>(s.extent(1));
    return Out(s.data).subspan(i * size, size);
  }
  static In row(const State& s, std::size_t i) {
    const auto size = static_cast<std::size_t>(s.extent(1));
    return In(s.data).subspan(i * size, size);
  }
  // Number j of a row, or its only one.
  static Real& entry(Out x, std::size_t j) { return x[x.size() == 1 ? 0 : j]; }
  static Real entry(In x, std::size_t j) { return x[x.size() == 1 ? 0 : j]; }

  // S^T e
  static Row read(const State& s, In e) {
    Row y(static_cast<std::size_t>(s.extent(1)));
    for (std::size_t i = 0; i < e.size(); ++i) {
      const In from = row(s, i);
      for (std::size_t j = 0; j < y.size(); ++j) y[j] += from[j] * e[i];
    }
    return y;
  }
  static void read_backward(const State& s, In e, In dy, State& ds, Out de) {
    for (std::size_t i = 0; i < e.size(); ++i) {
      const In from = row(s, i);
      const Out to = row(ds, i);
      for (std::size_t j = 0; j < dy.size(); ++j) {
        de[i] += from[j] * dy[j];
        to[j] += e[i] * dy[j];
      }
    }
  }

  // S += k y^T
  static void write(State& s, In k, In y) {
    for (std::size_t i = 0; i < k.size(); ++i) {
      const Out to = row(s, i);
      for (std::size_t j = 0; j < y.size(); ++j) to[j] += k[i] * y[j];
    }
  }
  static void write_backward(In k, In y, const State& ds, Out dk, Out dy) {
    for (std::size_t i = 0; i < k.size(); ++i) {
      const In from = row(ds, i);
      for (std::size_t j = 0; j < y.size(); ++j) {
        dk[i] += from[j] * y[j];
        dy[j] += from[j] * k[i];
      }
    }
  }

  // S = Diag(e^g) S, g one number or K. A factor of 0 drops the term, whatever it is.
  static void decay_keys(State& s, In g) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(s.extent(0)); ++i) {
      const Real factor = std::exp(entry(g, i));
      for (Real& x : row(s, i)) x = factor == 0 ? 0 : factor * x;
    }
  }
  // `s` is the decayed state.
  static void decay_keys_backward(const State& s, In g, State& ds, Out dg) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(s.extent(0)); ++i) {
      for (std::size_t j = 0; j < static_cast<std::size_t>(s.extent(1)); ++j) {
        entry(dg, i) += row(ds, i)[j] * row(s, i)[j];
      }
    }
    decay_keys(ds, g);
  }

  // S = S Diag(e^g)
  static void decay_values(State& s, In g) {
    for (std::size_t j = 0; j < static_cast<std::size_t>(s.extent(1)); ++j) {
      const Real factor = std::exp(entry(g, j));
      for (std::size_t i = 0; i < static_cast<std::size_t>(s.extent(0)); ++i) {
        Real& x = row(s, i)[j];
        x = factor == 0 ? 0 : factor * x;
      }
    }
  }
  static void decay_values_backward(const State& s, In g, State& ds, Out dg) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(s.extent(0)); ++i) {
      for (std::size_t j = 0; j < static_cast<std::size_t>(s.extent(1)); ++j) {
        entry(dg, j) += row(ds, i)[j] * row(s, i)[j];
      }
    }
    decay_values(ds, g);
  }

  static Token zeros_like(const Token& x) {
    Token zeros;
    for (const auto& [name, numbers] : x) zeros[name].resize(numbers.size());
    return zeros;
  }

  // --- simple_gla, gla: S' = Diag(e^g) S Diag(e^gv) + k v^T, o = S'^T q

  static Row gla(const Token& x, State& s) {
    decay_keys(s, x.at("g"));
    if (x.contains("gv")) decay_values(s, x.at("gv"));
    write(s, x.at("k"), x.at("v"));
    return read(s, x.at("q"));
  }
  static void gla_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    State r = s;
    decay_keys(r, x.at("g"));
    State p = r;
    if (x.contains("gv")) decay_values(p, x.at("gv"));
    State last = p;
    write(last, x.at("k"), x.at("v"));
    read_backward(last, x.at("q"), d_o, ds, dx.at("q"));
    write_backward(x.at("k"), x.at("v"), ds, dx.at("k"), dx.at("v"));
    if (x.contains("gv")) decay_values_backward(p, x.at("gv"), ds, dx.at("gv"));
    decay_keys_backward(r, x.at("g"), ds, dx.at("g"));
  }

  // --- hgrn2: gla with k = 1 - e^g

  static Token hgrn2_as_gla(const Token& x) {
    Token y = x;
    for (Real g : x.at("g")) y["k"].push_back(-std::expm1(g));
    return y;
  }
  static Row hgrn2(const Token& x, State& s) { return gla(hgrn2_as_gla(x), s); }
  static void hgrn2_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    const Token y = hgrn2_as_gla(x);
    Token dy = zeros_like(y);
    gla_backward(y, s, d_o, ds, dy);
    for (const char* name : {"q", "v", "g"}) add(dx.at(name), dy.at(name));
    for (std::size_t i = 0; i < x.at("g").size(); ++i) {
      dx.at("g")[i] -= std::exp(x.at("g")[i]) * dy.at("k")[i];
    }
  }

  // --- mamba2_ssd: simple_gla with q = C, k = B, v = dt x, g = dt A; o += D x

  static Token mamba2_as_gla(const Token& x) {
    const Real dt = x.at("dt")[0];
    Token y{{"q", x.at("C")}, {"k", x.at("B")}, {"v", x.at("x")}, {"g", {dt * x.at("A")[0]}}};
    for (Real& v : y["v"]) v *= dt;
    return y;
  }
  static Row mamba2(const Token& x, State& s) {
    Row o = gla(mamba2_as_gla(x), s);
    for (std::size_t j = 0; j < o.size() && x.contains("D"); ++j) {
      o[j] += entry(In(x.at("D")), j) * x.at("x")[j];
    }
    return o;
  }
  static void mamba2_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    const Token y = mamba2_as_gla(x);
    Token dy = zeros_like(y);
    gla_backward(y, s, d_o, ds, dy);
    const Real dt = x.at("dt")[0];
    add(dx.at("C"), dy.at("q"));
    add(dx.at("B"), dy.at("k"));
    if (dy.at("g")[0] != 0) {  // of a reset; its A is -inf
      dx.at("dt")[0] += dy.at("g")[0] * x.at("A")[0];
      dx.at("A")[0] += dy.at("g")[0] * dt;
    }
    for (std::size_t j = 0; j < d_o.size(); ++j) {
      dx.at("dt")[0] += dy.at("v")[j] * x.at("x")[j];
      dx.at("x")[j] += dy.at("v")[j] * dt;
      if (!x.contains("D")) continue;
      dx.at("x")[j] += entry(In(x.at("D")), j) * d_o[j];
      entry(Out(dx.at("D")), j) += x.at("x")[j] * d_o[j];
    }
  }

  // --- rwkv5, rwkv6: o = (S + Diag(u) k v^T)^T r, S' = Diag(e^w) S + k v^T

  static Row rwkv6(const Token& x, State& s) {
    State bonus = s;
    write(bonus, times(x.at("u"), x.at("k")), x.at("v"));
    decay_keys(s, x.at("w"));
    write(s, x.at("k"), x.at("v"));
    return read(bonus, x.at("r"));
  }
  static void rwkv6_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    State decayed = s;
    decay_keys(decayed, x.at("w"));
    write_backward(x.at("k"), x.at("v"), ds, dx.at("k"), dx.at("v"));
    decay_keys_backward(decayed, x.at("w"), ds, dx.at("w"));
    const Row uk = times(x.at("u"), x.at("k"));
    State bonus = s, d_bonus(s.shape);
    write(bonus, uk, x.at("v"));
    read_backward(bonus, x.at("r"), d_o, d_bonus, dx.at("r"));
    Row d_uk(uk.size());
    write_backward(uk, x.at("v"), d_bonus, d_uk, dx.at("v"));
    add(dx.at("u"), times(d_uk, x.at("k")));
    add(dx.at("k"), times(d_uk, x.at("u")));
    add(ds.data, d_bonus.data);
  }

  // --- delta_rule, gated_delta_rule, gated_delta_product, kda: R = Diag(e^g) S, then for each row
  // of k, v and beta: R += k (beta (v - R^T k))^T; S' = R, o = S'^T q

  // Row i of a tensor that holds as many of them as k has keys.
  static In part(const Token& x, const char* name, std::size_t i) {
    const In all = x.at(name);
    const std::size_t size = all.size() / parts(x);
    return all.subspan(i * size, size);
  }
  static Out part(const Token& x, const char* name, std::size_t i, Token& dx) {
    const In in = part(x, name, i);
    return Out(dx.at(name)).subspan(i * in.size(), in.size());
  }
  static std::size_t parts(const Token& x) { return x.at("k").size() / x.at("q").size(); }

  // beta (v - r)
  static Row error(In beta, In v, In r) {
    Row y(v.size());
    for (std::size_t j = 0; j < y.size(); ++j) y[j] = entry(beta, j) * (v[j] - r[j]);
    return y;
  }
  static void delta_write(const Token& x, std::size_t i, State& s) {
    const In k = part(x, "k", i);
    write(s, k, error(part(x, "beta", i), part(x, "v", i), read(s, k)));
  }
  static Row delta(const Token& x, State& s) {
    if (x.contains("g")) decay_keys(s, x.at("g"));
    for (std::size_t i = 0; i < parts(x); ++i) delta_write(x, i, s);
    return read(s, x.at("q"));
  }
  static void delta_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    std::vector<State> states{s};  // before each row, and after the last
    if (x.contains("g")) decay_keys(states[0], x.at("g"));
    for (std::size_t i = 0; i < parts(x); ++i) {
      states.push_back(states[i]);
      delta_write(x, i, states.back());
    }
    read_backward(states.back(), x.at("q"), d_o, ds, dx.at("q"));
    for (std::size_t i = parts(x); i-- > 0;) {
      const In k = part(x, "k", i), v = part(x, "v", i), beta = part(x, "beta", i);
      const Out dk = part(x, "k", i, dx), dv = part(x, "v", i, dx), dbeta = part(x, "beta", i, dx);
      const Row r = read(states[i], k);
      Row dy(v.size()), dr(v.size());
      write_backward(k, error(beta, v, r), ds, dk, dy);
      for (std::size_t j = 0; j < v.size(); ++j) {
        entry(dbeta, j) += dy[j] * (v[j] - r[j]);
        dv[j] += dy[j] * entry(beta, j);
        dr[j] = -dy[j] * entry(beta, j);
      }
      read_backward(states[i], k, dr, ds, dk);
    }
    if (x.contains("g")) decay_keys_backward(states[0], x.at("g"), ds, dx.at("g"));
  }

  // --- gdn2: R = Diag(e^g) S, S' = R + k (w v - R^T (b k))^T, o = S'^T q

  static Row gdn2_error(const Token& x, const State& r) {
    return minus(times(x.at("w"), x.at("v")), read(r, times(x.at("b"), x.at("k"))));
  }
  static Row gdn2(const Token& x, State& s) {
    decay_keys(s, x.at("g"));
    write(s, x.at("k"), gdn2_error(x, s));
    return read(s, x.at("q"));
  }
  static void gdn2_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    State r = s;
    decay_keys(r, x.at("g"));
    const Row y = gdn2_error(x, r);
    State last = r;
    write(last, x.at("k"), y);
    read_backward(last, x.at("q"), d_o, ds, dx.at("q"));
    Row dy(y.size()), d_erased(x.at("k").size());
    write_backward(x.at("k"), y, ds, dx.at("k"), dy);
    add(dx.at("w"), times(dy, x.at("v")));
    add(dx.at("v"), times(dy, x.at("w")));
    read_backward(r, times(x.at("b"), x.at("k")), minus(Row(y.size()), dy), ds, d_erased);
    add(dx.at("b"), times(d_erased, x.at("k")));
    add(dx.at("k"), times(d_erased, x.at("b")));
    decay_keys_backward(r, x.at("g"), ds, dx.at("g"));
  }

  // --- comba: S' = e^g S + k (beta (v - S^T p))^T, o = S'^T q

  static Row comba(const Token& x, State& s) {
    const Row y = error(x.at("beta"), x.at("v"), read(s, x.at("p")));
    decay_keys(s, x.at("g"));
    write(s, x.at("k"), y);
    return read(s, x.at("q"));
  }
  static void comba_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    const Row r = read(s, x.at("p")), y = error(x.at("beta"), x.at("v"), r);
    State decayed = s;
    decay_keys(decayed, x.at("g"));
    State last = decayed;
    write(last, x.at("k"), y);
    read_backward(last, x.at("q"), d_o, ds, dx.at("q"));
    Row dy(y.size()), dr(y.size());
    write_backward(x.at("k"), y, ds, dx.at("k"), dy);
    for (std::size_t j = 0; j < y.size(); ++j) {
      const Real beta = entry(In(x.at("beta")), j);
      entry(Out(dx.at("beta")), j) += dy[j] * (x.at("v")[j] - r[j]);
      dx.at("v")[j] += dy[j] * beta;
      dr[j] = -dy[j] * beta;
    }
    decay_keys_backward(decayed, x.at("g"), ds, dx.at("g"));
    read_backward(s, x.at("p"), dr, ds, dx.at("p"));
  }

  // --- iplr, dplr (q, g), rwkv7 (r, w): S' = Diag(e^g) S + b (S^T a)^T + k v^T, o = S'^T q

  static Row low_rank(const Token& x, const char* query, const char* gate, State& s) {
    const Row erased = read(s, x.at("a"));
    if (x.contains(gate)) decay_keys(s, x.at(gate));
    write(s, x.at("b"), erased);
    write(s, x.at("k"), x.at("v"));
    return read(s, x.at(query));
  }
  static void low_rank_backward(const Token& x, const char* query, const char* gate, const State& s,
                                In d_o, State& ds, Token& dx) {
    const Row erased = read(s, x.at("a"));
    State decayed = s;
    if (x.contains(gate)) decay_keys(decayed, x.at(gate));
    State last = decayed;
    write(last, x.at("b"), erased);
    write(last, x.at("k"), x.at("v"));
    read_backward(last, x.at(query), d_o, ds, dx.at(query));
    write_backward(x.at("k"), x.at("v"), ds, dx.at("k"), dx.at("v"));
    Row d_erased(erased.size());
    write_backward(x.at("b"), erased, ds, dx.at("b"), d_erased);
    if (x.contains(gate)) decay_keys_backward(decayed, x.at(gate), ds, dx.at(gate));
    read_backward(s, x.at("a"), d_erased, ds, dx.at("a"));
  }
  static Row dplr(const Token& x, State& s) { return low_rank(x, "q", "g", s); }
  static void dplr_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    low_rank_backward(x, "q", "g", s, d_o, ds, dx);
  }
  static Row rwkv7(const Token& x, State& s) { return low_rank(x, "r", "w", s); }
  static void rwkv7_backward(const Token& x, const State& s, In d_o, State& ds, Token& dx) {
    low_rank_backward(x, "r", "w", s, d_o, ds, dx);
  }

  // --- sums of rows

  static void add(Out to, In x) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += x[i];
  }
  static Row times(In a, In b) {
    Row y(a.size());
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = a[i] * b[i];
    return y;
  }
  static Row minus(In a, In b) {
    Row y(a.size());
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = a[i] - b[i];
    return y;
  }
};

template <class Real>
const std::vector<typename LawTokens<Real>::Law>& LawTokens<Real>::laws() {
  static const std::vector<Law> table = {
      {"simple_gla", "q", "v", true, gla, gla_backward},
      {"gla", "q", "v", true, gla, gla_backward},
      {"hgrn2", "q", "v", true, hgrn2, hgrn2_backward},
      {"mamba2_ssd", "C", "x", false, mamba2, mamba2_backward},
      {"rwkv5", "r", "v", true, rwkv6, rwkv6_backward},
      {"rwkv6", "r", "v", true, rwkv6, rwkv6_backward},
      {"rwkv7", "r", "v", false, rwkv7, rwkv7_backward},
      {"delta_rule", "q", "v", true, delta, delta_backward},
      {"gated_delta_rule", "q", "v", true, delta, delta_backward},
      {"gated_delta_product", "q", "v", true, delta, delta_backward},
      {"kda", "q", "v", true, delta, delta_backward},
      {"gdn2", "q", "v", true, gdn2, gdn2_backward},
      {"comba", "q", "v", true, comba, comba_backward},
      {"iplr", "q", "v", true, dplr, dplr_backward},
      {"dplr", "q", "v", true, dplr, dplr_backward},
  };
  return table;
}

}  // namespace ouzel::reference
