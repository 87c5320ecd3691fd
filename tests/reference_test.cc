// The float64 references against what they must be: their gradients against central differences in
// long double, the recurrence against the quadratic sum, special cases against closed forms.
#include "src/ops/reference/recurrence.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/ops/reference/short_conv.h"
#include "src/ops/reference/softmax_attention.h"
#include "tests/central_differences.h"
#include "tests/random_arrays.h"

namespace ouzel::reference {
namespace {

using test::dot;
using test::expect_gradient;
using test::expect_near;
using test::Random;
using test::random_array;
using Real = long double;
using Reals = Array<Real>;

struct RecurrenceCase {
  std::string name;
  std::int64_t hq = 2, hk = 2, hv = 2, k = 3, v = 2;
  FeatureMapKind map = FeatureMapKind::kIdentity;
  bool normalize = false, causal = true, reverse = false, states = true, decay = false;
  bool separate_maps = false, heads_in_map = false, segments = false;
};

std::vector<RecurrenceCase> recurrence_cases() {
  using enum FeatureMapKind;
  return {
      {.name = "plain"},
      {.name = "no_state", .states = false},
      {.name = "elu1", .map = kElu1, .normalize = true},
      {.name = "relu", .map = kRelu, .normalize = true},
      {.name = "product", .map = kElementwiseProduct, .normalize = true},
      {.name = "product_of_heads",
       .map = kElementwiseProduct,
       .separate_maps = true,
       .heads_in_map = true},
      {.name = "noncausal", .map = kElu1, .normalize = true, .causal = false, .segments = true},
      {.name = "reverse", .map = kElu1, .normalize = true, .reverse = true, .segments = true},
      {.name = "decay", .decay = true, .segments = true},
      {.name = "decay_reverse", .reverse = true, .decay = true},
      {.name = "more_values", .hq = 2, .hk = 2, .hv = 4, .map = kElu1, .normalize = true},
      {.name = "more_queries", .hq = 4, .hk = 2, .hv = 2, .map = kElu1, .normalize = true},
      {.name = "one_key_head", .hq = 6, .hk = 1, .hv = 3, .decay = true, .segments = true},
  };
}

RecurrenceArguments<Real> arguments_of(const RecurrenceCase& c, Random& random) {
  RecurrenceArguments<Real> a;
  const bool packed = c.segments;
  const std::int64_t batch = packed ? 1 : 2, tokens = packed ? 9 : 4;
  // Packed: an empty sequence, one of one token, a gap of one row that belongs to none.
  a.segments = packed ? Segments{{{0, 0, 4}, {0, 4, 0}, {0, 4, 1}, {0, 6, 3}}}
                      : Segments::whole(batch, tokens);
  // Normalised signed maps need positive weights to stay away from poles of the quotient.
  const double lo = c.map == FeatureMapKind::kElementwiseProduct ? 0.1 : -1;
  a.q = random_array<Real>(random, {batch, tokens, c.hq, c.k}, lo);
  a.k = random_array<Real>(random, {batch, tokens, c.hk, c.k}, lo);
  a.v = random_array<Real>(random, {batch, tokens, c.hv, c.v});
  std::int64_t features = c.k;
  a.map = c.map;
  if (c.map == FeatureMapKind::kElementwiseProduct) {
    features = c.k + 1;
    const auto weights = [&](std::int64_t heads) {
      const auto shape = [&](std::vector<std::int64_t> s) {
        if (c.heads_in_map) s.insert(s.begin(), heads);
        return s;
      };
      return MapWeights<Real>{
          random_array<Real>(random, shape({features, c.k}), 0.1),
          random_array<Real>(random, shape({features}), 0.1),
          random_array<Real>(random, shape({features, c.k}), 0.1),
          c.heads_in_map ? Reals() : random_array<Real>(random, shape({features}), 0.1)};
    };
    a.q_map = weights(c.hq);
    if (c.separate_maps) a.k_map = weights(c.hk);
  }
  if (c.states) {
    a.s0 = random_array<Real>(random, {a.segments.count(), c.hv, features, c.v});
    a.z0 = random_array<Real>(random, {a.segments.count(), c.hv, features}, 0.5);
  }
  if (c.decay) a.log_decay = retention_log_decay<Real>(c.hv);
  a.scale = 0.75;
  a.normalize = c.normalize;
  a.eps = 1e-3L;
  a.causal = c.causal;
  a.reverse = c.reverse;
  return a;
}

TEST(ReferenceRecurrence, GradientsAreThoseOfCentralDifferences) {
  for (const RecurrenceCase& c : recurrence_cases()) {
    SCOPED_TRACE(c.name);
    Random random(7);
    RecurrenceArguments<Real> a = arguments_of(c, random);
    const RecurrenceResults<Real> r = recurrence(a);
    const RecurrenceResults<Real> d{random_array<Real>(random, r.o.shape),
                                    random_array<Real>(random, r.s.shape),
                                    random_array<Real>(random, r.z.shape)};
    const auto loss = [&] {
      const RecurrenceResults<Real> now = recurrence(a);
      return dot(now.o, d.o) + dot(now.s, d.s) + dot(now.z, d.z);
    };
    const RecurrenceGradients<Real> g = recurrence_backward(a, d);
    expect_gradient("q", a.q, g.q, loss);
    expect_gradient("k", a.k, g.k, loss);
    expect_gradient("v", a.v, g.v, loss);
    if (c.states) {
      expect_gradient("s0", a.s0, g.s0, loss);
      expect_gradient("z0", a.z0, g.z0, loss);
    }
    expect_gradient("q_map.w1", a.q_map.w1, g.q_map.w1, loss);
    expect_gradient("q_map.b1", a.q_map.b1, g.q_map.b1, loss);
    expect_gradient("q_map.w2", a.q_map.w2, g.q_map.w2, loss);
    expect_gradient("q_map.b2", a.q_map.b2, g.q_map.b2, loss);
    expect_gradient("k_map.w1", a.k_map.w1, g.k_map.w1, loss);
    expect_gradient("k_map.b1", a.k_map.b1, g.k_map.b1, loss);
    expect_gradient("k_map.w2", a.k_map.w2, g.k_map.w2, loss);
    expect_gradient("k_map.b2", a.k_map.b2, g.k_map.b2, loss);
  }
}

TEST(ReferenceRecurrence, IsTheQuadraticSum) {
  for (const RecurrenceCase& c : recurrence_cases()) {
    SCOPED_TRACE(c.name);
    Random random(8);
    RecurrenceArguments<Real> a = arguments_of(c, random);
    a.s0 = a.z0 = Reals();
    const Reals weights = recurrence_weights(a), o = recurrence(a).o;
    Reals sum(o.shape);
    const std::int64_t heads = o.extent(2), group = heads / a.v.extent(2);
    for (std::int64_t b = 0; b < o.extent(0); ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t t = 0; t < o.extent(1); ++t) {
          for (std::int64_t s = 0; s < o.extent(1); ++s) {
            for (std::int64_t v = 0; v < o.extent(3); ++v) {
              sum(b, t, h, v) += weights(b, h, t, s) * a.v(b, s, h / group, v);
            }
          }
        }
      }
    }
    expect_near(o, sum, 1e-16);
  }
}

