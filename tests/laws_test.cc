// The laws of ouzel/laws.h through their objects: what the table of operators does not reach, and
// every law in odd groups of heads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/retention.h"
#include "tests/compare.h"
#include "tests/count_allocations.h"
#include "tests/law_case.h"

namespace ouzel::test {
namespace {

// HQ over HV, below it, and where neither of HQ and HK divides the other.
const LawSizes kSizes[] = {
    {.batch = 2,
     .tokens = 70,
     .query_heads = 4,
     .key_heads = 1,
     .value_heads = 2,
     .keys = 12,
     .values = 20,
     .rows = 2},
    {.batch = 1,
     .tokens = 67,
     .query_heads = 1,
     .key_heads = 2,
     .value_heads = 4,
     .keys = 16,
     .values = 33,
     .rows = 3},
    {.batch = 2,
     .tokens = 9,
     .query_heads = 2,
     .key_heads = 3,
     .value_heads = 6,
     .keys = 5,
     .values = 3,
     .rows = 1},
};

class Laws : public testing::TestWithParam<const Law*> {
 protected:
  const Law& law() const { return *GetParam(); }
  bool is_collinear() const { return law().erase == EraseKind::kCollinear; }
};

std::string name_of_law(const testing::TestParamInfo<const Law*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(All, Laws, testing::ValuesIn(matrix_laws().begin(), matrix_laws().end()),
                         name_of_law);

// Gradients of parameters were added to 1.
void expect_reference(const LawCase& c, const Bounds& bounds) {
  const reference::LawArguments<double> a = c.arguments();
  reference::Tensors<double> truth = reference::law(a);
  Comparison comparison;
  comparison.output("o", c.o.array<float>(), truth.at("o"));
  comparison.output("final_state", c.state(c.final), truth.at("final_state"));
  truth = reference::law_backward(a, {{"do", c.d_o.array<double>()}, {"dht", c.state(c.d_final)}});
  for (const auto& [name, array] : c.grads) {
    reference::Array<double>& d = truth.at("d" + name);
    if (c.input(name).shape[0] != 'B') {
      for (double& x : d.data) x += 1;
    }
    comparison.gradient("d" + name, array.array<float>(), d);
  }
  comparison.gradient("dh0", c.state(c.d_initial), truth.at("dh0"));
  comparison.expect_within(bounds);
}

TEST_P(Laws, AgreeWithTheReference) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const LawSizes& sizes : kSizes) {
      for (bool reverse : {false, true}) {
        SCOPED_TRACE(testing::Message() << name_of(isa) << " HQ " << sizes.query_heads);
        LawCase c(law(), sizes);
        c.options.reverse = reverse;
        c.options.use_qk_l2norm = reverse && is_collinear();
        c.forward(context);
        c.backward(context);
        expect_reference(c, bounds_on(isa, kFloat32));
      }
    }
  }
}

TEST_P(Laws, TakeAndGive16BitFloats) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (const LawSizes& sizes : kSizes) {
        SCOPED_TRACE(testing::Message() << name_of(isa) << " " << name_of(dtype));
        LawCase c(law(), sizes, dtype);
        c.forward(context);
        c.backward(context);
        expect_reference(c, kHalf);
      }
    }
  }
}

TEST_P(Laws, StepsAreTheScanAndAllocateNothing) {
  LawSizes sizes = kSizes[0];
  sizes.batch = 3;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Context context({.threads = 2, .poison_scratch = true});
    LawCase scan(law(), sizes, dtype), steps(law(), sizes, dtype);
    scan.options.use_qk_l2norm = steps.options.use_qk_l2norm = is_collinear();
    scan.forward(context);
    std::vector<SequenceState> storage;
    const StateView state = steps.view(steps.initial, storage);
    for (std::int64_t t = 0; t < sizes.tokens; ++t) {
      const RecurrenceInputs inputs = steps.token(t);
      const std::int64_t before = allocations;
      MatrixLaw{law()}.step(context, steps.options, inputs, state, steps.o.token(t));
      if (t > 0) {
        EXPECT_EQ(allocations, before);
      }
    }
    EXPECT_EQ(storage[2].position, sizes.tokens);
    Comparison comparison;
    comparison.output("o", steps.o.array<float>(), scan.o.array<double>());
    comparison.output("state", steps.state(steps.initial), scan.state(scan.final));
    comparison.expect_within(dtype == DType::kF32 ? kResumed : kHalf);
  }
}

