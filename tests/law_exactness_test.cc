// How exact the laws of ouzel/laws.h are where it is hard: strong gates beside weak ones,
// weak decays over many tokens, sums over long sequences. operators_test covers the rest.
#include "ouzel/laws.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/contexts.h"
#include "tests/law_calls.h"
#include "tests/law_cases.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ByName& by_name(Call& call) { return std::get<ByName>(call.arguments); }

double as_float(double x) { return static_cast<double>(static_cast<float>(x)); }

// The call on every instruction set against its reference.
void expect_reference(const Call& call, const Bounds& bounds) {
  const Results<double> truth = run_reference(call);
  for (Context& context : contexts(1)) {
    SCOPED_TRACE(name_of(context.isa()));
    expect_within(run(context, call), truth, bounds_on(context.isa(), bounds));
  }
}

TEST(LawTable, EveryReferenceHasItsLawAndTheReverse) {
  std::vector<std::string> laws, references = reference::law_names();
  for (const ouzel::Law* law : matrix_laws()) laws.push_back(law->name);
  std::ranges::sort(laws);
  std::ranges::sort(references);
  EXPECT_EQ(laws, references);
}

// At gates of -20 the gradient of a gate is 2e-9 of its neighbours' where the state is as large as
// they are. Here the state is e^20 times larger, so that the gradients of all gates count.
TEST(LawExactness, GradientsOfStrongGatesKeepTheirDigits) {
  for (const ouzel::Law* law : matrix_laws()) {
    MatrixCase c{law->name, 33, 128, 64};
    c.heads = Heads::kOne;
    c.gates = Gates::kStrong;
    c.states = true;
    c.optional = law->many_rows();  // whose gate is optional
    if (!exists(c) || !law->has(LawRole::kDecay)) continue;
    // An erase of the undecayed state would carry e^20 on.
    if (law->erase != EraseKind::kNone && !law->erase_decayed) continue;
    SCOPED_TRACE(name_of(c));
    Call call = make_call(c, 77);
    for (double& s : by_name(call).inputs.at("initial_state").data) {
      s = static_cast<double>(static_cast<float>(s * std::exp(20)));
    }
    const char* gate = law->find(LawRole::kDecay)->name;
    const std::string name = std::string("d") + gate;
    const Results<double> truth = run_reference(call);
    for (Context& context : contexts(1)) {
      const Results<float> got = run(context, call);
      Comparison comparison;
      comparison.gradient(name, array_of(got.gradients, name), array_of(truth.gradients, name));
      comparison.expect_within(bounds_on(context.isa(), kFloat32));
    }
  }
}

// Gates of every strength side by side, in one block of 64 tokens, with many keys.
TEST(LawExactness, MixedGatesInOneBlock) {
  for (const ouzel::Law* law : matrix_laws()) {
    MatrixCase c{law->name, 130, 128, 32};
    c.gates = Gates::kMixed;
    c.states = c.optional = true;
    if (!exists(c)) continue;
    SCOPED_TRACE(name_of(c));
    const Call call = make_call(c, 78);
    expect_reference(call, kFloat32);
  }
}

// The same weak decay at every token, so that what its factor loses to rounding adds up.
TEST(LawExactness, ConstantWeakGates) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (!law->has(LawRole::kDecay)) continue;
    for (Data data : {Data::kZeroMean, Data::kNarrowPositive}) {
      for (float g : {-3e-6f, -3.3e-4f}) {
        MatrixCase c{law->name, data == Data::kZeroMean ? 1900 : 4096, 16, 8};
        c.layout = Layout::kAlone;
        c.heads = Heads::kOne;
        c.data = data;
        c.states = true;
        c.optional = law->many_rows();  // whose gate is optional
        SCOPED_TRACE(testing::Message() << name_of(c) << " all " << g);
        Call call = make_call(c, 81);
        Doubles& gates = by_name(call).inputs.at(law->find(LawRole::kDecay)->name);
        std::fill(gates.data.begin(), gates.data.end(), static_cast<double>(g));
        const Bounds& bounds = data == Data::kZeroMean ? kFloat32 : kAnyInput;
        expect_reference(call, bounds);
      }
    }
  }
}

