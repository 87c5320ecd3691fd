// Feature maps whose states are multiples of a power of two that grows with the keys: split calls,
// steps, numbers that a float cannot hold, infinities and NaN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/feature_map.h"
#include "ouzel/linear_attention.h"
#include "src/ops/feature_map.h"
#include "tests/calls.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;
using enum FeatureMapKind;

// States with exponents, on float arrays of one head.
struct Stream {
  static constexpr Int kKeys = 6, kValues = 4, kRows = 14;

  Stream(FeatureMapKind kind, Int tokens, double spread, std::uint64_t seed) : tokens(tokens) {
    Random random(seed);
    q = random_array<float>(random, {1, tokens, 1, kKeys}, -spread, spread);
    k = random_array<float>(random, {1, tokens, 1, kKeys}, -spread, spread);
    v = random_array<float>(random, {1, tokens, 1, kValues});
    o = Floats(v.shape);
    options.feature_map.kind = kind;
    options.normalize = true;
    if (info_of(kind).projections != 0) {
      w = Floats({kRows, kKeys});
      draw_orthogonal_projection(7, ProjectionNorms::kChi,
                                 View<float, 2>(w.data.data(), {kRows, kKeys}));
      options.feature_map.q.w1 = View<const float, 2>(w.data.data(), {kRows, kKeys});
    }
    const Int features = feature_count(options.feature_map, kKeys, kRows, 1);
    s = Floats({1, 1, features, kValues});
    z = Floats({1, 1, features});
    s_residue = s;
    z_residue = z;
    view = state_view(View<float, 4>(s.data.data(), {1, 1, features, kValues}),
                      View<float, 3>(z.data.data(), {1, 1, features}), storage);
    storage[0].exponent = &exponent;
    storage[0].s_residue = s_residue.data.data();
    storage[0].z_residue = z_residue.data.data();
  }
  Stream(const Stream&) = delete;

  View<float, 4> rows(Floats& x, Int begin, Int count) const {
    const Int size = x.extent(3);
    return {x.data.data() + begin * size, {1, count, 1, size}};
  }
  void scan(Context& context, Int begin, Int end) {
    RecurrenceInputs in;
    in.q = Tensor(rows(q, begin, end - begin));
    in.k = Tensor(rows(k, begin, end - begin));
    in.v = Tensor(rows(v, begin, end - begin));
    in.initial_state = view;
    linear_attention(context, options, in, {.o = rows(o, begin, end - begin), .final_state = view});
  }
  void step(Context& context, Int t) {
    linear_attention_step(context, options, Tensor(rows(q, t, 1)), Tensor(rows(k, t, 1)),
                          Tensor(rows(v, t, 1)), view, rows(o, t, 1));
  }
  Doubles truth() const {
    Recurrence a;
    const auto wide = [](const Floats& x) {
      Doubles y(x.shape.empty() ? std::vector<Int>() : x.shape);
      if (!x.present()) return Doubles();
      std::copy(x.data.begin(), x.data.end(), y.data.begin());
      return y;
    };
    a.q = wide(q);
    a.k = wide(k);
    a.v = wide(v);
    a.map = options.feature_map.kind;
    a.q_map.w1 = wide(w);
    a.normalize = true;
    a.eps = options.eps.value_or(info_of(a.map).eps);
    a.segments = Segments::whole(1, tokens);
    return reference::recurrence(a).o;
  }

  Int tokens;
  Floats q, k, v, o, w, s, z, s_residue, z_residue;
  float exponent = 0;
  LinearAttentionOptions options;
  std::vector<SequenceState> storage;
  StateView view;
};

constexpr FeatureMapKind kRunning[] = {kExp, kFavorPositive, kFavorHyperbolic};

TEST(RunningMaximum, SplitsAreBitForBitAndStepsAgree) {
  constexpr Int kTokens = 2400;  // beyond 2,048 sums go on in two parts
  for (Isa isa : supported_isas()) {
    Context context({.threads = 1, .isa = isa, .poison_scratch = true});
    for (FeatureMapKind kind : kRunning) {
      SCOPED_TRACE(testing::Message() << ouzel::name_of(isa) << " " << info_of(kind).name);
      const double spread = kind == kExp ? 60 : 6;
      Stream whole(kind, kTokens, spread, 60);
      if (kind != kExp) whole.options.eps = 0;
      whole.scan(context, 0, kTokens);
      Comparison comparison;
      comparison.output("o", whole.o, whole.truth());
      comparison.expect_within(kAnyInput);
      for (Int at : {64, 128, 1984, 2048, 2112}) {
        Stream parts(kind, kTokens, spread, 60);
        parts.options = whole.options;
        parts.options.feature_map.q.w1 = whole.options.feature_map.q.w1;
        parts.scan(context, 0, at);
        parts.scan(context, at, kTokens);
        EXPECT_TRUE(same_bits(parts.o, whole.o)) << at;
        EXPECT_TRUE(same_bits(parts.s, whole.s)) << at;
        EXPECT_TRUE(same_bits(parts.z, whole.z)) << at;
        EXPECT_EQ(parts.exponent, whole.exponent);
      }
      Stream steps(kind, kTokens, spread, 60);
      steps.options = whole.options;
      for (Int t = 0; t < kTokens; ++t) steps.step(context, t);
      Comparison stepped;
      stepped.output("o", steps.o, whole.truth());
      stepped.expect_within(kAnyInput);
    }
  }
}

// A plain float32 exp overflows from 88 on.
TEST(RunningMaximum, SurvivesWhatFloatsCannotHold) {
  Context context({.threads = 1});
  for (double offset : {-300.0, 300.0}) {
    Stream s(kExp, 200, 1, 61);
    for (Floats* x : {&s.q, &s.k}) {
      for (float& e : x->data) e += static_cast<float>(offset);
    }
    const Doubles truth = s.truth();
    s.scan(context, 0, 200);
    Comparison comparison;
    comparison.output("o", s.o, truth);
    comparison.expect_within(kFloat32);
    EXPECT_NEAR(s.exponent, offset / std::log(2.0), 3);
  }
}

TEST(RunningMaximum, InfinityAndNanAreNotHidden) {
  Context context({.threads = 1});
  for (float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Stream s(kExp, 10, 1, 62);
    s.k.data[5 * Stream::kKeys] = value;
    s.scan(context, 0, 10);
    for (Int t = 0; t < 10; ++t) {
      const float o = s.o.data[static_cast<std::size_t>(t * Stream::kValues)];
      EXPECT_EQ(std::isfinite(o), t < 5) << value << " token " << t;
    }
  }
}

}  // namespace
}  // namespace ouzel::test