TEST_P(Laws, WriteAFinalStateOverItsInitialOne) {
  Context context({.threads = 2, .poison_scratch = true});
  LawCase apart(law(), kSizes[0]), together(law(), kSizes[0]);
  apart.forward(context);
  std::vector<SequenceState> storage;
  RecurrenceInputs inputs = together.inputs();
  inputs.initial_state = together.view(together.initial, storage);
  MatrixLaw{law()}(context, together.options, inputs,
                   {.o = together.o.tensor(), .final_state = inputs.initial_state});
  EXPECT_EQ(together.initial, apart.final);
}

TEST_P(Laws, LeaveTheStateAsItWasIfADecayGrows) {
  if (law().decay == DecayKind::kNone) return;
  Context context({.threads = 2});
  LawCase c(law(), kSizes[0]);
  const std::vector<float> before = c.initial;
  TypedArray& decay =
      c.in.at(law().find(law().has(LawRole::kRate) ? LawRole::kRate : LawRole::kDecay)->name);
  decay.set(decay.size() - 1, 0.25f);
  std::vector<SequenceState> storage;
  const StateView state = c.view(c.initial, storage);
  RecurrenceInputs inputs = c.inputs();
  inputs.initial_state = state;
  const auto refused = [&](auto&& call) {
    try {
      call();
      ADD_FAILURE() << "a decay of 0.25 was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("log decay"), std::string::npos) << error.what();
    }
    EXPECT_EQ(c.initial, before);
  };
  refused([&] {
    MatrixLaw{law()}(context, c.options, inputs, {.o = c.o.tensor(), .final_state = state});
  });
  refused([&] {
    MatrixLaw{law()}.step(context, c.options, c.token(c.sizes.tokens - 1), state, c.o.token(0));
  });
}

TEST_P(Laws, NeitherReadNorLeavePadding) {
  Context context({.threads = 2, .poison_scratch = true});
  LawSizes sizes = kSizes[0];
  LawCase whole(law(), sizes);
  const auto segments = [&](LawCase& c) {
    c.segments.list = {{0, 3, 60}, {1, 0, 0}, {1, 1, 1}, {1, 4, 20}};
    const auto n = static_cast<std::int64_t>(c.state_size());
    for (auto* s : {&c.initial, &c.final, &c.d_final, &c.d_initial}) {
      s->assign(static_cast<std::size_t>(n), 0.125f);
    }
  };
  LawCase c(law(), sizes);
  segments(c);
  const auto is_padding = [](std::int64_t b, std::int64_t t) {
    return b == 0 ? t < 3 || t >= 63 : t == 0 || (t >= 2 && t < 4) || t >= 24;
  };
  const auto each_row = [&](const TypedArray& x, auto&& visit) {
    const auto row = x.size() / static_cast<std::size_t>(x.shape()[0] * x.shape()[1]);
    const std::int64_t rows = x.shape()[1] / sizes.tokens;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto r = static_cast<std::int64_t>(i / row);
      if (is_padding(r / x.shape()[1], r % x.shape()[1] / rows)) visit(i);
    }
  };
  for (auto& [name, array] : c.in) {
    if (c.input(name).shape[0] != 'B') continue;
    each_row(array, [&, a = &array](std::size_t i) { a->set(i, NAN); });
  }
  each_row(c.d_o, [&](std::size_t i) { c.d_o.set(i, NAN); });
  c.forward(context);
  c.backward(context);
  each_row(c.o, [&](std::size_t i) { EXPECT_EQ(c.o.get(i), 0); });
  for (auto& [name, array] : c.grads) {
    if (c.input(name).shape[0] != 'B') continue;
    each_row(array, [&, n = name, a = &array](std::size_t i) { EXPECT_EQ(a->get(i), 0) << n; });
  }
  for (float x : c.final) EXPECT_TRUE(std::isfinite(x));
  for (std::size_t i = 0; i < c.o.size(); ++i) EXPECT_TRUE(std::isfinite(c.o.get(i)));
}

