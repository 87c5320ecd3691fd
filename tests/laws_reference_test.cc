// The float64 references of the laws against what they must be: their gradients against central
// differences in long double, what one law says in the words of another, special cases.
#include "src/ops/reference/laws.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/central_differences.h"
#include "tests/random_arrays.h"

namespace ouzel::reference {
namespace {

using test::dot;
using test::expect_near;
using test::Random;
using test::random_array;
using Real = long double;
using Reals = Array<Real>;
using Int = std::int64_t;

constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

struct Case {
  std::string name, law;
  // Inputs and their extents: B batch, T tokens, P two rows a token, Q, H, U heads of queries, keys
  // and values, K, V sizes.
  std::string inputs;
  bool segments = false, states = false, reverse = false, l2norm = false, hard = false;
  Int queries = 2, keys = 2, values = 2;
};

const std::string kQkv = "q:BTQK k:BTHK v:BTUV ";
const std::string kRkv = "r:BTQK k:BTHK v:BTUV ";

std::vector<Case> cases() {
  std::vector<Case> list = {
      {"simple_gla", "simple_gla", kQkv + "g:BTU"},
      {"gla", "gla", kQkv + "g:BTUK"},
      {"gla with gv", "gla", kQkv + "g:BTUK gv:BTUV"},
      {"hgrn2", "hgrn2", "q:BTQK v:BTUV g:BTUK"},
      {"mamba2_ssd", "mamba2_ssd", "C:BTQK B:BTHK x:BTUV dt:BTU A:U D:U"},
      {"mamba2_ssd without D", "mamba2_ssd", "C:BTQK B:BTHK x:BTUV dt:BTU A:U"},
      {"rwkv5", "rwkv5", kRkv + "w:UK u:UK"},
      {"rwkv6", "rwkv6", kRkv + "w:BTUK u:UK"},
      {"rwkv7", "rwkv7", kRkv + "w:BTUK a:BTUK b:BTUK"},
      {"delta_rule", "delta_rule", kQkv + "beta:BTU"},
      {"delta_rule with beta per value", "delta_rule", kQkv + "beta:BTUV"},
      {"gated_delta_rule", "gated_delta_rule", kQkv + "g:BTU beta:BTU"},
      {"gated_delta_product", "gated_delta_product", "q:BTQK k:BPHK v:BPUV g:BTU beta:BPU"},
      {"gated_delta_product without g", "gated_delta_product", "q:BTQK k:BPHK v:BPUV beta:BPU"},
      {"kda", "kda", kQkv + "g:BTUK beta:BTU"},
      {"gdn2", "gdn2", kQkv + "g:BTUK b:BTUK w:BTUV"},
      {"comba", "comba", kQkv + "p:BTHK g:BTU beta:BTU"},
      {"iplr", "iplr", kQkv + "a:BTHK b:BTHK"},
      {"dplr", "dplr", kQkv + "g:BTUK a:BTHK b:BTHK"},
  };
  const std::size_t laws = list.size();
  for (std::size_t i = 0; i < laws; ++i) {
    Case c = list[i];
    c.name += ", packed, harsh gates";
    c.segments = c.states = c.hard = true;
    list.push_back(c);
    c = list[i];
    c.name += ", more values, reverse";
    c.states = c.reverse = c.l2norm = true;
    c.values = 4;
    list.push_back(c);
    c = list[i];
    c.name += ", more queries";
    c.states = true;
    c.queries = 4;
    c.keys = 1;
    list.push_back(c);
  }
  return list;
}

bool is_gate(const Case& c, const std::string& name) {
  return name == "g" || name == "gv" || name == "A" || (name == "w" && c.law.starts_with("rwkv"));
}

Reals draw(const Case& c, const std::string& name, const std::vector<Int>& shape, Random& random) {
  if (is_gate(c, name) && c.hard && name != "A") {
    const Real all[] = {0, -1e-5L, -0.3L, -20, -1000, -kInfinity};
    Reals x(shape);
    for (Real& g : x.data) g = all[random.bits() % 6];
    return x;
  }
  if (is_gate(c, name)) return random_array<Real>(random, shape, -2, -0.01);
  if (name == "dt" || name == "beta") return random_array<Real>(random, shape, 0.1, 1.5);
  return random_array<Real>(random, shape);
}

LawArguments<Real> arguments_of(const Case& c, Random& random) {
  LawArguments<Real> a;
  const Int batch = c.segments ? 1 : 2, tokens = c.segments ? 9 : 4;
  // Packed: an empty sequence, one of one token, a gap of one row that belongs to none.
  a.segments = c.segments ? Segments{{{0, 0, 4}, {0, 4, 0}, {0, 4, 1}, {0, 6, 3}}}
                          : Segments::whole(batch, tokens);
  a.law = c.law;
  a.reverse = c.reverse;
  a.l2norm = c.l2norm;
  const std::map<char, Int> extents{{'B', batch},     {'T', tokens}, {'P', 2 * tokens},
                                    {'Q', c.queries}, {'H', c.keys}, {'U', c.values},
                                    {'K', 3},         {'V', 2}};
  for (std::size_t at = 0; at < c.inputs.size();) {
    const std::string word = c.inputs.substr(at, c.inputs.find(' ', at) - at);
    at += word.size() + 1;
    const std::string name = word.substr(0, word.find(':'));
    std::vector<Int> shape;
    for (const char letter : word.substr(name.size() + 1)) shape.push_back(extents.at(letter));
    a.inputs[name] = draw(c, name, shape, random);
  }
  if (c.states) {
    a.inputs["initial_state"] = random_array<Real>(random, {a.segments.count(), c.values, 3, 2});
  }
  return a;
}

Tensors<Real> upstream_of(const LawArguments<Real>& a, Random& random) {
  const Tensors<Real> r = law(a);
  return {{"do", random_array<Real>(random, r.at("o").shape)},
          {"dht", random_array<Real>(random, r.at("final_state").shape)}};
}

TEST(ReferenceLaws, GradientsAreThoseOfCentralDifferences) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Random random(21);
    LawArguments<Real> a = arguments_of(c, random);
    const Tensors<Real> upstream = upstream_of(a, random), gradients = law_backward(a, upstream);
    const auto loss = [&] {
      const Tensors<Real> r = law(a);
      return dot(r.at("o"), upstream.at("do")) + dot(r.at("final_state"), upstream.at("dht"));
    };
    for (auto& [name, x] : a.inputs) {
      const Reals& gradient = gradients.at(name == "initial_state" ? "dh0" : "d" + name);
      test::expect_gradient(name, x, gradient, loss);
    }
  }
}

