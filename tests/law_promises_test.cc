// What the laws of ouzel/laws.h promise beyond agreeing with their references in operators_test:
// resets, digits of gradients at strong gates, refusals, steps without allocations, states written
// where they stand, sums over long sequences.
#include "ouzel/laws.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "tests/count_allocations.h"
#include "tests/law_calls.h"
#include "tests/law_cases.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ContextOptions options_for(Isa isa, int threads = 2) {
  return {.threads = threads, .isa = isa, .poison_scratch = true};
}

ByName& by_name(Call& call) { return std::get<ByName>(call.arguments); }

// A call of every law.
std::vector<std::pair<MatrixCase, Call>> calls(Int tokens) {
  std::vector<std::pair<MatrixCase, Call>> list;
  std::uint64_t seed = 900;
  for (const MatrixCase& c : matrix_samples(tokens)) list.push_back({c, make_call(c, ++seed)});
  return list;
}

// Where the law has log decays: an input of the call.
std::vector<Slot> log_decays(Call& call) {
  std::vector<Slot> list = slots(call);
  std::erase_if(list, [&](const Slot& s) { return !is_log_decay(call, s); });
  return list;
}

class Laws : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(, Laws, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return name_of(info.param); });

TEST(LawTable, EveryReferenceHasItsLawAndTheReverse) {
  std::vector<std::string> laws, references = reference::law_names();
  for (const ouzel::Law* law : matrix_laws()) laws.push_back(law->name);
  std::ranges::sort(laws);
  std::ranges::sort(references);
  EXPECT_EQ(laws, references);
}

// A gate of -inf at token 40 forgets even NaN, forward and step, unless the erase reads the
// undecayed state.
TEST_P(Laws, AHardResetForgetsEvenNaN) {
  Context context(options_for(GetParam()));
  for (auto& [c, call] : calls(70)) {
    const LawInFloat law(call, by_name(call));
    const bool reads_undecayed = law.law.erase != EraseKind::kNone && !law.law.erase_decayed;
    const std::vector<Slot> gates = log_decays(call);
    if (gates.empty() || reads_undecayed || c.law == "rwkv5") continue;
    SCOPED_TRACE(name_of(c));
    call.upstream.clear();
    for (const Slot& g : gates) {
      if (g.name == "gv") continue;
      const std::size_t row = g.array->data.size() / static_cast<std::size_t>(2 * 70);
      for (std::size_t b = 0; b < 2; ++b) {
        std::fill_n(g.array->data.begin() + static_cast<std::ptrdiff_t>((b * 70 + 40) * row), row,
                    -kInfinity);
      }
    }
    const Results<double> truth = run_reference(call);
    for (double& s : by_name(call).inputs.at("initial_state").data) s = kNan;
    for (const Results<float>& r : {run(context, call), run_steps(context, call)}) {
      const Floats& o = array_of(r.outputs, "o");
      const Int first = law.law.read == ReadKind::kBeforeWrite ? 41 : 40;
      const Int heads = o.extent(2);
      for (Int b = 0; b < 2; ++b) {
        for (Int t = first; t < 70; ++t) {
          for (Int h = 0; h < heads; ++h) ASSERT_TRUE(std::isfinite(o(b, t, h, 0))) << t;
        }
      }
      Comparison comparison;
      comparison.output("final_state", array_of(r.outputs, "final_state"),
                        array_of(truth.outputs, "final_state"));
      comparison.expect_within(bounds_on(GetParam(), kFloat32));
    }
  }
}

// At gates of -20 the gradient of a gate is 2e-9 of its neighbours' where the state is as large as
// they are. Here the state is e^20 times larger, so that the gradients of all gates count.
TEST_P(Laws, GradientsOfStrongGatesKeepTheirDigits) {
  Context context(options_for(GetParam()));
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
    const Results<float> got = run(context, call);
    Comparison comparison;
    comparison.gradient(name, array_of(got.gradients, name), array_of(truth.gradients, name));
    comparison.expect_within(bounds_on(GetParam(), kFloat32));
  }
}

// Gates of every strength side by side, in one block of 64 tokens, with many keys.
TEST_P(Laws, MixedGatesInOneBlock) {
  Context context(options_for(GetParam()));
  for (const ouzel::Law* law : matrix_laws()) {
    MatrixCase c{law->name, 130, 128, 32};
    c.gates = Gates::kMixed;
    c.states = c.optional = true;
    if (!exists(c)) continue;
    SCOPED_TRACE(name_of(c));
    const Call call = make_call(c, 78);
    expect_within(run(context, call), run_reference(call), bounds_on(GetParam(), kFloat32));
  }
}