TEST(ReferenceRecurrence, RowsOutsideSegmentsAreNeitherReadNorWritten) {
  for (const RecurrenceCase& c : recurrence_cases()) {
    if (!c.segments) continue;
    SCOPED_TRACE(c.name);
    Random random(9);
    RecurrenceArguments<Real> a = arguments_of(c, random);
    for (std::int64_t i = 0; i < a.q.extent(2) * a.q.extent(3); ++i) {
      (&a.q(0, 5, 0, 0))[i] = std::numeric_limits<Real>::quiet_NaN();
    }
    const RecurrenceResults<Real> r = recurrence(a);
    for (Real x : r.o.data) EXPECT_FALSE(std::isnan(x));
    for (std::int64_t i = 0; i < r.o.extent(2) * r.o.extent(3); ++i) {
      EXPECT_EQ((&r.o(0, 5, 0, 0))[i], 0);
    }
    // The empty sequence hands its state on.
    const RecurrenceResults<Real> final = recurrence(a);
    for (std::int64_t i = 0; i < a.s0.extent(1) * a.s0.extent(2) * a.s0.extent(3); ++i) {
      EXPECT_EQ((&final.s(1, 0, 0, 0))[i], (&a.s0(1, 0, 0, 0))[i]);
    }
  }
}

TEST(ReferenceRecurrence, RetentionDecaysByPowers) {
  const std::vector<Real> g = retention_log_decay<Real>(3);
  EXPECT_NEAR(static_cast<double>(std::exp(g[0])), 1 - 1.0 / 32, 1e-18);
  EXPECT_NEAR(static_cast<double>(std::exp(g[2])), 1 - 1.0 / 128, 1e-18);
  // One feature, k = v = q = 1: o_t = sum of the powers of gamma, (1 - gamma^(t+1)) / (1 - gamma).
  RecurrenceArguments<Real> a;
  a.q = Reals({1, 50, 1, 1});
  for (Real& x : a.q.data) x = 1;
  a.k = a.v = a.q;
  a.segments = Segments::whole(1, 50);
  a.log_decay = {g[0]};
  const Reals o = recurrence(a).o;
  const Real gamma = 1 - 1.0L / 32;
  for (std::int64_t t = 0; t < 50; ++t) {
    EXPECT_NEAR(static_cast<double>(o(0, t, 0, 0)),
                static_cast<double>((1 - std::pow(gamma, Real(t + 1))) / (1 - gamma)), 1e-15);
  }
}

