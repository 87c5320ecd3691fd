// The engine's backward over rows against an adjoint in float64, which is itself checked against
// the complex step of the recurrence; every kind, pairwise.
#include "src/ops/rows_backward.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/compare.h"
#include "tests/pairwise.h"
#include "tests/random_arrays.h"
#include "tests/rows_adjoint.h"

namespace ouzel::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

float narrow(double x) { return static_cast<float>(x); }

// Rows of a problem for the engine, and its gradients back.
class Rows : public RowSource, public RowAdjoint {
 public:
  explicit Rows(const Problem& p) : p_(p), grads_(zeros_like(p.in)) {}

  std::int64_t tokens() const override { return p_.tokens; }
  void pack(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) override {
    ASSERT_EQ(column, 0);
    ASSERT_EQ(columns, p_.kind.values);
    const std::int64_t n = p_.kind.rows_per_token, K = p_.kind.keys, V = p_.kind.values;
    const std::int64_t count = rows.tokens * n;
    for (std::int64_t i = 0; rows.q != nullptr && i < p_.kind.queries; ++i) {
      copy(p_.in.q, i * p_.tokens + first, rows.tokens, K,
           rows.q + i * rows.tokens * rows.key_pitch, rows.key_pitch);
    }
    copy(p_.in.k, first * n, count, K, rows.k, rows.key_pitch);
    copy(p_.in.v, first * n, count, V, rows.v, rows.value_pitch);
    copy(p_.in.g, first * n, count, p_.gates(), rows.g, p_.kind.decay_per_key ? rows.key_pitch : 1);
    copy(p_.in.gv, first * n, count, V, rows.gv, rows.value_pitch);
    copy(p_.in.e, first * n, count, K, rows.e, rows.key_pitch);
    copy(p_.in.b, first * n, count, K, rows.b, rows.key_pitch);
    copy(p_.in.c, first * n, count, p_.strengths(), rows.c,
         p_.kind.strength_per_value ? rows.value_pitch : 1);
    copy(p_.in.u, 0, 1, K, rows.u, rows.key_pitch);
  }
  float* output(std::int64_t, std::int64_t, std::int64_t, std::int64_t&) override {
    return nullptr;
  }
  void pack_output_grads(std::int64_t first, std::int64_t tokens, std::int64_t value_pitch,
                         float* d_o) override {
    for (std::int64_t i = 0; i < p_.kind.queries; ++i) {
      copy(p_.output_grad, i * p_.tokens + first, tokens, p_.kind.values,
           d_o + i * tokens * value_pitch, value_pitch);
    }
  }
  void unpack(std::int64_t first, const LawRows& rows, const LawRows& grads) override {
    const std::int64_t n = p_.kind.rows_per_token, K = p_.kind.keys, V = p_.kind.values;
    const std::int64_t count = rows.tokens * n;
    EXPECT_LT(first, last_);  // chunks come last first
    last_ = first;
    for (std::int64_t i = 0; i < p_.kind.queries; ++i) {
      take(grads.q + i * rows.tokens * rows.key_pitch, rows.key_pitch, rows.tokens, K, grads_.q,
           i * p_.tokens + first);
    }
    take(grads.k, rows.key_pitch, count, K, grads_.k, first * n);
    take(grads.v, rows.value_pitch, count, V, grads_.v, first * n);
    take(grads.g, p_.kind.decay_per_key ? rows.key_pitch : 1, count, p_.gates(), grads_.g,
         first * n);
    take(grads.gv, rows.value_pitch, count, V, grads_.gv, first * n);
    take(grads.e, rows.key_pitch, count, K, grads_.e, first * n);
    take(grads.b, rows.key_pitch, count, K, grads_.b, first * n);
    take(grads.c, p_.kind.strength_per_value ? rows.value_pitch : 1, count, p_.strengths(),
         grads_.c, first * n);
    take(grads.u, rows.key_pitch, 1, K, grads_.u, 0);
  }

  Arrays& grads() { return grads_; }

 private:
  static void copy(const Numbers& from, std::int64_t first, std::int64_t rows, std::int64_t n,
                   float* to, std::int64_t pitch) {
    if (from.empty()) return;
    for (std::int64_t t = 0; t < rows; ++t, to += pitch) {
      std::transform(row_of(from, first + t, n), row_of(from, first + t + 1, n), to, narrow);
      std::fill(to + n, to + pitch, 0.0f);
    }
  }
  // u's gradients add up over chunks; all others are written once.
  static void take(const float* from, std::int64_t pitch, std::int64_t rows, std::int64_t n,
                   Numbers& to, std::int64_t first) {
    if (to.empty()) return;
    for (std::int64_t t = 0; t < rows; ++t, from += pitch) {
      for (std::int64_t i = 0; i < n; ++i) row_of(to, first + t, n)[i] += from[i];
    }
  }

