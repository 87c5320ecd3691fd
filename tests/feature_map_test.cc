// Feature maps: every one of them against its reference, forward, backward and step; the reference
// against central differences and closed-form kernels; errors.
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
#include "tests/central_differences.h"
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
  expect_gradient("x", x, dx, loss);
  expect_gradient("w1", w.w1, d.w1, loss);
  expect_gradient("b1", w.b1, d.b1, loss);
  expect_gradient("w2", w.w2, d.w2, loss);
  expect_gradient("b2", w.b2, d.b2, loss);
  expect_gradient("psi_w1", w.psi_w1, d.psi_w1, loss);
  expect_gradient("psi_b1", w.psi_b1, d.psi_b1, loss);
  expect_gradient("psi_w2", w.psi_w2, d.psi_w2, loss);
  expect_gradient("psi_b2", w.psi_b2, d.psi_b2, loss);
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

// --- errors

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
