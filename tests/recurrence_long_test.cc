// Long sums of linear_attention and retention: streams of narrow positive numbers, and gradients of
// sequences beyond the first 2,048 tokens.
#include <gtest/gtest.h>

#include "tests/recurrence_case.h"

namespace ouzel {
namespace {

using namespace test;
using enum FeatureMapKind;

// A stream of narrow positive numbers, in pieces, then token by token: a plain float32 sum would be
// off by 1e-3.
TEST(RecurrenceLong, LongStreamsStayExact) {
  constexpr std::int64_t kTokens = 200000, kPiece = 8192, kSteps = 3000, kK = 3, kV = 2;
  struct Stream {
    const char* name;
    bool normalize;
    double log_decay;
  };
  const Stream streams[] = {{"sum", false, 0},
                            {"elu1", true, 0},
                            {"decay 1e-6", false, -1e-6},
                            {"decay 1e-4", false, -1e-4},
                            {"decay 4.8e-4", false, -4.8e-4},
                            {"decay 1e-3", false, -1e-3}};
  for (Isa isa : supported_isas()) {
    for (const Stream& stream : streams) {
      SCOPED_TRACE(std::string(stream.name) + " " + name_of(isa));
      Context context({.threads = 1, .isa = isa});
      LinearAttentionOptions linear;
      linear.feature_map.kind = stream.normalize ? kElu1 : kIdentity;
      linear.normalize = stream.normalize;
      linear.scale = 1;
      RetentionOptions decayed;
      decayed.scale = 1;
      decayed.log_decay = {&stream.log_decay, 1};
      States state(1, 1, kK, kV, true);
      double s[kK][kV] = {}, z[kK] = {};
      Random random(17);
      std::vector<double> truth, found;
      std::vector<float> q(kPiece * kK), k(kPiece * kK), v(kPiece * kV), o(kPiece * kV);
      const auto piece = [&](std::int64_t tokens, bool step) {
        for (float* x : {q.data(), k.data()}) {
          for (std::int64_t i = 0; i < tokens * kK; ++i) x[i] = random.uniform(0.33, 0.34);
        }
        for (std::int64_t i = 0; i < tokens * kV; ++i) {
          v[static_cast<std::size_t>(i)] = random.uniform(0.33, 0.34);
        }
        const View<float, 4> qv(q.data(), {1, tokens, 1, kK}), kv(k.data(), {1, tokens, 1, kK});
        const View<float, 4> vv(v.data(), {1, tokens, 1, kV}), ov(o.data(), {1, tokens, 1, kV});
        if (step) {
          stream.log_decay != 0
              ? retention_step(context, decayed, Tensor(qv), Tensor(kv), Tensor(vv), state.view, ov)
              : linear_attention_step(context, linear, Tensor(qv), Tensor(kv), Tensor(vv),
                                      state.view, ov);
        } else {
          RecurrenceInputs inputs;
          inputs.q = Tensor(qv);
          inputs.k = Tensor(kv);
          inputs.v = Tensor(vv);
          inputs.initial_state = state.view;
          RecurrenceOutputs outputs;
          outputs.o = ov;
          outputs.final_state = state.view;
          stream.log_decay != 0 ? retention(context, decayed, inputs, outputs)
                                : linear_attention(context, linear, inputs, outputs);
        }
        const double decay = std::exp(stream.log_decay);
        const double shift = stream.normalize ? 1 : 0;  // elu1 of positive numbers
        for (std::int64_t t = 0; t < tokens; ++t) {
          double den = stream.normalize ? 1e-6 : 1;
          double out[kV] = {};
          for (std::int64_t i = 0; i < kK; ++i) {
            const auto at = static_cast<std::size_t>(t * kK + i);
            const double phi_k = static_cast<double>(k[at]) + shift;
            const double phi_q = static_cast<double>(q[at]) + shift;
            z[i] += phi_k;
            if (stream.normalize) den += phi_q * z[i];
            for (std::int64_t j = 0; j < kV; ++j) {
              s[i][j] = decay * s[i][j] +
                        phi_k * static_cast<double>(v[static_cast<std::size_t>(t * kV + j)]);
              out[j] += phi_q * s[i][j];
            }
          }
          for (std::int64_t j = 0; j < kV; ++j) {
            truth.push_back(out[j] / den);
            found.push_back(static_cast<double>(o[static_cast<std::size_t>(t * kV + j)]));
          }
        }
      };
      for (std::int64_t t = 0; t < kTokens; t += kPiece)
        piece(std::min(kPiece, kTokens - t), false);
      for (std::int64_t t = 0; t < kSteps; ++t) piece(1, true);
      // The whole, and its end alone: early outputs must not hide late ones.
      EXPECT_LE(relative_error(truth, found, 0), 3e-5);
      const auto end = static_cast<std::ptrdiff_t>(truth.size() - 2 * kSteps * kV);
      EXPECT_LE(
          relative_error({truth.begin() + end, truth.end()}, {found.begin() + end, found.end()}, 0),
          3e-5);
      std::vector<double> s_truth;
      for (auto& row : s) s_truth.insert(s_truth.end(), row, row + kV);
      EXPECT_LE(relative_error(s_truth, doubles(state.s), 0), 3e-5);
    }
  }
}

// The gradients of a sequence longer than 2,048 tokens, both sweeps in two parts.
TEST(RecurrenceLong, GradientsOfLongSequences) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (bool decay : {false, true}) {
      RecurrenceCase c{.tokens = 6000, .hq = 1, .hk = 1, .hv = 1, .k = 8, .v = 6, .decay = decay};
      if (decay) c.log_decay = {-1e-4};
      c.map = decay ? kIdentity : kElu1;
      c.normalize = !decay;
      c.positive = true;
      const RecurrenceData data(c, 23);
      const auto truth = reference::recurrence_backward(data.a, data.up);
      RecurrenceRun run(data);
      run.backward(context);
      EXPECT_LE(relative_error(truth.q.data, run.dq.values(), rms(truth.v.data)), 3e-5);
      EXPECT_LE(relative_error(truth.k.data, run.dk.values(), rms(truth.v.data)), 3e-5);
      EXPECT_LE(relative_error(truth.v.data, run.dv.values(), 0), 3e-5);
      EXPECT_LE(relative_error(truth.s0.data, doubles(run.d_initial.s), 0), 3e-5);
    }
  }
}

}  // namespace
}  // namespace ouzel