struct AttentionCase {
  std::string name;
  std::int64_t hq = 2, hk = 2, tq = 6, tk = 6;
  bool causal = true;
  std::int64_t window = 0, q_offset = 0;
  bool segments = false;
};

std::vector<AttentionCase> attention_cases() {
  return {{.name = "causal"},
          {.name = "full", .causal = false},
          {.name = "window", .window = 3},
          {.name = "window_full", .causal = false, .window = 2},
          {.name = "offset", .tq = 4, .q_offset = 2},
          {.name = "offset_window", .tq = 4, .window = 2, .q_offset = 2},
          {.name = "negative_offset", .q_offset = -2},  // the first two queries see nothing
          {.name = "grouped", .hq = 4},
          {.name = "packed", .hq = 4, .segments = true},
          {.name = "packed_full", .causal = false, .segments = true}};
}

SoftmaxAttentionArguments<Real> arguments_of(const AttentionCase& c, Random& random) {
  SoftmaxAttentionArguments<Real> a;
  a.q = random_array<Real>(random, {1, c.tq, c.hq, 3}, -2, 2);
  a.k = random_array<Real>(random, {1, c.tk, c.hk, 3}, -2, 2);
  a.v = random_array<Real>(random, {1, c.tk, c.hk, 2});
  a.query_segments = c.segments ? Segments{{{0, 0, 2}, {0, 2, 0}, {0, 2, 1}, {0, 4, 2}}}
                                : Segments::whole(1, c.tq);
  a.key_segments = c.segments ? a.query_segments : Segments::whole(1, c.tk);
  a.scale = 0.8;
  a.causal = c.causal;
  a.window = c.window;
  a.q_offset = c.q_offset;
  return a;
}

TEST(ReferenceSoftmaxAttention, GradientsAreThoseOfCentralDifferences) {
  for (const AttentionCase& c : attention_cases()) {
    SCOPED_TRACE(c.name);
    Random random(11);
    SoftmaxAttentionArguments<Real> a = arguments_of(c, random);
    const Reals d_o = random_array<Real>(random, softmax_attention(a).o.shape);
    const auto loss = [&] { return dot(softmax_attention(a).o, d_o); };
    const SoftmaxAttentionGradients<Real> g = softmax_attention_backward(a, d_o);
    expect_gradient("q", a.q, g.q, loss);
    expect_gradient("k", a.k, g.k, loss);
    expect_gradient("v", a.v, g.v, loss);
  }
}