TEST(ReferenceLaws, RowsOutsideSegmentsAreNotReadAndEmptySequencesHandTheirStateOn) {
  for (const Case& c : cases()) {
    if (!c.segments) continue;
    SCOPED_TRACE(c.name);
    Random random(22);
    LawArguments<Real> a = arguments_of(c, random);
    for (auto& [name, x] : a.inputs) {
      if (x.rank() < 3 || name == "initial_state") continue;
      const std::size_t row = x.data.size() / 9;
      std::fill_n(x.data.begin() + static_cast<std::ptrdiff_t>(5 * row), row, std::nanl(""));
    }
    const Tensors<Real> r = law(a);
    const Reals& o = r.at("o");
    for (Int i = 0; i < o.extent(1); ++i) {
      EXPECT_FALSE(std::isnan(o(0, i, 0, 0))) << i;
      EXPECT_EQ(o(0, i, 0, 0) == 0, i == 5) << i;
    }
    const Reals &s0 = a.inputs.at("initial_state"), &s = r.at("final_state");
    for (Int h = 0; h < 2; ++h) EXPECT_EQ(s(1, h, 2, 1), s0(1, h, 2, 1));
  }
}

// A gate of -inf forgets even NaN, unless an erase reads the state before it decays.
TEST(ReferenceLaws, ResetsForgetEverything) {
  for (const Case& c : cases()) {
    const bool reads_undecayed = c.law == "comba" || c.law == "dplr" || c.law == "rwkv7";
    if (c.segments || !c.states || reads_undecayed) continue;
    Random random(23);
    LawArguments<Real> a = arguments_of(c, random);
    const char* gate = c.law.starts_with("rwkv") ? "w" : c.law == "mamba2_ssd" ? "A" : "g";
    if (!a.inputs.contains(gate)) continue;
    SCOPED_TRACE(c.name);
    for (Real& g : a.inputs.at(gate).data) g = -kInfinity;
    const Reals clean = law(a).at("final_state");
    for (Real& s : a.inputs.at("initial_state").data) s = std::nanl("");
    expect_near(law(a).at("final_state"), clean, 0);
  }
}

// --- one law in the words of another