  const Problem& p_;
  Arrays grads_;
  std::int64_t last_ = std::numeric_limits<std::int64_t>::max();
};

struct StateUse {
  bool initial, final_grad, initial_grad;
};

Arrays engine(const Problem& p, Isa isa, const StateUse& use) {
  ContextOptions options;
  options.threads = 1;
  options.isa = isa;
  options.poison_scratch = true;
  Context context(options);
  Context::Impl& impl = context.impl();
  impl.reserve(rows_backward_scratch(p.kind, p.tokens, false));
  Rows rows(p);
  std::vector<float> state(p.in.state.size()), final_grad(p.final_grad.size());
  std::transform(p.in.state.begin(), p.in.state.end(), state.begin(), narrow);
  std::transform(p.final_grad.begin(), p.final_grad.end(), final_grad.begin(), narrow);
  // V first, so that both strides matter.
  std::vector<float> initial_grad(state.size(), std::numeric_limits<float>::quiet_NaN());
  const std::int64_t K = p.kind.keys, V = p.kind.values;
  const StateMemory<const float> from{use.initial ? state.data() : nullptr, nullptr, V, 1};
  const StateMemory<const float> up{use.final_grad ? final_grad.data() : nullptr, nullptr, V, 1};
  const StateMemory<float> down{use.initial_grad ? initial_grad.data() : nullptr, nullptr, 1, K};
  impl.run(1, [&](std::int64_t, Scratch& scratch) {
    rows_backward(isa, p.kind, rows, rows, from, 0, up, down, scratch);
  });
  for (std::int64_t i = 0; use.initial_grad && i < K; ++i) {
    for (std::int64_t j = 0; j < V; ++j) {
      rows.grads().state[static_cast<std::size_t>(i * V + j)] =
          initial_grad[static_cast<std::size_t>(j * K + i)];
    }
  }
  return rows.grads();
}

reference::Array<double> array_of(const Numbers& x) {
  reference::Array<double> array({static_cast<std::int64_t>(x.size())});
  array.data = x;
  return array;
}

void expect_engine(const Problem& p, Isa isa, const StateUse& use, const Bounds& bounds) {
  Arrays truth = adjoint(p);
  const Arrays got = engine(p, isa, use);
  Comparison comparison;
  truth.each(got, [&](const char* name, const Numbers& x, const Numbers& y) {
    if (x.empty() || (!use.initial_grad && std::string(name) == "state")) return;
    comparison.gradient(name, array_of(y), array_of(x));
  });
  comparison.expect_within(bounds_on(isa, bounds));
}

enum class Gates { kNone, kWeak, kMild, kStrong, kUnderflow, kMixed, kResets };

double gate(Random& random, Gates gates) {
  switch (gates) {
    case Gates::kNone:
      return 0;
    case Gates::kWeak:
      return narrow(-1e-5);
    case Gates::kMild:
      return random.uniform(-0.5, 0);
    case Gates::kStrong:
      return -20;
    case Gates::kUnderflow:
      return -1000;
    case Gates::kMixed: {
      const double values[] = {-0.01, -1, -3, -20};
      return narrow(values[random.integer(0, 3)]);
    }
    case Gates::kResets:
      return random.integer(0, 9) == 0 ? -kInf : random.uniform(-0.2, 0);
  }
  return 0;
}

