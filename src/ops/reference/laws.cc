#include "src/ops/reference/laws.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "src/ops/reference/law_tokens.h"

namespace ouzel::reference {
namespace {

using Int = std::int64_t;

template <class Real>
class LawCall {
 public:
  using Tokens = LawTokens<Real>;
  using Row = typename Tokens::Row;
  using Token = typename Tokens::Token;
  using State = typename Tokens::State;

  explicit LawCall(const LawArguments<Real>& arguments)
      : a_(arguments),
        law_(find(arguments.law)),
        batch_(query().extent(0)),
        tokens_(query().extent(1)),
        state_heads_(value().extent(2)),
        heads_(std::max(query().extent(2), state_heads_)),
        keys_(query().extent(3)),
        values_(value().extent(3)),
        scale_(a_.scale.value_or(law_.scaled ? 1 / std::sqrt(static_cast<Real>(keys_)) : 1)) {}

  Tensors<Real> forward() const {
    Tensors<Real> r{{"o", Array<Real>({batch_, tokens_, heads_, values_})},
                    {"final_state", states()}};
    each_head([&](Int n, Int h, bool) {
      State s = state_of(a_.inputs, "initial_state", n, h);
      Token x;
      for (Int i = 0; i < a_.segments.list[static_cast<std::size_t>(n)].length; ++i) {
        const At at = place(n, i, h);
        gather(at, x);
        const Row o = law_.token(x, s);
        std::copy(o.begin(), o.end(), &r.at("o")(at.b, at.t, h, 0));
      }
      std::copy(s.data.begin(), s.data.end(), &r.at("final_state")(n, state_head(h), 0, 0));
    });
    return r;
  }

  Tensors<Real> backward(const Tensors<Real>& upstream) const {
    Tensors<Real> r{{"dh0", states()}};
    for (const auto& [name, x] : a_.inputs) {
      if (name != "initial_state") r["d" + name] = Array<Real>::like(x);
    }
    const auto d_o = upstream.find("do");
    each_head([&](Int n, Int h, bool first) {
      const Int length = a_.segments.list[static_cast<std::size_t>(n)].length;
      std::vector<Real> before;  // S_{t-1} of every token
      State s = state_of(a_.inputs, "initial_state", n, h);
      Token x, dx;
      for (Int i = 0; i < length; ++i) {
        before.insert(before.end(), s.data.begin(), s.data.end());
        gather(place(n, i, h), x);
        law_.token(x, s);
      }
      // Heads that read the same state compute it once each: its last gradient enters once.
      State ds = first ? state_of(upstream, "dht", n, h) : State({keys_, values_});
      Row zeros(static_cast<std::size_t>(values_));
      for (Int i = length; i-- > 0;) {
        const At at = place(n, i, h);
        const Real* dy = d_o == upstream.end() ? zeros.data() : &d_o->second(at.b, at.t, h, 0);
        gather(at, x);
        for (const auto& [name, numbers] : x) dx[name].assign(numbers.size(), 0);
        std::copy_n(&before[static_cast<std::size_t>(i) * s.data.size()], s.data.size(),
                    s.data.begin());
        law_.token_backward(x, s, {dy, zeros.size()}, ds, dx);
        scatter(at, dx, r);
      }
      Real* dh0 = &r.at("dh0")(n, state_head(h), 0, 0);
      for (std::size_t i = 0; i < ds.data.size(); ++i) dh0[i] += ds.data[i];
    });
    return r;
  }

  // o is linear in the values: those of token s are the unit vector of s.
  Array<Real> weights() const {
    LawArguments<Real> unit = a_;
    unit.inputs.erase("initial_state");
    Array<Real> values({batch_, tokens_, state_heads_, tokens_});
    for (Int b = 0; b < batch_; ++b) {
      for (Int s = 0; s < tokens_; ++s) {
        for (Int h = 0; h < state_heads_; ++h) values(b, s, h, s) = 1;
      }
    }
    unit.inputs[law_.value] = values;
    const Array<Real> o = LawCall(unit).forward().at("o");
    Array<Real> w({batch_, heads_, tokens_, tokens_});
    for (Int b = 0; b < batch_; ++b) {
      for (Int h = 0; h < heads_; ++h) {
        for (Int t = 0; t < tokens_; ++t) {
          for (Int s = 0; s < tokens_; ++s) w(b, h, t, s) = o(b, t, h, s);
        }
      }
    }
    return w;
  }

 private:
  // A token as an output head sees it.
  struct At {
    Int b, t, h;
  };

  static const typename Tokens::Law& find(const std::string& name) {
    for (const typename Tokens::Law& law : Tokens::laws()) {
      if (law.name == name) return law;
    }
    throw std::invalid_argument("no reference of the law " + name);
  }

  const Array<Real>& query() const { return a_.inputs.at(law_.query); }
  const Array<Real>& value() const { return a_.inputs.at(law_.value); }
  Array<Real> states() const {
    return Array<Real>({a_.segments.count(), state_heads_, keys_, values_});
  }
  Int state_head(Int h) const { return h * state_heads_ / heads_; }