TEST_P(Laws, WeightsTimesValuesAreTheOutput) {
  if (law().has(LawRole::kWriteGate)) return;  // no weights that all values share
  for (const auto& [dtype, reverse] : {std::pair{DType::kF32, false},
                                       {DType::kF32, true},
                                       {DType::kBF16, true},
                                       {DType::kF16, false}}) {
    Context context({.threads = 2, .poison_scratch = true});
    LawCase scan(law(), kSizes[0], dtype), parallel(law(), kSizes[0], dtype);
    scan.options.reverse = parallel.options.reverse = reverse;
    for (LawCase* c : {&scan, &parallel}) c->in.erase("gv");
    std::fill(scan.initial.begin(), scan.initial.end(), 0.0f);
    scan.forward(context);
    const LawSizes& s = parallel.sizes;
    TypedArray weights({s.batch, s.output_heads(), s.tokens, s.tokens * s.rows}, DType::kF32);
    for (std::size_t i = 0; i < weights.size(); ++i) weights.set(i, NAN);
    parallel.options.form = Form::kParallel;
    MatrixLaw{law()}(context, parallel.options, parallel.inputs(),
                     {.o = parallel.o.tensor(), .weights = weights.tensor()});
    const TypedArray& v = parallel.in.at(law().find(LawRole::kValue)->name);
    const auto w = weights.array<double>();
    const auto values = v.array<double>();
    reference::Array<double> product(parallel.o.shape());
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.output_heads(); ++h) {
        for (std::int64_t t = 0; t < s.tokens; ++t) {
          for (std::int64_t i = 0; i < s.tokens * s.rows; ++i) {
            const std::int64_t token = i / s.rows;
            if (reverse ? token < t : token > t) {
              ASSERT_EQ(w(b, h, t, i), 0);
            }
            for (std::int64_t j = 0; j < s.values; ++j) {
              product(b, t, h, j) +=
                  w(b, h, t, i) * values(b, i, h * s.value_heads / s.output_heads(), j);
            }
          }
        }
      }
    }
    Comparison comparison;
    comparison.output("o of the parallel form", parallel.o.array<float>(), scan.o.array<double>());
    comparison.output("o of the scan", scan.o.array<float>(), product);
    comparison.expect_within(dtype == DType::kF32 ? kFloat32 : kHalf);
  }
}

TEST(LightningAttention, DecaysFollowTheirRules) {
  EXPECT_EQ(lightning_log_decays(4, 1, 4, LightningSlopes::kLinear),
            (std::vector<double>{0, -1.5, -3, -4.5}));
  const std::vector<double> geometric = lightning_log_decays(2, 1, 4, LightningSlopes::kGeometric);
  const double depth = 1 - 1.0 / 3 + 1e-5;
  ASSERT_EQ(geometric.size(), 2u);
  EXPECT_DOUBLE_EQ(geometric[0], -depth / 16);
  EXPECT_DOUBLE_EQ(geometric[1], -depth / 256);
  EXPECT_THROW(lightning_log_decays(4, 4, 4, LightningSlopes::kLinear), Error);
  EXPECT_THROW(lightning_log_decays(0, 0, 4, LightningSlopes::kLinear), Error);
}

TEST(LawChecks, DecaysThatAreARounded0AreTakenAs0) {
  Context context({.threads = 1});
  LawCase zero(*matrix_laws()[0], kSizes[0]), rounded(*matrix_laws()[0], kSizes[0]);
  for (std::size_t i = 0; i < zero.in.at("g").size(); ++i) {
    zero.in.at("g").set(i, 0);
    rounded.in.at("g").set(i, 9e-7f);
  }
  zero.forward(context);
  rounded.forward(context);
  EXPECT_EQ(zero.final, rounded.final);
}

// 2^44 tokens of 2^20 rows are 2^64, which is no number: not 0 rows.
TEST(LawChecks, WithoutTokensThereIsNothingToDoHoweverManyHeads) {
  constexpr std::int64_t kHeads = std::int64_t{1} << 31;
  Context context({.threads = 1});
  float one = 1;
  const Tensor rows(&one, DType::kF32, {1, 0, kHeads, 1}), gates(&one, DType::kF32, {1, 0, kHeads}),
      parameter(&one, DType::kF32, {kHeads}), parameter_rows(&one, DType::kF32, {kHeads, 1});
  for (const Law* law : matrix_laws()) {
    SCOPED_TRACE(law->name);
    RecurrenceInputs inputs;
    RecurrenceInputGrads grads;
    for (const LawInput& input : law->inputs) {
      if (input.name == nullptr) break;
      const std::string shape = input.shape;
      const auto letters = std::ranges::count(shape.substr(0, shape.find('|')), ' ') + 1;
      const bool is_parameter = shape[0] != 'B';
      const Tensor& x = is_parameter   ? letters == 1 ? parameter : parameter_rows
                        : letters == 3 ? gates
                                       : rows;
      inputs.*input.tensor = x;
      grads.*input.gradient = x;
    }
    const MatrixLaw call{*law};
    call(context, {}, inputs, {.o = rows});
    call.backward(context, {}, inputs, nullptr, {.o = rows}, grads);
  }
  retention(context, {}, {.q = rows, .k = rows, .v = rows}, {.o = rows});
  retention_backward(context, {}, {.q = rows, .k = rows, .v = rows}, nullptr, {.o = rows},
                     {.q = rows, .k = rows, .v = rows});
}