Problem problem(const RowsKind& kind, std::int64_t tokens, Gates gates, const StateUse& use,
                std::uint64_t seed) {
  Random random(seed);
  Problem p;
  p.kind = kind;
  p.tokens = tokens;
  const auto fill = [&](Numbers& x, bool wanted, std::int64_t count, double lo, double hi) {
    x.resize(static_cast<std::size_t>(wanted ? count : 0));
    for (double& value : x) value = random.uniform(lo, hi);
  };
  const std::int64_t K = kind.keys, V = kind.values, rows = p.rows();
  fill(p.in.q, true, kind.queries * tokens * K, -1, 1);
  fill(p.in.k, true, rows * K, -1, 1);
  fill(p.in.v, true, rows * V, -1, 1);
  fill(p.in.g, kind.decay, rows * p.gates(), 0, 0);
  fill(p.in.gv, kind.value_decay, rows * V, 0, 0);
  fill(p.in.e, p.erases(), rows * K, 0, 0);
  fill(p.in.b, p.general(), rows * K, 0, 0);
  fill(p.in.c, p.erases() && !p.general(), rows * p.strengths(), 0.1, 1);
  fill(p.in.u, kind.bonus, K, -1, 1);
  fill(p.in.state, true, K * V, -1, 1);
  fill(p.output_grad, true, kind.queries * tokens * V, -1, 1);
  fill(p.final_grad, true, K * V, -1, 1);
  if (!use.initial) p.in.state.assign(p.in.state.size(), 0.0);
  if (!use.final_grad) p.final_grad.assign(p.final_grad.size(), 0.0);
  for (double& x : p.in.g) x = gate(random, gates);
  for (double& x : p.in.gv) x = gate(random, gates);
  // Contractive: keys of length 1, erased nearly where it is written.
  for (std::int64_t t = 0; p.erases() && t < rows; ++t) {
    double* k = row_of(p.in.k, t, K);
    double square = 0;
    for (std::int64_t i = 0; i < K; ++i) square += k[i] * k[i];
    for (std::int64_t i = 0; i < K; ++i) {
      k[i] = narrow(k[i] / std::sqrt(square + 1e-6));
      row_of(p.in.e, t, K)[i] = narrow(k[i] * random.uniform(0.9, 1));
      if (p.general()) row_of(p.in.b, t, K)[i] = narrow(-k[i] * random.uniform(0.5, 1));
    }
  }
  return p;
}

const StateUse kAllStates{true, true, true};

std::vector<RowsKind> erase_kinds(const RowsKind& base) {
  std::vector<RowsKind> kinds{base};
  for (EraseKind erase : {EraseKind::kCollinear, EraseKind::kGeneral}) {
    for (bool decayed : {true, false}) {
      RowsKind kind = base;
      kind.erase = erase;
      kind.erase_decayed = decayed;
      kinds.push_back(kind);
    }
  }
  return kinds;
}

TEST(RowsBackward, AdjointIsTheComplexStep) {
  for (int i = 0; i < 16; ++i) {
    RowsKind base;
    base.keys = 5;
    base.values = 3;
    base.decay = i % 2 == 1;
    base.decay_per_key = i % 4 == 3;
    base.value_decay = i / 4 % 2 == 1;
    base.bonus = i / 8 == 1;
    base.rows_per_token = base.bonus ? 1 : 2;
    base.queries = 1 + i % 3;
    base.strength_per_value = i % 3 == 0;
    for (const RowsKind& kind : erase_kinds(base)) {
      const Problem p = problem(kind, 7, Gates::kMild, kAllStates, 5);
      Arrays grads = adjoint(p);
      Random random(9);
      for (const char* wanted : {"q", "k", "v", "g", "gv", "e", "b", "c", "u", "state"}) {
        Arrays step = zeros_like(p.in);
        double expected = 0;
        step.each(grads, [&](const std::string& name, Numbers& x, const Numbers& grad) {
          for (std::size_t n = 0; name == wanted && n < x.size(); ++n) {
            x[n] = random.uniform(-1, 1);
            expected += x[n] * grad[n];
          }
        });
        using Complex = std::complex<double>;
        const double got = loss<Complex>(p, p.in, step, Complex(0, 1e-30), nullptr).imag() / 1e-30;
        EXPECT_NEAR(got, expected, 1e-12 * (1 + std::abs(expected))) << wanted << " of kind " << i;
      }
    }
  }
}

