// Feature maps: every one of them against its reference, forward, backward and step; the reference
// against central differences and closed-form kernels; running maxima; random projections; errors.
#include "ouzel/feature_map.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/linear_attention.h"
#include "src/ops/feature_map.h"
#include "src/ops/reference/feature_map.h"
#include "tests/calls.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;
using enum FeatureMapKind;

std::string name_of(const FeatureMapInfo& info) {
  return info.name + std::string(info.variant != nullptr ? "_" : "") +
         (info.variant != nullptr ? info.variant : "");
}
std::string name_of(const testing::TestParamInfo<FeatureMapInfo>& info) {
  return name_of(info.param);
}
class EachMap : public testing::TestWithParam<FeatureMapInfo> {};
INSTANTIATE_TEST_SUITE_P(, EachMap, testing::ValuesIn(feature_maps().begin(), feature_maps().end()),
                         [](const auto& info) { return name_of(info); });

struct Case {
  Int batch = 1, tokens = 70, hq = 2, hk = 2, hv = 2, k = 5, v = 4, rows = 7;
  bool normalize = true, causal = true, reverse = false, states = false;
  bool per_head = false, untied = false;
  std::vector<Int> cu_seqlens;
  double spread = 1;
};

template <class Real>
reference::MapWeights<Real> weights_of(const FeatureMapInfo& info, const Case& c, Int heads,
                                       Random& random) {
  reference::MapWeights<Real> w;
  const auto shape = [&](std::vector<Int> tail) {
    if (c.per_head) tail.insert(tail.begin(), heads);
    return tail;
  };
  // Signed maps: features near 1, so that denominators keep away from 0.
  const bool product = info.kind == kElementwiseProduct;
  const double spread = product ? 0.5 / std::sqrt(static_cast<double>(c.k)) : 0.8;
  const auto matrix = [&] {
    return random_array<Real>(random, shape({c.rows, c.k}), -spread, spread);
  };
  const auto bias = [&] {
    return random_array<Real>(random, shape({c.rows}), product ? 0.9 : -0.5, product ? 1.1 : 0.5);
  };
  if (info.projections > 0) w.w1 = matrix();
  if (info.projections > 0 && info.bias) w.b1 = bias();
  if (info.projections > 1) w.w2 = matrix();
  if (info.projections > 1 && info.bias) w.b2 = bias();
  if (info.psi) {
    w.psi_w1 = random_array<Real>(random, {6}, 0.2, 1);
    w.psi_b1 = random_array<Real>(random, {6}, 0.5, 1);
    w.psi_w2 = random_array<Real>(random, {3, 6}, 0.2, 0.6);
    w.psi_b2 = random_array<Real>(random, {3}, 0.5, 1);
  }
  return w;
}

FeatureMapOptions options_of(FeatureMapKind kind) {
  FeatureMapOptions o;
  o.nu = 3;
  if (kind == kCosformer) o.max_length = 400;
  return o;
}

Call call_of(const FeatureMapInfo& info, const Case& c, std::uint64_t seed) {
  Random random(seed);
  Recurrence a;
  a.map = info.kind;
  a.map_options = options_of(info.kind);
  a.segments =
      c.cu_seqlens.empty() ? Segments::whole(c.batch, c.tokens) : Segments::packed(c.cu_seqlens);
  // Maps whose weights may be negative see positive data, since a denominator must not come near 0;
  // so does rebased, whose features cancel where q.k is small beside |q| |k|.
  const bool is_signed = info.kind == kIdentity || info.kind == kTaylor1 ||
                         info.kind == kRandomFourier || info.kind == kL2Norm ||
                         info.kind == kRebased;
  const double hi = is_signed ? 0.6 : c.spread, lo = is_signed ? 0.2 : -c.spread;
  a.q = random_array<double>(random, {c.batch, c.tokens, c.hq, c.k}, lo, hi);
  a.k = random_array<double>(random, {c.batch, c.tokens, c.hk, c.k}, lo, hi);
  a.v = random_array<double>(random, {c.batch, c.tokens, c.hv, c.v});
  a.q_map = weights_of<double>(info, c, c.hq, random);
  if (c.untied && info.projections > 0) a.k_map = weights_of<double>(info, c, c.hk, random);
  a.scale = 0.75;
  a.normalize = c.normalize;
  a.eps = info.eps;
  a.causal = c.causal;
  a.reverse = c.reverse;
  Call call;
  const Int features = reference::feature_count<double>({a.map, a.map_options}, a.q_map, c.k);
  const Int n = a.segments.count();
  if (c.states) {
    a.s0 = random_array<double>(random, {n, c.hv, features, c.v});
    call.upstream["dht"] = random_array<double>(random, {n, c.hv, features, c.v});
    if (c.normalize) {
      a.z0 = random_array<double>(random, {n, c.hv, features}, 0.5, 1.5);
      call.upstream["dzt"] = random_array<double>(random, {n, c.hv, features});
    }
  }
  call.upstream["do"] =
      random_array<double>(random, {c.batch, c.tokens, std::max(c.hq, c.hv), c.v});
  call.arguments = std::move(a);
  return call;
}