// The inputs of a plain case of a law, renamed or replaced by `change`, under another law.
void expect_same(const std::string& name, const std::string& other,
                 const std::function<void(Tensors<Real>&)>& change) {
  for (const Case& c : cases()) {
    if (c.name != name) continue;
    SCOPED_TRACE(name + " as " + other);
    Random random(24);
    LawArguments<Real> a = arguments_of(c, random), b = a;
    b.law = other;
    change(b.inputs);
    const Tensors<Real> x = law(a), y = law(b);
    expect_near(x.at("o"), y.at("o"), 1e-17);
    expect_near(x.at("final_state"), y.at("final_state"), 1e-17);
  }
}

// [B, T, H] as [B, T, H, size], or the same number for every key of parameters.
Reals spread(const Reals& x, Int size) {
  std::vector<Int> shape = x.shape;
  shape.push_back(size);
  Reals y(shape);
  for (std::size_t i = 0; i < y.data.size(); ++i) {
    y.data[i] = x.data[i / static_cast<std::size_t>(size)];
  }
  return y;
}

TEST(ReferenceLaws, SayTheSameInEachOthersWords) {
  const auto zeros = [](Tensors<Real>& x, const char* name) { x[name] = Reals(x.at("q").shape); };
  expect_same("simple_gla", "gla", [](auto& x) { x["g"] = spread(x["g"], 3); });
  expect_same("gated_delta_rule", "kda", [](auto& x) { x["g"] = spread(x["g"], 3); });
  expect_same("gated_delta_rule", "gated_delta_product", [](auto&) {});
  expect_same("delta_rule", "gated_delta_rule", [](auto& x) { x["g"] = Reals(x["beta"].shape); });
  expect_same("delta_rule", "delta_rule", [](auto& x) { x["beta"] = spread(x["beta"], 2); });
  expect_same("kda", "gdn2", [](auto& x) {
    x["b"] = spread(x["beta"], 3);
    x["w"] = spread(x["beta"], 2);
    x.erase("beta");
  });
  // No decay: the erase reads the same state before and after.
  expect_same("delta_rule", "comba", [](auto& x) {
    x["g"] = Reals(x["beta"].shape);
    x["p"] = x["k"];
  });
  expect_same("delta_rule", "iplr", [](auto& x) {
    x["a"] = x["b"] = x["k"];
    const Reals beta = x["beta"];
    for (std::size_t i = 0; i < beta.data.size(); ++i) {
      for (std::size_t j = 0; j < 3; ++j) x["b"].data[3 * i + j] *= -beta.data[i];
      for (std::size_t j = 0; j < 2; ++j) x["v"].data[2 * i + j] *= beta.data[i];
    }
    x.erase("beta");
  });
  expect_same("gla", "dplr", [&](auto& x) {
    zeros(x, "a");
    zeros(x, "b");
  });
}

// --- numbers worked out by hand

// Two tokens of one key and one value.
Reals two(Real first, Real second, std::size_t rank = 4) {
  Reals x(rank == 4 ? std::vector<Int>{1, 2, 1, 1} : std::vector<Int>{1, 2, 1});
  x.data = {first, second};
  return x;
}
Reals one(Real x) {
  Reals y({1, 1});
  y.data = {x};
  return y;
}
std::vector<Real> outputs(const std::string& name, Tensors<Real> inputs) {
  LawArguments<Real> a;
  a.law = name;
  a.inputs = std::move(inputs);
  a.segments = Segments::whole(1, 2);
  return law(a).at("o").data;
}
void expect_outputs(const std::vector<Real>& o, Real first, Real second) {
  EXPECT_NEAR(static_cast<double>(o[0]), static_cast<double>(first), 1e-16);
  EXPECT_NEAR(static_cast<double>(o[1]), static_cast<double>(second), 1e-16);
}

