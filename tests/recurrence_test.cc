// linear_attention and retention against the float64 reference: forward, backward, parallel, step.
#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "tests/recurrence_case.h"

namespace ouzel {
namespace {

using namespace test;
using enum FeatureMapKind;

constexpr double kOutputBound = 5e-6, kGradientBound = 2e-5;

std::vector<RecurrenceCase> cases() {
  std::vector<RecurrenceCase> list = {
      {.name = "plain"},
      {.name = "no_states", .states = false},
      {.name = "one_token", .tokens = 1},
      {.name = "no_tokens", .tokens = 0},
      {.name = "batch", .batch = 3, .tokens = 70},
      {.name = "identity_normalized", .normalize = true},
      {.name = "elu1", .tokens = 70, .map = kElu1, .normalize = true},
      {.name = "elu1_sum", .map = kElu1},
      {.name = "relu", .tokens = 70, .map = kRelu, .normalize = true},
      {.name = "product", .tokens = 70, .map = kElementwiseProduct, .normalize = true},
      {.name = "product_sum", .map = kElementwiseProduct},
      {.name = "product_features", .map = kElementwiseProduct, .normalize = true, .features = 13},
      {.name = "product_untied",
       .map = kElementwiseProduct,
       .normalize = true,
       .separate_maps = true,
       .cu_seqlens = {0, 7, 7, 8, 19}},
      {.name = "product_heads",
       .hq = 4,
       .map = kElementwiseProduct,
       .normalize = true,
       .separate_maps = true,
       .heads_in_map = true},
      {.name = "product_many",
       .batch = 20,
       .tokens = 5,
       .map = kElementwiseProduct,
       .normalize = true},
      {.name = "noncausal", .tokens = 70, .map = kElu1, .normalize = true, .causal = false},
      {.name = "noncausal_sum", .tokens = 70, .causal = false, .states = false},
      {.name = "noncausal_segments",
       .tokens = 70,
       .map = kRelu,
       .normalize = true,
       .causal = false,
       .cu_seqlens = {0, 0, 3, 67, 70}},
      {.name = "noncausal_product",
       .tokens = 70,
       .map = kElementwiseProduct,
       .normalize = true,
       .causal = false},
      {.name = "reverse", .tokens = 70, .reverse = true},
      {.name = "reverse_elu1", .tokens = 70, .map = kElu1, .normalize = true, .reverse = true},
      {.name = "segments", .tokens = 150, .cu_seqlens = {0, 0, 65, 66, 150}},
      {.name = "segments_elu1",
       .tokens = 150,
       .map = kElu1,
       .normalize = true,
       .reverse = true,
       .cu_seqlens = {0, 0, 65, 66, 150}},
      {.name = "key_groups", .hq = 2, .hk = 2, .hv = 6, .map = kElu1, .normalize = true},
      {.name = "query_divides", .hq = 1, .hk = 2, .hv = 4, .map = kElu1, .normalize = true},
      {.name = "query_groups", .hq = 6, .hk = 1, .hv = 2, .map = kElu1, .normalize = true},
      {.name = "multi_query", .hq = 5, .hk = 1, .hv = 1, .map = kRelu, .normalize = true},
      {.name = "query_groups_sum", .hq = 4, .hk = 1, .hv = 2},
      {.name = "retention", .tokens = 150, .decay = true},
      {.name = "retention_reverse", .tokens = 150, .reverse = true, .decay = true},
      {.name = "retention_segments",
       .tokens = 150,
       .decay = true,
       .cu_seqlens = {0, 1, 1, 65, 130, 150}},
      {.name = "retention_groups", .tokens = 70, .hq = 8, .hk = 2, .hv = 4, .decay = true},
      {.name = "retention_strong",
       .tokens = 150,
       .hq = 8,
       .hk = 8,
       .hv = 8,
       .decay = true,
       .log_decay = {0, -1e-5, -0.7, -1.4, -5, -20, -43, -1000}},
      {.name = "retention_reset",
       .tokens = 70,
       .decay = true,
       .log_decay = {-std::numeric_limits<double>::infinity(), -0.5}},
      {.name = "few_tasks", .tokens = 70, .hq = 1, .hk = 1, .hv = 1, .k = 100, .v = 70},
      {.name = "many_tasks", .tokens = 66, .hq = 16, .hk = 16, .hv = 16, .k = 60, .v = 24},
  };
  const std::int64_t sizes[] = {1, 3, 16, 24, 60, 64, 100, 128};
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    const std::int64_t k = sizes[i], v = sizes[(3 * i + 2) % std::size(sizes)];
    const std::string name = std::to_string(k) + "x" + std::to_string(v);
    list.push_back({.name = "size_" + name, .tokens = 65, .k = k, .v = v});
    list.push_back(
        {.name = "elu1_" + name, .tokens = 17, .k = v, .v = k, .map = kElu1, .normalize = true});
    list.push_back({.name = "retention_" + name, .tokens = 15, .k = k, .v = v, .decay = true});
  }
  for (std::int64_t t : {2, 15, 16, 17, 63, 64, 65, 127, 1000}) {
    list.push_back(
        {.name = "tokens_" + std::to_string(t), .tokens = t, .map = kElu1, .normalize = true});
    list.push_back({.name = "retention_tokens_" + std::to_string(t), .tokens = t, .decay = true});
  }
  // Plain copying, which the tiles do beside their arithmetic.
  list.push_back({.name = "copied", .tokens = 255, .k = 64, .v = 96});
  list.push_back({.name = "copied_no_states", .tokens = 192, .k = 64, .v = 64, .states = false});
  list.push_back({.name = "copied_reverse",
                  .tokens = 200,
                  .k = 64,
                  .v = 64,
                  .reverse = true,
                  .states = false});
  list.push_back({.name = "copied_segments",
                  .tokens = 400,
                  .k = 128,
                  .v = 64,
                  .states = false,
                  .cu_seqlens = {0, 1, 193, 400}});
  return list;
}

TEST(Recurrence, AgreesWithTheReference) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const RecurrenceCase& c : cases()) {
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c);
      const auto truth = reference::recurrence(data.a);
      RecurrenceRun run(data);
      run.forward(context);
      const double largest = std::max(rms(truth.o.data), rms(truth.s.data));
      EXPECT_LE(relative_error(truth.o.data, run.o.values(), largest), kOutputBound);
      EXPECT_LE(relative_error(truth.s.data, doubles(run.final.s), largest), kOutputBound);
      if (c.normalize) {
        EXPECT_LE(relative_error(truth.z.data, doubles(run.final.z), largest), kOutputBound);
      }
      EXPECT_TRUE(run.o.gaps_untouched());
    }
  }
}