// The same token by token, where the state takes a factor 1,900 times.
TEST(LawExactness, ConstantWeakGatesInSteps) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (!law->has(LawRole::kDecay)) continue;
    MatrixCase c{law->name, 1900, 16, 8};
    c.layout = Layout::kAlone;
    c.heads = Heads::kOne;
    c.states = true;
    c.optional = law->many_rows();  // whose gate is optional
    SCOPED_TRACE(name_of(c));
    Call call = make_call(c, 82);
    Doubles& gates = by_name(call).inputs.at(law->find(LawRole::kDecay)->name);
    std::fill(gates.data.begin(), gates.data.end(), static_cast<double>(-3.3e-4f));
    call.upstream.clear();
    const Results<double> truth = run_reference(call);
    for (Context& context : contexts(1)) {
      SCOPED_TRACE(name_of(context.isa()));
      expect_within(run_steps(context, call), truth, bounds_on(context.isa(), kFloat32));
    }
  }
}

// Equal keys and values, 12,000 of them, with a decay that hardly is one. Every addition to a plain
// float32 sum is then rounded the same way until its exponent changes: it would be off by 1.4e-4.
TEST(LawExactness, LongSumsStayExact) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase != EraseKind::kNone || law->name == std::string("hgrn2")) continue;
    MatrixCase c{law->name, 12'000, 6, 5};
    c.layout = Layout::kAlone;
    c.heads = Heads::kOne;
    c.data = Data::kConstant;
    c.states = true;
    SCOPED_TRACE(name_of(c));
    Call call = make_call(c, 79);
    for (auto& [name, x] : by_name(call).inputs) {
      if (name == "g" || name == "w" || name == "A") {
        std::ranges::fill(x.data, as_float(-1e-6));
      }
      if (name == "dt") std::ranges::fill(x.data, 1);
    }
    expect_reference(call, kAnyInput);
  }
}