TEST(ReferenceSoftmaxAttention, SpecialCases) {
  // Scores [1, 2, 3, 0], values [10, 20, 30, 40]: 40.7024 / 1.5530 in the terms of the online form.
  SoftmaxAttentionArguments<Real> a;
  a.q = Reals({1, 1, 1, 1});
  a.q.data = {1};
  a.k = Reals({1, 4, 1, 1});
  a.k.data = {1, 2, 3, 0};
  a.v = Reals({1, 4, 1, 1});
  a.v.data = {10, 20, 30, 40};
  a.query_segments = Segments::whole(1, 1);
  a.key_segments = Segments::whole(1, 4);
  a.causal = false;
  const SoftmaxAttentionResults<Real> r = softmax_attention(a);
  EXPECT_NEAR(static_cast<double>(r.o.data[0]), 26.2089, 5e-5);
  EXPECT_NEAR(static_cast<double>(r.lse.data[0]),
              std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0) + 1), 1e-15);
  // A window of one key is that key's value; no key gives 0 and -inf.
  a.causal = true;
  a.window = 1;
  a.q_offset = 2;
  EXPECT_EQ(softmax_attention(a).o.data[0], 30);
  a.q_offset = -1;
  EXPECT_EQ(softmax_attention(a).o.data[0], 0);
  EXPECT_EQ(softmax_attention(a).lse.data[0], -std::numeric_limits<Real>::infinity());
}

TEST(ReferenceShortConv, GradientsAreThoseOfCentralDifferences) {
  for (std::int64_t width : {1, 3, 4}) {
    for (std::int64_t tokens : {0, 1, 2, 7}) {
      for (bool silu : {false, true}) {
        SCOPED_TRACE(testing::Message() << "W " << width << " T " << tokens << " silu " << silu);
        Random random(13);
        ShortConvArguments<Real> a;
        a.x = random_array<Real>(random, {2, tokens, 3}, -2, 2);
        a.weight = random_array<Real>(random, {3, width}, -2, 2);
        a.silu = silu;
        a.segments = Segments::whole(2, tokens);
        if (tokens == 7) a.segments = Segments{{{0, 0, 2}, {0, 2, 0}, {0, 3, 4}, {1, 0, 7}}};
        if (tokens != 1) {
          a.bias = random_array<Real>(random, {3});
          a.s0 = random_array<Real>(random, {a.segments.count(), 3, width});
        }
        const ShortConvResults<Real> r = short_conv(a);
        const ShortConvResults<Real> d{random_array<Real>(random, r.y.shape),
                                       random_array<Real>(random, r.s.shape)};
        const auto loss = [&] {
          const ShortConvResults<Real> now = short_conv(a);
          return dot(now.y, d.y) + dot(now.s, d.s);
        };
        const ShortConvGradients<Real> g = short_conv_backward(a, d);
        expect_gradient("x", a.x, g.x, loss);
        expect_gradient("weight", a.weight, g.weight, loss);
        expect_gradient("bias", a.bias, g.bias, loss);
        if (a.s0.present()) expect_gradient("s0", a.s0, g.s0, loss);
      }
    }
  }
}

TEST(ReferenceShortConv, TheLastColumnMeetsTheCurrentToken) {
  ShortConvArguments<double> a;
  a.x = Array<double>({1, 3, 1});
  a.x.data = {1, 10, 100};
  a.weight = Array<double>({1, 2});
  a.weight.data = {2, 3};
  a.segments = Segments::whole(1, 3);
  const ShortConvResults<double> r = short_conv(a);
  EXPECT_EQ(r.y.data, (std::vector<double>{3, 32, 320}));
  EXPECT_EQ(r.s.data, (std::vector<double>{10, 100}));
}

}  // namespace
}  // namespace ouzel::reference