std::vector<Case> cases() {
  return {
      {},
      {.batch = 2, .tokens = 1, .states = true},
      {.tokens = 130, .k = 9, .v = 33, .states = true},
      {.tokens = 65, .k = 17, .rows = 40},
      {.normalize = false, .states = true},
      {.causal = false},
      {.tokens = 130, .normalize = false, .causal = false},
      {.reverse = true, .states = true},
      {.states = true, .cu_seqlens = {0, 0, 65, 66, 70}},
      {.hq = 4, .hk = 2, .hv = 2, .states = true, .untied = true},
      {.hq = 1, .hk = 1, .hv = 3, .per_head = true},
      {.states = true, .per_head = true, .untied = true},
  };
}

// --- the reference
// --------------------------------------------------------------------------------

using LongReal = long double;

TEST_P(EachMap, ReferenceGradientsAreThoseOfCentralDifferences) {
  const FeatureMapInfo& info = GetParam();
  const reference::Map map{info.kind, options_of(info.kind)};
  Random random(3);
  Case c;
  c.per_head = true;
  reference::MapWeights<LongReal> w = weights_of<LongReal>(info, c, 2, random);
  reference::Array<LongReal> x = random_array<LongReal>(random, {c.k});
  const Int features = reference::feature_count(map, w, c.k);
  const auto seeds = random_array<LongReal>(random, {features});
  const auto loss = [&] {
    LongReal sum = 0;
    const auto phi = reference::features(map, w, 1, x.data.data(), c.k, 17);
    for (std::size_t f = 0; f < phi.size(); ++f) sum += seeds.data[f] * phi[f];
    return sum;
  };
  using A = reference::Array<LongReal>;
  reference::MapWeights<LongReal> d{A::like(w.w1),     A::like(w.b1),     A::like(w.w2),
                                    A::like(w.b2),     A::like(w.psi_w1), A::like(w.psi_b1),
                                    A::like(w.psi_w2), A::like(w.psi_b2)};
  A dx(x.shape);
  reference::features_backward(map, w, 1, x.data.data(), c.k, 17, seeds.data, d, dx.data.data());
  const auto check = [&](const char* name, A& at, const A& gradient) {
    for (std::size_t i = 0; i < at.data.size(); ++i) {
      const LongReal center = at.data[i], h = 1e-6L;
      at.data[i] = center + h;
      const LongReal above = loss();
      at.data[i] = center - h;
      const LongReal below = loss();
      at.data[i] = center;
      const auto expected = static_cast<double>((above - below) / (2 * h));
      EXPECT_NEAR(static_cast<double>(gradient.data[i]), expected, 2e-9 * (1 + std::abs(expected)))
          << name << "[" << i << "]";
    }
  };
  check("x", x, dx);
  check("w1", w.w1, d.w1);
  check("b1", w.b1, d.b1);
  check("w2", w.w2, d.w2);
  check("b2", w.b2, d.b2);
  check("psi_w1", w.psi_w1, d.psi_w1);
  check("psi_b1", w.psi_b1, d.psi_b1);
  check("psi_w2", w.psi_w2, d.psi_w2);
  check("psi_b2", w.psi_b2, d.psi_b2);
}

TEST(ReferenceMaps, AreTheirKernels) {
  Random random(4);
  const Int size = 6;
  const auto x = random_array<double>(random, {size}), y = random_array<double>(random, {size});
  double dot = 0, relu_dot = 0;
  for (std::size_t i = 0; i < 6; ++i) {
    dot += x.data[i] * y.data[i];
    relu_dot += std::max(x.data[i], 0.0) * std::max(y.data[i], 0.0);
  }
  const auto kernel = [&](FeatureMapKind kind, Int position = 0) {
    const reference::Map map{kind, options_of(kind)};
    const auto a = reference::features<double>(map, {}, 0, x.data.data(), size, position + 5);
    const auto b = reference::features<double>(map, {}, 0, y.data.data(), size, 5);
    double sum = 0;
    for (std::size_t f = 0; f < a.size(); ++f) sum += a[f] * b[f];
    return sum;
  };
  const double s = dot / std::sqrt(6.0);
  EXPECT_NEAR(kernel(kTaylor1), 1 + s, 1e-15);
  EXPECT_NEAR(kernel(kTaylor2), 1 + s + s * s / 2, 1e-15);
  EXPECT_NEAR(kernel(kTaylor2Symmetric), 1 + s + s * s / 2, 1e-15);
  EXPECT_NEAR(kernel(kRebased), s * s, 1e-15);
  EXPECT_NEAR(kernel(kCosformer, 100), relu_dot * std::cos(std::acos(0.0) * 100 / 400), 1e-15);
}