  // visit(sequence, output head, whether it is the first of those that read the same state)
  template <class Visit>
  void each_head(const Visit& visit) const {
    for (Int n = 0; n < a_.segments.count(); ++n) {
      for (Int h = 0; h < heads_; ++h) {
        visit(n, h, h == 0 || state_head(h) != state_head(h - 1));
      }
    }
  }
  // The i-th token of sequence n in the order of processing.
  At place(Int n, Int i, Int h) const {
    const Segment& segment = a_.segments.list[static_cast<std::size_t>(n)];
    return {segment.batch, segment.begin + (a_.reverse ? segment.length - 1 - i : i), h};
  }
  // Zeros where there is none.
  State state_of(const Tensors<Real>& tensors, const char* name, Int n, Int h) const {
    State s({keys_, values_});
    const auto given = tensors.find(name);
    if (given == tensors.end() || !given->second.present()) return s;
    std::copy_n(&given->second(n, state_head(h), 0, 0), s.data.size(), s.data.begin());
    return s;
  }

  // The rows of a token in a tensor: where the first begins, how far apart they are, their length.
  struct Rows {
    std::size_t first = 0, step = 0, size = 1, count = 1;
  };
  Rows rows(const Array<Real>& x, const At& at) const {
    const std::size_t axis = x.rank() >= 3 ? 2 : 0;  // of heads
    Rows r;
    for (std::size_t i = axis + 1; i < x.rank(); ++i)
      r.size *= static_cast<std::size_t>(x.extent(i));
    const Int heads = x.extent(axis), head = at.h * heads / heads_;
    const Int count = axis == 2 ? x.extent(1) / tokens_ : 1;
    const Int row = axis == 2 ? at.b * x.extent(1) + at.t * count : 0;
    r.first = static_cast<std::size_t>(row * heads + head) * r.size;
    r.step = static_cast<std::size_t>(heads) * r.size;
    r.count = static_cast<std::size_t>(count);
    return r;
  }
  bool is_normalized(std::string_view name) const {
    return a_.l2norm && (name == "q" || name == "k" || name == "p");
  }
  Real factor(std::string_view name) const { return name == law_.query ? scale_ : Real(1); }
  static Real norm(const Real* x, std::size_t size) {
    Real sum = Real(1e-6L);
    for (std::size_t i = 0; i < size; ++i) sum += x[i] * x[i];
    return std::sqrt(sum);
  }

  // `token`: of this head, or empty.
  void gather(const At& at, Token& token) const {
    for (const auto& [name, x] : a_.inputs) {
      if (name == "initial_state" || !x.present()) continue;
      const Rows r = rows(x, at);
      Row& row = token[name];
      row.clear();
      for (std::size_t n = 0; n < r.count; ++n) {
        const Real* from = &x.data[r.first + n * r.step];
        const Real divisor = is_normalized(name) ? norm(from, r.size) : Real(1);
        for (std::size_t i = 0; i < r.size; ++i) row.push_back(factor(name) * from[i] / divisor);
      }
    }
  }
  // The reverse of `gather`: adds the gradients of a token to those of the tensors.
  void scatter(const At& at, const Token& d_token, Tensors<Real>& gradients) const {
    for (const auto& [name, all] : d_token) {
      const std::string input(name);
      const Array<Real>& x = a_.inputs.at(input);
      const Rows r = rows(x, at);
      const Real* dy = all.data();
      std::vector<Real>& to = gradients.at("d" + input).data;
      for (std::size_t n = 0; n < r.count; ++n, dy += r.size) {
        const Real* from = &x.data[r.first + n * r.step];
        Real* dx = &to[r.first + n * r.step];
        if (!is_normalized(name)) {
          for (std::size_t i = 0; i < r.size; ++i) dx[i] += factor(name) * dy[i];
          continue;
        }
        // y = x / |x|: dx = (dy - y (y . dy)) / |x|
        const Real length = norm(from, r.size);
        Real along = 0;
        for (std::size_t i = 0; i < r.size; ++i) along += from[i] / length * dy[i];
        for (std::size_t i = 0; i < r.size; ++i) {
          dx[i] += factor(name) * (dy[i] - from[i] / length * along) / length;
        }
      }
    }
  }

  const LawArguments<Real>& a_;
  const typename Tokens::Law& law_;
  Int batch_, tokens_, state_heads_, heads_, keys_, values_;
  Real scale_;
};

}  // namespace

std::vector<std::string> law_names() {
  std::vector<std::string> names;
  for (const auto& law : LawTokens<double>::laws()) names.push_back(law.name);
  return names;
}

template <class Real>
Tensors<Real> law(const LawArguments<Real>& arguments) {
  return LawCall<Real>(arguments).forward();
}
template <class Real>
Tensors<Real> law_backward(const LawArguments<Real>& arguments, const Tensors<Real>& upstream) {
  return LawCall<Real>(arguments).backward(upstream);
}
template <class Real>
Array<Real> law_weights(const LawArguments<Real>& arguments) {
  return LawCall<Real>(arguments).weights();
}

#define OUZEL_INSTANTIATE(Real)                                                         \
  template Tensors<Real> law(const LawArguments<Real>&);                                \
  template Tensors<Real> law_backward(const LawArguments<Real>&, const Tensors<Real>&); \
  template Array<Real> law_weights(const LawArguments<Real>&);
OUZEL_INSTANTIATE(double)
OUZEL_INSTANTIATE(long double)
#undef OUZEL_INSTANTIATE

}  // namespace ouzel::reference