TEST(ReferenceLaws, AreTheirEquations) {
  const Real half = -std::log(2.0L);  // e^half = 1/2
  const Tensors<Real> qkv{{"q", two(1, 1)}, {"k", two(2, 3)}, {"v", two(5, 7)}};
  const auto with = [](Tensors<Real> x, const Tensors<Real>& more) {
    x.insert(more.begin(), more.end());
    return x;
  };
  const Reals halves = two(half, half, 3), half_a_key = two(half, half),
              quarter = two(0.25, 0.25, 3);
  // S: 10, 10/2 + 21.
  expect_outputs(outputs("simple_gla", with(qkv, {{"g", halves}})), 10, 26);
  expect_outputs(outputs("gla", with(qkv, {{"g", half_a_key}, {"gv", half_a_key}})), 10, 23.5L);
  // k = 1/2: 2.5, 1.25 + 3.5.
  expect_outputs(outputs("hgrn2", {{"q", two(1, 1)}, {"g", half_a_key}, {"v", two(5, 7)}}), 2.5L,
                 4.75L);
  // v = dt x = 10, 14; g = dt A: 20, 20/4 + 42; D x = 50, 70.
  Reals a({1}), d({1});
  a.data = {half};
  d.data = {10};
  expect_outputs(outputs("mamba2_ssd", {{"C", two(1, 1)},
                                        {"B", two(2, 3)},
                                        {"x", two(5, 7)},
                                        {"dt", two(2, 2, 3)},
                                        {"A", a},
                                        {"D", d}}),
                 70, 117);
  // Read before the write, with a bonus of 4: 40, 10 + 84; then S = 5 + 21, unread.
  const Tensors<Real> rkv{{"r", two(1, 1)}, {"k", two(2, 3)}, {"v", two(5, 7)}};
  expect_outputs(outputs("rwkv6", with(rkv, {{"w", half_a_key}, {"u", one(4)}})), 40, 94);
  expect_outputs(outputs("rwkv5", with(rkv, {{"w", one(half)}, {"u", one(4)}})), 40, 94);
  // S = 2 (1/4) 5 = 2.5; the error 7 - 3 S = -0.5: S - 0.375, or with S = 1.25: 1.25 + 2.4375.
  expect_outputs(outputs("delta_rule", with(qkv, {{"beta", quarter}})), 2.5L, 2.125L);
  const Tensors<Real> gated = with(qkv, {{"beta", quarter}, {"g", halves}});
  expect_outputs(outputs("gated_delta_rule", gated), 2.5L, 3.6875L);
  expect_outputs(outputs("kda", with(qkv, {{"beta", quarter}, {"g", half_a_key}})), 2.5L, 3.6875L);
  // The erase reads 2.5: 1.25 + 3 (1/4) (7 - 2.5 p), p = 2.
  expect_outputs(outputs("comba", with(gated, {{"p", two(2, 2)}})), 2.5L, 2.75L);
  // k (w v - S b k): 2 (0.5) 5 = 5; 2.5 + 3 (3.5 - 2.5 (0.25) 3).
  expect_outputs(
      outputs("gdn2", with(qkv, {{"g", half_a_key}, {"b", two(0.25, 0.25)}, {"w", two(0.5, 0.5)}})),
      5, 7.375L);
  // S/2 + b S a + k v: 10; 5 + (-0.1) 10 (2) + 21.
  const Tensors<Real> ab{{"a", two(2, 2)}, {"b", two(-0.1L, -0.1L)}};
  expect_outputs(outputs("dplr", with(with(qkv, ab), {{"g", half_a_key}})), 10, 24);
  expect_outputs(outputs("rwkv7", with(with(rkv, ab), {{"w", half_a_key}})), 10, 24);
  expect_outputs(outputs("iplr", with(qkv, ab)), 10, 29);
}

TEST(ReferenceLaws, WeightsTimesValuesAreTheOutputs) {
  for (const std::string name :
       {"simple_gla", "gla", "gated_delta_rule", "kda", "comba", "dplr", "rwkv6"}) {
    for (const Case& c : cases()) {
      if (c.law != name || c.inputs.find("gv") != std::string::npos) continue;
      SCOPED_TRACE(c.name);
      Random random(25);
      LawArguments<Real> a = arguments_of(c, random);
      a.inputs.erase("initial_state");
      const Reals w = law_weights(a), o = law(a).at("o"), &v = a.inputs.at("v");
      Reals sum(o.shape);
      for (Int b = 0; b < o.extent(0); ++b) {
        for (Int t = 0; t < o.extent(1); ++t) {
          for (Int h = 0; h < o.extent(2); ++h) {
            for (Int s = 0; s < o.extent(1); ++s) {
              for (Int j = 0; j < o.extent(3); ++j) {
                sum(b, t, h, j) += w(b, h, t, s) * v(b, s, h * v.extent(2) / o.extent(2), j);
              }
            }
          }
        }
      }
      expect_near(o, sum, 1e-16);
    }
  }
}

}  // namespace
}  // namespace ouzel::reference