// --- the operator
// ---------------------------------------------------------------------------------

TEST_P(EachMap, AgreesWithItsReference) {
  const FeatureMapInfo& info = GetParam();
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    std::uint64_t seed = 10;
    for (const Case& c : cases()) {
      SCOPED_TRACE(testing::Message() << ouzel::name_of(isa) << " case " << seed - 10);
      const Call call = call_of(info, c, ++seed);
      // Parameters' gradients add up what is left of nearly equal terms.
      const bool flat =
          c.normalize && (c.tokens == 1 || info.kind == kLuna || info.kind == kElementwiseProduct);
      expect_within(run(context, call), run_reference(call), bounds_on(isa, kFloat32),
                    flat ? kQuotientFloor : kFloor);
      Call parallel = call;
      auto& a = std::get<Recurrence>(parallel.arguments);
      a.s0 = a.z0 = Doubles();
      parallel.upstream.clear();
      parallel.form = Form::kParallel;
      expect_within(run(context, parallel), run_reference(parallel), bounds_on(isa, kFloat32));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EachMap, StepsAreTheScan) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (bool normalize : {true, false}) {
      Call call = call_of(GetParam(), {.batch = 2, .hq = 4, .normalize = normalize}, 30);
      call.upstream.clear();
      SCOPED_TRACE(ouzel::name_of(isa));
      expect_within(run_steps(context, call), run_reference(call), bounds_on(isa, kFloat32));
    }
  }
}

Floats output(const Results<float>& r) { return r.outputs.front().array; }

TEST_P(EachMap, LaterTokensNeverChangeEarlierOutputs) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (Form form : {Form::kScan, Form::kParallel}) {
      Call call = call_of(GetParam(), {.tokens = 100}, 40);
      call.upstream.clear();
      call.form = form;
      const Floats before = output(run(context, call));
      for (double value : {std::numeric_limits<double>::quiet_NaN(), 1e30, 80.0, -1e30}) {
        for (Int from : {1, 20, 64, 99}) {
          Call changed = call;
          auto& a = std::get<Recurrence>(changed.arguments);
          for (Doubles* x : {&a.q, &a.k, &a.v}) {
            const Int row = static_cast<Int>(x->data.size()) / 100;
            std::fill(x->data.begin() + from * row, x->data.end(), value);
          }
          const Floats after = output(run(context, changed));
          const auto end = static_cast<std::size_t>(from * 2 * 4);
          EXPECT_TRUE(std::equal(before.data.begin(),
                                 before.data.begin() + static_cast<std::ptrdiff_t>(end),
                                 after.data.begin()))
              << ouzel::name_of(isa) << " " << value << " from " << from;
        }
      }
    }
  }
}

TEST_P(EachMap, ThreadsAndCompanyChangeNothing) {
  const Case c{.batch = 3, .tokens = 100};
  const Call call = call_of(GetParam(), c, 50);
  const auto isa = supported_isas().front();
  Context one({.threads = 1, .isa = isa, .poison_scratch = true});
  Context three({.threads = 3, .isa = isa, .poison_scratch = true});
  const Results<float> a = run(one, call), b = run(three, call);
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    EXPECT_TRUE(same_bits(a.outputs[i].array, b.outputs[i].array)) << a.outputs[i].name;
  }
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(same_bits(a.gradients[i].array, b.gradients[i].array)) << a.gradients[i].name;
  }
}

// --- running maxima
// -------------------------------------------------------------------------------

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

// --- random projections
// ---------------------------------------------------------------------------

Floats projection(std::uint64_t seed, ProjectionNorms norms, Int rows, Int keys) {
  Floats w({rows, keys});
  draw_orthogonal_projection(seed, norms, View<float, 2>(w.data.data(), {rows, keys}));
  return w;
}

TEST(Projection, RowsAreOrthogonalInBlocks) {
  const Int keys = 8;
  for (ProjectionNorms norms : {ProjectionNorms::kChi, ProjectionNorms::kSqrt}) {
    const Floats w = projection(1, norms, 20, keys);
    for (Int a = 0; a < 20; ++a) {
      for (Int b = a; b < 20; ++b) {
        double dot = 0;
        for (Int i = 0; i < keys; ++i) {
          dot += static_cast<double>(w(a, i)) * static_cast<double>(w(b, i));
        }
        if (a != b && a / keys == b / keys) {
          EXPECT_NEAR(dot, 0, 1e-5);
        }
        if (a == b && norms == ProjectionNorms::kSqrt) {
          EXPECT_NEAR(dot, 8, 1e-5);
        }
      }
    }
  }
  EXPECT_TRUE(same_bits(projection(5, ProjectionNorms::kChi, 9, 4),
                        projection(5, ProjectionNorms::kChi, 9, 4)));
  EXPECT_FALSE(same_bits(projection(5, ProjectionNorms::kChi, 9, 4),
                         projection(6, ProjectionNorms::kChi, 9, 4)));
}