// Laws of one decay a token, whose heads are scanned together: the same sums. A plain one would be
// off by 8e-5.
TEST(LawExactness, LongScansOfHeads) {
  for (const char* law : {"simple_gla", "mamba2_ssd"}) {
    MatrixCase c{law, 20'000, 16, 32};
    c.layout = Layout::kAlone;
    c.gates = Gates::kWeak;
    c.heads = Heads::kOne;
    c.data = Data::kConstant;
    c.states = c.optional = true;
    SCOPED_TRACE(name_of(c));
    Call call = make_call(c, 84);
    if (law == std::string("mamba2_ssd")) std::ranges::fill(by_name(call).inputs.at("dt").data, 1);
    call.upstream.clear();
    expect_reference(call, kAnyInput);
  }
}

// Gates of every strength, within chunks too, among sums in two parts.
TEST(LawExactness, GatesOfLongScans) {
  for (const ouzel::Law* law : matrix_laws()) {
    for (const Gates gates : {Gates::kMixed, Gates::kHarsh, Gates::kReset}) {
      MatrixCase c{law->name, 2'110, 16, 32};
      c.layout = Layout::kAlone;
      c.gates = gates;
      c.states = c.optional = true;
      if (!exists(c)) continue;
      SCOPED_TRACE(name_of(c));
      Call call = make_call(c, 84);
      call.upstream.clear();
      expect_reference(call, kFloat32);
    }
  }
}

// Sizes on and off the widths of tiles, and decays of 0 among strong ones: these choose between
// ways of the backward pass. It reads saved states in half of the calls: by turns, so that every
// size and every kind of gates does both.
TEST(LawBits, NeitherThreadsNorOldScratchChangeOne) {
  for (const ouzel::Law* law : matrix_laws()) {
    for (const Gates gates : {Gates::kMild, Gates::kStrong, Gates::kHarsh}) {
      bool saved = gates == Gates::kStrong;
      for (const std::int64_t values : {3, 24, 33, 64}) {
        saved = !saved;
        MatrixCase c{law->name, 150, 16, values};
        c.gates = gates;
        c.states = c.optional = true;
        if (!exists(c) || (gates != Gates::kMild && law->find(LawRole::kDecay) == nullptr))
          continue;
        SCOPED_TRACE(name_of(c));
        Call call = make_call(c, 86);
        call.saved = saved;
        expect_threads_change_no_bit(call);
      }
    }
  }
}

// A reset forgets NaN, among sums in two parts too.
class LongResets : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, LongResets,
                         testing::Values("simple_gla", "gla", "gated_delta_rule", "kda"),
                         [](const auto& info) { return std::string(info.param); });
TEST_P(LongResets, ForgetEvenNaN) {
  MatrixCase c{GetParam(), 2'300, 16, 32};
  c.heads = Heads::kEqual;
  c.states = true;
  Call call = make_call(c, 85);
  call.upstream.clear();
  Doubles& g = by_name(call).inputs.at("g");
  const Int row_size = static_cast<Int>(g.data.size()) / (g.shape[0] * g.shape[1]);
  for (const Int reset : {Int{40}, Int{2'200}}) {
    for (Int b = 0; b < g.shape[0]; ++b) {
      std::fill_n(g.data.begin() + (b * 2'300 + reset) * row_size, row_size, -kInfinity);
    }
  }
  const Results<double> truth = run_reference(call);
  Doubles& k = by_name(call).inputs.at("k");
  const std::size_t row = static_cast<std::size_t>(k.shape[2] * k.shape[3]);
  for (const Int poisoned : {Int{20}, Int{2'100}})
    k.data[static_cast<std::size_t>(poisoned) * row] = kNan;
  for (Context& context : contexts(1)) {
    SCOPED_TRACE(name_of(context.isa()));
    const Results<float> r = run(context, call);
    const Floats& o = array_of(r.outputs, "o");
    for (const auto& [begin, end, nan] : {std::tuple(0, 20, false),
                                          {20, 40, true},
                                          {40, 2'100, false},
                                          {2'100, 2'200, true},
                                          {2'200, 2'300, false}}) {
      for (Int t = begin; t < end; ++t) ASSERT_EQ(std::isnan(o(0, t, 0, 0)), nan) << t;
    }
    Comparison comparison;
    comparison.output("final_state", array_of(r.outputs, "final_state"),
                      array_of(truth.outputs, "final_state"));
    comparison.expect_within(bounds_on(context.isa(), kFloat32));
  }
}

// The same sums with erases: what nearly equal keys leave of a state is little, so nothing adds up.
TEST(LawExactness, LongErasesStayExact) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase == EraseKind::kNone) continue;
    MatrixCase c{law->name, 4096, 6, 5};
    c.layout = Layout::kAlone;
    c.heads = Heads::kOne;
    c.data = Data::kNarrowPositive;
    c.gates = Gates::kNone;
    c.states = true;
    SCOPED_TRACE(name_of(c));
    const Call call = make_call(c, 80);
    expect_reference(call, kAnyInput);
  }
}

// Sets how much a law erases and writes with it: beta, or what stands in its place.
void set_strength(Call& call, const ouzel::Law& law, double strength) {
  const auto input = [&](LawRole role) -> Doubles& {
    return by_name(call).inputs.at(law.find(role)->name);
  };
  for (LawRole role : {LawRole::kStrength, LawRole::kEraseGate, LawRole::kWriteGate}) {
    if (law.has(role)) std::ranges::fill(input(role).data, as_float(strength));
  }
  // S loses strength a a^T S.
  if (!law.has(LawRole::kEraseWrite)) return;
  const Doubles& a = input(LawRole::kEraseKey);
  Doubles& b = input(LawRole::kEraseWrite);
  std::ranges::transform(a.data, b.data.begin(), [&](double x) { return as_float(-strength * x); });
  Doubles& v = input(LawRole::kValue);
  for (double& x : v.data) x = as_float(strength * x);
}

// A call of a law whose erases are too weak to keep a state, or a gradient, from growing on and on.
Call weak_erases(const ouzel::Law& law, Int tokens, double strength) {
  MatrixCase c{law.name, tokens, 4, 3};
  c.layout = Layout::kAlone;
  c.heads = Heads::kOne;
  c.data = Data::kConstant;
  c.gates = Gates::kNone;
  c.optional = law.many_rows();  // whose gate is optional
  Call call = make_call(c, 83);
  set_strength(call, law, strength);
  if (law.has(LawRole::kDecay)) {
    Doubles& gates = by_name(call).inputs.at(law.find(LawRole::kDecay)->name);
    std::ranges::fill(gates.data, as_float(-1e-6));
  }
  return call;
}

// From position 2,048 on a plain sum would drift: of equal keys and values at 1e-7 by 4e-5 to 1e-4.
TEST(LawExactness, LongWeakErasesStayExact) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase == EraseKind::kNone) continue;
    for (const double strength : {1e-7, 1e-5, 1e-3, 0.3}) {
      SCOPED_TRACE(testing::Message() << law->name << " strength " << strength);
      Call call = weak_erases(*law, 8'000, strength);
      if (strength > 1e-7) call.upstream.clear();
      const Results<double> truth = run_reference(call);
      for (Context& context : contexts(1)) {
        for (bool saved : {true, false}) {
          call.saved = saved;
          SCOPED_TRACE(testing::Message() << name_of(context.isa()) << (saved ? " saved" : ""));
          if (saved || call.backward()) {
            expect_within(run(context, call), truth, bounds_on(context.isa(), kAnyInput));
          }
        }
      }
    }
  }
}

// Gradients of a call that goes on from a large state in two parts: a plain sum would round away
// what 2,000 tokens add to it.
TEST(LawExactness, GradientsOfResumedCallsKeepTheResidue) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase == EraseKind::kNone) continue;
    SCOPED_TRACE(law->name);
    Call call = weak_erases(*law, 2'000, 1e-7);
    const double large = 1e5 + 1.0 / 256, lost = 1.0 / 512;  // half of a unit in its last place
    Doubles state({1, 1, 4, 3});
    std::ranges::fill(state.data, large + lost);
    by_name(call).inputs["initial_state"] = state;
    const Results<double> truth = run_reference(call);
    std::ranges::fill(by_name(call).inputs["initial_state"].data, large);
    std::ranges::fill(state.data, lost);
    call.residue = Residue{state, {}, 100'000};
    for (Context& context : contexts(1)) {
      for (bool saved : {true, false}) {
        call.saved = saved;
        SCOPED_TRACE(testing::Message() << name_of(context.isa()) << (saved ? " saved" : ""));
        const Results<float> got = run(context, call);
        Comparison comparison;
        for (const Named<double>& x : truth.gradients) {
          comparison.gradient(x.name, array_of(got.gradients, x.name), x.array);
        }
        comparison.expect_within(bounds_on(context.isa(), kAnyInput));
      }
    }
  }
}

// The same token by token, with what the state lost to rounding beside it.
TEST(LawExactness, LongWeakErasesStayExactInSteps) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase == EraseKind::kNone) continue;
    SCOPED_TRACE(law->name);
    Call call = weak_erases(*law, 8'000, 1e-7);
    call.upstream.clear();
    const Results<double> truth = run_reference(call);
    call.residue = Residue();
    by_name(call).inputs["initial_state"] = Doubles(array_of(truth.outputs, "final_state").shape);
    for (Isa isa : supported_isas()) {
      SCOPED_TRACE(name_of(isa));
      Context context({.threads = 1, .isa = isa});
      expect_within(run_steps(context, call), truth, bounds_on(isa, kAnyInput));
    }
  }
}

}  // namespace
}  // namespace ouzel::test