TEST(RowsBackward, EveryKindPairwise) {
  const std::vector<std::int64_t> lengths{0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 200};
  const std::vector<std::int64_t> sizes{1, 3, 16, 24, 60, 64, 100, 128};
  const std::vector<Isa> isas = supported_isas();
  // decay, value decay, erase, strength per value, bonus, rows, queries, T, K, V, gates, states,
  // ISA
  const std::vector<std::size_t> axes{
      3, 2, 5, 2, 2, 3, 2, lengths.size(), sizes.size(), sizes.size(), 7, 8, isas.size()};
  const auto rows =
      pairwise(axes, [](const Row& r) { return r[4] == 0 || (r[5] == 0 && r[2] == 0); });
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const Row& r = rows[n];
    RowsKind base;
    base.decay = r[0] > 0;
    base.decay_per_key = r[0] == 2;
    base.value_decay = r[1] == 1;
    base.strength_per_value = r[3] == 1;
    base.bonus = r[4] == 1;
    base.rows_per_token = static_cast<std::int64_t>(r[5]) + 1;
    base.queries = static_cast<std::int64_t>(r[6]) + 1;
    base.keys = sizes[r[8]];
    base.values = sizes[r[9]];
    const RowsKind kind = erase_kinds(base)[r[2]];
    const StateUse use{(r[11] & 1) != 0, (r[11] & 2) != 0, (r[11] & 4) != 0};
    const Problem p = problem(kind, lengths[r[7]], static_cast<Gates>(r[10]), use, n);
    SCOPED_TRACE(::testing::Message()
                 << "decay " << r[0] << " value decay " << r[1] << " erase " << r[2]
                 << " per value " << r[3] << " bonus " << r[4] << " rows " << base.rows_per_token
                 << " queries " << base.queries << " T " << p.tokens << " K " << kind.keys << " V "
                 << kind.values << " gates " << r[10] << " states " << r[11] << " "
                 << name_of(isas[r[12]]));
    expect_engine(p, isas[r[12]], use, kFloat32);
  }
}

// The first-tier laws at their usual sizes, on every instruction set.
TEST(RowsBackward, LargeHeads) {
  for (Isa isa : supported_isas()) {
    for (std::int64_t size : {64, 128}) {
      for (int decay = 0; decay < 3; ++decay) {
        RowsKind base;
        base.keys = base.values = size;
        base.decay = decay > 0;
        base.decay_per_key = decay == 2;
        for (const RowsKind& kind : erase_kinds(base)) {
          for (Gates gates : {Gates::kMild, Gates::kMixed}) {
            SCOPED_TRACE(::testing::Message()
                         << name_of(isa) << " " << size << " decay " << decay << " erase "
                         << static_cast<int>(kind.erase) << kind.erase_decayed);
            expect_engine(problem(kind, isa == Isa::kPortable ? 20 : 130, gates, kAllStates, 3),
                          isa, kAllStates, kFloat32);
          }
        }
      }
    }
  }
}

// A reset drops what was before it, NaN too: in the state, and in the gradient that flows back.
TEST(RowsBackward, ResetsDropNaN) {
  for (Isa isa : supported_isas()) {
    for (int per = 0; per < 3; ++per) {  // per head, key or value
      RowsKind kind;
      kind.keys = 20;
      kind.values = 12;
      kind.decay = per < 2;
      kind.decay_per_key = per == 1;
      kind.value_decay = per == 2;
      Problem p = problem(kind, 70, Gates::kMild, kAllStates, 3);
      Numbers& gates = per == 2 ? p.in.gv : p.in.g;
      const std::size_t width = gates.size() / 70;
      std::fill_n(gates.begin(), width, -kInf);
      std::fill(gates.end() - static_cast<std::ptrdiff_t>(width), gates.end(), -kInf);
      p.in.state.assign(p.in.state.size(), std::nan(""));
      p.final_grad.assign(p.final_grad.size(), std::nan(""));
      const Arrays got = engine(p, isa, kAllStates);
      for (double x : got.state) EXPECT_EQ(x, 0);
      for (double x : got.q) EXPECT_TRUE(std::isfinite(x));
      EXPECT_TRUE(std::isnan(got.k.back()));
      for (std::size_t i = 0; i < 69 * 20; ++i) EXPECT_TRUE(std::isfinite(got.k[i]));
      expect_engine(p, isa, kAllStates, kFloat32);
    }
  }
}

// Sums of nearly equal numbers over thousands of tokens: a plain float32 sum would be off by 4e-5.
TEST(RowsBackward, LongSumsStayExact) {
  for (Isa isa : supported_isas()) {
    for (int decay = 0; decay < 3; ++decay) {
      for (bool bonus : {false, true}) {
        RowsKind kind;
        kind.keys = kind.values = 4;
        kind.decay = decay > 0;
        kind.decay_per_key = decay == 2;
        kind.bonus = bonus;
        Problem p = problem(kind, 20000, Gates::kNone, kAllStates, 3);
        Random random(1);
        for (double& x : p.in.g) x = narrow(-1e-6);
        for (Numbers* x : {&p.in.q, &p.in.k, &p.in.v, &p.output_grad, &p.in.state}) {
          for (double& value : *x) value = random.uniform(0.32, 0.34);
        }
        SCOPED_TRACE(::testing::Message() << name_of(isa) << " " << decay << " " << bonus);
        expect_engine(p, isa, kAllStates, kAnyInput);
      }
    }
  }
}

}  // namespace
}  // namespace ouzel::test