TEST(Recurrence, GradientsAgreeWithTheReference) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const RecurrenceCase& c : cases()) {
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c);
      const auto truth = reference::recurrence_backward(data.a, data.up);
      RecurrenceRun run(data);
      run.backward(context);
      double largest = 0;
      for (const Doubles* x : {&truth.q, &truth.k, &truth.v}) {
        largest = std::max(largest, rms(x->data));
      }
      // Normalised, one feature cancels: o does not depend on q, and dq is the difference of two
      // terms of the other gradients' size, good to their rounding.
      const double q_size = c.normalize && data.f == 1 ? 1e3 * largest : largest;
      EXPECT_LE(relative_error(truth.q.data, run.dq.values(), q_size), kGradientBound) << "dq";
      EXPECT_LE(relative_error(truth.k.data, run.dk.values(), largest), kGradientBound) << "dk";
      EXPECT_LE(relative_error(truth.v.data, run.dv.values(), largest), kGradientBound) << "dv";
      EXPECT_TRUE(run.dq.gaps_untouched() && run.dk.gaps_untouched() && run.dv.gaps_untouched());
      if (c.states) {
        EXPECT_LE(relative_error(truth.s0.data, doubles(run.d_initial.s), largest), kGradientBound);
        if (c.normalize) {
          EXPECT_LE(relative_error(truth.z0.data, doubles(run.d_initial.z), largest),
                    kGradientBound);
        }
      }
      const reference::MapWeights<double>* maps[] = {&truth.q_map, &truth.k_map};
      for (int side = 0; side < 2; ++side) {
        const Doubles* d[] = {&maps[side]->w1, &maps[side]->b1, &maps[side]->w2, &maps[side]->b2};
        for (int i = 0; i < 4; ++i) {
          EXPECT_LE(relative_error(d[i]->data, doubles(run.dw[side][i]), largest), kGradientBound)
              << "parameter " << side << " " << i;
        }
      }
    }
  }
}