// The mean over draws of phi(x).phi(y) is exp(x.y / sqrt(d)).
TEST(Projection, FavorIsUnbiased) {
  Random random(9);
  const Int size = 8, rows = 16, draws = 4000;
  const auto x = random_array<double>(random, {size}), y = random_array<double>(random, {size});
  double dot = 0;
  for (std::size_t i = 0; i < 8; ++i) dot += x.data[i] * y.data[i];
  for (FeatureMapKind kind : {kFavorPositive, kFavorHyperbolic}) {
    double sum = 0, square = 0;
    for (Int draw = 0; draw < draws; ++draw) {
      const Floats w =
          projection(static_cast<std::uint64_t>(draw), ProjectionNorms::kChi, rows, size);
      reference::MapWeights<double> weights;
      weights.w1 = Doubles({rows, size});
      std::copy(w.data.begin(), w.data.end(), weights.w1.data.begin());
      const auto a = reference::features<double>({kind, {}}, weights, 0, x.data.data(), size, 0);
      const auto b = reference::features<double>({kind, {}}, weights, 0, y.data.data(), size, 0);
      double kernel = 0;
      for (std::size_t f = 0; f < a.size(); ++f) kernel += a[f] * b[f];
      sum += kernel;
      square += kernel * kernel;
    }
    const double mean = sum / draws;
    const double deviation = std::sqrt((square / draws - mean * mean) / draws);
    EXPECT_NEAR(mean, std::exp(dot / std::sqrt(8.0)), 5 * deviation);
  }
}

// --- errors
// ---------------------------------------------------------------------------------------

TEST(FeatureMapErrors, NameWhatIsMissingOrSuperfluous) {
  Context context({.threads = 1});
  Floats x({1, 3, 2, 4}), w({5, 4}), b({5}), o({1, 3, 2, 4});
  const auto message = [&](const auto& change) {
    LinearAttentionOptions options;
    change(options);
    RecurrenceInputs in;
    in.q = in.k = in.v = View<const float, 4>(x.data.data(), {1, 3, 2, 4});
    try {
      linear_attention(context, options, in, {.o = View<float, 4>(o.data.data(), {1, 3, 2, 4})});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const auto expect = [&](const char* part, const auto& change) {
    const std::string said = message(change);
    EXPECT_NE(said.find(part), std::string::npos) << said;
    EXPECT_EQ(said.find("linear_attention: "), 0u) << said;
  };
  using O = LinearAttentionOptions&;
  const ConstTensor matrix = View<const float, 2>(w.data.data(), {5, 4});
  const ConstTensor vector = View<const float, 1>(b.data.data(), {5});
  expect("t2r needs the parameter q.w1", [](O o) { o.feature_map.kind = kT2r; });
  expect("softmax takes no parameter q.w1", [&](O o) {
    o.feature_map.kind = kSoftmax;
    o.feature_map.q.w1 = matrix;
  });
  expect("hedgehog (separate) takes no parameter q.b1", [&](O o) {
    o.feature_map.kind = kHedgehogSeparate;
    o.feature_map.q.w1 = matrix;
    o.feature_map.q.b1 = vector;
  });
  expect("q.b1 must be a contiguous float32 array [5] or [2, 5]", [&](O o) {
    o.feature_map.kind = kT2r;
    o.feature_map.q.w1 = matrix;
    o.feature_map.q.b1 = matrix;
  });
  expect("luna needs the parameter q.psi_w1", [&](O o) {
    o.feature_map.kind = kLuna;
    o.feature_map.q.w1 = matrix;
  });
  expect("cosformer needs m", [](O o) { o.feature_map.kind = kCosformer; });
  expect("end at its length m = 2, and sequence 0 reaches position 2", [](O o) {
    o.feature_map.kind = kCosformer;
    o.feature_map.options.max_length = 2;
  });
  expect("nu of the feature map dpfp", [](O o) {
    o.feature_map.kind = kDpfp;
    o.feature_map.options.nu = 0;
  });
  expect("must be at least 0", [](O o) {
    o.feature_map.kind = kTaylor2;
    o.feature_map.options.kernel_scale = -1;
  });
}

}  // namespace
}  // namespace ouzel::test
