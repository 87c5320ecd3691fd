// Properties of the operators for shapes and inputs that chance picks (rapidcheck; RC_PARAMS sets
// the number of tries and the seed).
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "tests/cases.h"
#include "tests/random_arrays.h"
#include "tests/slices.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

Context& context() {
  static Context shared({.threads = 2, .poison_scratch = true});
  return shared;
}

template <class Enum>
Enum any(std::size_t count) {
  return static_cast<Enum>(*rc::gen::inRange<std::size_t>(0, count));
}

LawCase any_law() {
  LawCase c{any<Law>(kLaws), *rc::gen::inRange<Int>(0, 200), *rc::gen::inRange<Int>(1, 70),
            *rc::gen::inRange<Int>(1, 70)};
  c.layout = any<Layout>(3);
  c.heads = any<Heads>(5);
  c.direction = any<Direction>(3);
  c.data = any<Data>(3);
  c.states = *rc::gen::arbitrary<bool>();
  if (!exists(c)) {
    c.direction = Direction::kCausal;
    c.data = c.law == Law::kIdentityNormalized ? Data::kNarrowPositive : Data::kZeroMean;
  }
  return c;
}

AttentionCase any_attention() {
  AttentionCase c{*rc::gen::inRange<Int>(0, 200), *rc::gen::inRange<Int>(1, 70),
                  *rc::gen::inRange<Int>(1, 70)};
  c.layout = any<Layout>(3);
  c.heads = any<Heads>(5);
  c.causal = *rc::gen::arbitrary<bool>();
  c.window = *rc::gen::inRange<Int>(0, 40);
  return c;
}

ConvCase any_conv() {
  ConvCase c{*rc::gen::inRange<Int>(0, 200), *rc::gen::inRange<Int>(1, 70),
             *rc::gen::inRange<Int>(1, 7)};
  c.layout = any<Layout>(3);
  c.silu = *rc::gen::arbitrary<bool>();
  c.bias = *rc::gen::arbitrary<bool>();
  c.states = *rc::gen::arbitrary<bool>();
  return c;
}

Call any_call() {
  const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
  const auto log = [&](const auto& c) {
    RC_LOG() << name_of(c) << " seed " << seed << "\n";
    return make_call(c, seed);
  };
  switch (*rc::gen::inRange(0, 3)) {
    case 0:
      return log(any_law());
    case 1:
      return log(any_attention());
    default:
      return log(any_conv());
  }
}

TEST(Properties, ASequenceInCompanyIsTheSequenceAlone) {
  EXPECT_TRUE(rc::check([] {
    Call call = any_call();
    const Segments segments = segments_of(call), keys = key_segments_of(call);
    const auto n = *rc::gen::inRange<std::size_t>(0, segments.list.size());
    const Results<float> together = run(context(), call);
    const Results<float> own = run(context(), alone(call, static_cast<Int>(n)));
    for (std::size_t i = 0; i < own.outputs.size(); ++i) {
      const Named<float>& x = together.outputs[i];
      RC_ASSERT(
          same_bits(take(x.array, x.role, static_cast<Int>(n), segments.list[n], keys.list[n]),
                    own.outputs[i].array));
    }
  }));
}

// Twice the values, and twice the state, give twice the outputs, exactly: every law is linear in
// them.
TEST(Properties, OutputsAreLinearInValuesAndStates) {
  EXPECT_TRUE(rc::check([] {
    Call call;
    const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
    if (*rc::gen::arbitrary<bool>()) {
      const LawCase c = any_law();
      RC_LOG() << name_of(c) << " seed " << seed << "\n";
      call = make_call(c, seed);
    } else {
      const AttentionCase c = any_attention();
      RC_LOG() << name_of(c) << " seed " << seed << "\n";
      call = make_call(c, seed);
    }
    call.upstream.clear();
    const Results<float> once = run(context(), call);
    for (const Slot& s : slots(call)) {
      if (s.name != "v" && s.name != "initial_state") continue;
      for (double& x : s.array->data) x *= 2;
    }
    const Results<float> twice = run(context(), call);
    for (std::size_t i = 0; i < once.outputs.size(); ++i) {
      const Named<float>& x = once.outputs[i];
      if (x.name != "o" && x.name != "final_state") continue;
      Floats expected = x.array;
      for (float& y : expected.data) y *= 2;
      RC_ASSERT(same_bits(twice.outputs[i].array, expected));
    }
  }));
}

// Attention outputs are averages of values, all of them within [-1, 1).
TEST(Properties, AttentionAverages) {
  EXPECT_TRUE(rc::check([] {
    AttentionCase c = any_attention();
    c.sharp = *rc::gen::arbitrary<bool>();
    const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
    RC_LOG() << name_of(c) << " seed " << seed << "\n";
    Call call = make_call(c, seed);
    call.upstream.clear();
    const Results<float> r = run(context(), call);
    for (float x : array_of(r.outputs, "o").data) RC_ASSERT(std::abs(x) <= 1.00001f);
  }));
}

// The order of the keys is nothing to full attention: the bound covers another order of summation.
TEST(Properties, FullAttentionIgnoresTheOrderOfKeys) {
  EXPECT_TRUE(rc::check([] {
    AttentionCase c = any_attention();
    c.causal = false;
    c.window = 0;
    c.layout = Layout::kRows;
    const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
    RC_LOG() << name_of(c) << " seed " << seed << "\n";
    Call call = make_call(c, seed);
    call.upstream.clear();
    const Floats before = array_of(run(context(), call).outputs, "o");
    auto& a = std::get<Attention>(call.arguments);
    a.k = flipped(a.k);
    a.v = flipped(a.v);
    const Floats after = array_of(run(context(), call).outputs, "o");
    for (std::size_t i = 0; i < before.data.size(); ++i) {
      RC_ASSERT(std::abs(before.data[i] - after.data[i]) <= 5e-6f);
    }
  }));
}

}  // namespace
}  // namespace ouzel::test