TEST(Recurrence, ParallelFormAgreesAndGivesWeights) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (RecurrenceCase c : cases()) {
      if (c.tokens > 200) continue;
      SCOPED_TRACE(c.name + " " + name_of(isa));
      c.states = false;
      const RecurrenceData data(c);
      RecurrenceRun run(data);
      RecurrenceOutputs out;
      out.o = run.o.view();
      const std::int64_t t = c.tokens;
      std::vector<float> weights(static_cast<std::size_t>(c.batch * data.ho * t * t), 7.0f);
      out.weights = View<float, 4>(weights.data(), {c.batch, data.ho, t, t});
      if (c.decay) {
        RetentionOptions options = run.retention_options();
        options.form = Form::kParallel;
        retention(context, options, run.inputs(), out);
      } else {
        LinearAttentionOptions options = run.linear_options();
        options.form = Form::kParallel;
        linear_attention(context, options, run.inputs(), out);
      }
      const auto truth = reference::recurrence(data.a);
      const auto w = reference::recurrence_weights(data.a);
      EXPECT_LE(relative_error(truth.o.data, run.o.values(), 0), kOutputBound);
      EXPECT_LE(relative_error(w.data, doubles(weights), 0), kOutputBound);
      EXPECT_TRUE(run.o.gaps_untouched());
    }
  }
}

TEST(Recurrence, StepsAgreeWithTheReference) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const RecurrenceCase& c : cases()) {
      if (!c.causal || c.reverse || !c.cu_seqlens.empty() || c.tokens > 200) continue;
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c);
      const auto truth = reference::recurrence(data.a);
      RecurrenceRun run(data);
      if (!c.states) run.initial = States(data.n, c.hv, data.f, c.v);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const auto token = [t](View<float, 4> x) {
          return View<float, 4>(x(0, t), {x.extent[0], 1, x.extent[2], x.extent[3]}, x.stride);
        };
        const Tensor q = token(run.q.view()), k = token(run.k.view()), v = token(run.v.view());
        if (c.decay) {
          retention_step(context, run.retention_options(), q, k, v, run.initial.view,
                         token(run.o.view()));
        } else {
          linear_attention_step(context, run.linear_options(), q, k, v, run.initial.view,
                                token(run.o.view()));
        }
      }
      const double largest = std::max(rms(truth.o.data), rms(truth.s.data));
      EXPECT_LE(relative_error(truth.o.data, run.o.values(), largest), kOutputBound);
      EXPECT_LE(relative_error(truth.s.data, doubles(run.initial.s), largest), kOutputBound);
      if (c.normalize) {
        EXPECT_LE(relative_error(truth.z.data, doubles(run.initial.z), largest), kOutputBound);
      }
      for (const SequenceState& s : run.initial.sequences) EXPECT_EQ(s.position, c.tokens);
      EXPECT_TRUE(run.o.gaps_untouched());
    }
  }
}

}  // namespace
}  // namespace ouzel