TEST(LawChecks, RefuseRowsThatWrap) {
  Context context({.threads = 1});
  const std::int64_t tokens = std::int64_t{1} << 44;
  float number = 0;
  const auto rows = [&](std::int64_t count, int rank) {
    Tensor x(&number, DType::kF32, {1, count, 1, 1});  // all the same one
    x.rank = rank;
    x.stride = {};
    return x;
  };
  const RecurrenceInputs inputs = {
      .q = rows(tokens, 4), .k = rows(0, 4), .v = rows(0, 4), .beta = rows(0, 3)};
  const LawOptions options = {.num_householder = std::int64_t{1} << 20};
  try {
    gated_delta_product(context, options, inputs, {.o = rows(tokens, 4)});
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("num_householder"), std::string::npos) << error.what();
  }
}

TEST(LawChecks, RefuseWhatDoesNotFit) {
  Context context({.threads = 1});
  const auto message = [&](const char* name, auto&& change) -> std::string {
    for (const Law* law : matrix_laws()) {
      if (std::string(law->name) != name) continue;
      LawCase c(*law, kSizes[0]);
      RecurrenceInputs inputs = c.inputs();
      RecurrenceOutputs outputs = {.o = c.o.tensor()};
      change(c.options, inputs, outputs);
      try {
        MatrixLaw{*law}(context, c.options, inputs, outputs);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
        return error.what();
      }
    }
    return "";
  };
  using Options = LawOptions&;
  using In = RecurrenceInputs&;
  using Out = RecurrenceOutputs&;
  EXPECT_EQ(message("kda", [](Options, In in, Out) { in.g = {}; }),
            "kda: g must be [B, T, HV, K] = [2, 70, 2, 12], not missing");
  EXPECT_EQ(message("kda", [](Options, In in, Out) { in.beta = in.g; }),
            "kda: beta must be [B, T, HV] = [2, 70, 2], not [2, 70, 2, 12]");
  EXPECT_EQ(message("delta_rule", [](Options, In in, Out) { in.beta = in.k; }),
            "delta_rule: beta must be [B, T, HV] or [B, T, HV, V] = [2, 70, 2] or [2, 70, 2, 20], "
            "not [2, 70, 1, 12]");
  EXPECT_NE(message("gla", [](Options, In in, Out) { in.beta = in.g; }).find("no input 'beta'"),
            std::string::npos);
  EXPECT_NE(
      message("gla", [](Options o, In, Out) { o.use_qk_l2norm = true; }).find("use_qk_l2norm"),
      std::string::npos);
  EXPECT_NE(message("kda", [](Options o, In, Out) { o.num_householder = 2; }).find("must be 1"),
            std::string::npos);
  EXPECT_NE(message("gated_delta_product", [](Options o, In, Out) { o.num_householder = 3; })
                .find("k must be [B, TN, HK, K] = [2, 210, 1, 12]"),
            std::string::npos);
  EXPECT_NE(
      message("gdn2", [](Options o, In, Out) { o.form = Form::kParallel; }).find("all values"),
      std::string::npos);
  EXPECT_NE(message("dplr", [](Options, In in, Out) { in.a.stride[3] = 2; }).find("contiguous"),
            std::string::npos);
  EXPECT_NE(message("rwkv7", [](Options, In in, Out) { in.v.dtype = DType::kF64; })
                .find("v must be F32, BF16 or F16, not F64"),
            std::string::npos);
  EXPECT_NE(message("simple_gla", [](Options, In, Out out) { out.o.extent[2] = 2; })
                .find("o must be [B, T, HO, V] = [2, 70, 4, 20]"),
            std::string::npos);
  EXPECT_NE(message("simple_gla", [](Options o, In, Out) { o.scale = NAN; }).find("scale"),
            std::string::npos);
}

}  // namespace
}  // namespace ouzel::test