// Nearly equal positive keys and values, 20,000 of them, with a decay that hardly is one: a plain
// float32 sum would be off by 1e-4 and more.
TEST_P(Laws, LongSumsStayExact) {
  Context context(options_for(GetParam()));
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase != EraseKind::kNone || law->name == std::string("hgrn2")) continue;
    MatrixCase c{law->name, 20'000, 6, 5};
    c.heads = Heads::kOne;
    c.data = Data::kNarrowPositive;
    c.states = true;
    SCOPED_TRACE(name_of(c));
    Call call = make_call(c, 79);
    for (auto& [name, x] : by_name(call).inputs) {
      if (name == "g" || name == "w" || name == "A") {
        std::fill(x.data.begin(), x.data.end(), static_cast<double>(-1e-6f));
      }
    }
    expect_within(run(context, call), run_reference(call), bounds_on(GetParam(), kAnyInput));
  }
}

// The same with erases: what nearly equal keys leave of a state is little, so nothing adds up.
TEST_P(Laws, LongErasesStayExact) {
  Context context(options_for(GetParam()));
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase == EraseKind::kNone) continue;
    MatrixCase c{law->name, 4096, 6, 5};
    c.heads = Heads::kOne;
    c.data = Data::kNarrowPositive;
    c.gates = law->has(LawRole::kDecay) ? Gates::kWeak : Gates::kNone;
    c.states = true;
    SCOPED_TRACE(name_of(c));
    const Call call = make_call(c, 80);
    expect_within(run(context, call), run_reference(call), bounds_on(GetParam(), kAnyInput));
  }
}

TEST_P(Laws, TheFinalStateMayBeWrittenOverTheInitialOne) {
  Context context(options_for(GetParam()));
  for (auto& [c, call] : calls(70)) {
    SCOPED_TRACE(name_of(c));
    call.upstream.clear();
    const Results<float> expected = run(context, call);
    LawInFloat in(call, by_name(call));
    Operand o = in.output(false);
    in.op(context, in.options, in.inputs,
          {.o = o.tensor(), .final_state = in.inputs.initial_state});
    EXPECT_TRUE(same_bits(o.floats(), array_of(expected.outputs, "o")));
    EXPECT_TRUE(same_bits(in.initial.s.floats(), array_of(expected.outputs, "final_state")));
  }
}

// Log decays up to 1e-6 above 0 count as 0; more is refused, and the state is as it was.
TEST_P(Laws, GatesAboveZero) {
  Context context(options_for(GetParam()));
  for (auto& [c, call] : calls(70)) {
    for (const Slot& gate : log_decays(call)) {
      SCOPED_TRACE(name_of(c) + " " + gate.name);
      call.upstream.clear();
      const Doubles before = *gate.array;
      gate.array->data[gate.array->data.size() / 2] = 0;
      const Results<float> at_zero = run(context, call);
      gate.array->data[gate.array->data.size() / 2] = static_cast<double>(9e-7f);
      const Results<float> rounded_up = run(context, call);
      EXPECT_TRUE(same_bits(array_of(rounded_up.outputs, "o"), array_of(at_zero.outputs, "o")));
      gate.array->data[gate.array->data.size() / 2] = static_cast<double>(2e-6f);
      LawInFloat in(call, by_name(call));
      const Floats state = in.initial.s.floats();
      Operand o = in.output(false);
      try {
        in.op(context, in.options, in.inputs,
              {.o = o.tensor(), .final_state = in.inputs.initial_state});
        ADD_FAILURE() << "a growing state was accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find(c.law), std::string::npos) << error.what();
      }
      EXPECT_TRUE(same_bits(in.initial.s.floats(), state));
      *gate.array = before;
    }
  }
}

TEST_P(Laws, StepsAllocateNothing) {
  Context context(options_for(GetParam()));
  for (auto& [c, call] : calls(1)) {
    SCOPED_TRACE(name_of(c));
    LawInFloat in(call, by_name(call));
    Operand o = in.output(false);
    const StateView state = in.inputs.initial_state;
    in.inputs.initial_state = {};
    in.inputs.segments = nullptr;
    in.op.step(context, in.options, in.inputs, state, o.tensor());
    const std::size_t scratch = context.scratch_bytes();
    const std::int64_t before = allocations.load();
    for (int i = 0; i < 10; ++i) {
      in.op.step(context, in.options, in.inputs, state, o.tensor());
    }
    EXPECT_EQ(allocations.load(), before);
    EXPECT_EQ(context.scratch_bytes(), scratch);
  }
}

}  // namespace
}  // namespace ouzel::test
