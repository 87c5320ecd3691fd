// Calls in C++ without tokens and without states return at once, however many heads or channels are
// without them: the laws of the recurrence in laws_test, calls by name in table_test.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>

#include <gtest/gtest.h>

#include "ouzel/ouzel.h"

namespace ouzel::test {
namespace {

constexpr std::int64_t kMany = std::int64_t{1} << 31;

class WithoutTokens : public testing::Test {
 protected:
  // Parameters of as many heads would be 8 GB, of which nothing may be read.
  float one_ = 1;
  double one64_ = 1;
  Tensor rows{&one_, DType::kF32, {1, 0, kMany, 1}}, numbers{&one_, DType::kF32, {1, 0, kMany}};
  Tensor narrow{&one_, DType::kF32, {1, 0, 1}}, numbers64{&one64_, DType::kF64, {1, 0, kMany}};
  Tensor parameter{&one_, DType::kF32, {kMany}}, parameter_rows{&one_, DType::kF32, {kMany, 1}};
  Tensor square{&one_, DType::kF32, {1, 1}};
  Context context{{.threads = 1}};

  void at_once(const char* name, const std::function<void()>& call) {
    SCOPED_TRACE(name);
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    EXPECT_LT(elapsed.count(), 1.0);
  }
};

TEST_F(WithoutTokens, Softmax) {
  const SoftmaxAttentionInputs inputs{.q = rows, .k = rows, .v = rows};
  at_once("forward",
          [&] { softmax_attention(context, {}, inputs, {.o = rows, .lse = numbers64}); });
  at_once("backward", [&] {
    softmax_attention_backward(context, {}, inputs, rows, numbers64, rows, rows, rows, rows);
  });
}

TEST_F(WithoutTokens, ElementwiseScans) {
  const HgrnInputs h{.x = numbers, .g = numbers};
  at_once("hgrn", [&] { hgrn(context, h, {.o = numbers}); });
  at_once("hgrn_backward",
          [&] { hgrn_backward(context, h, numbers, numbers, {}, numbers, numbers, {}); });
  const RgLruInputs r{.x = numbers, .r = numbers, .i = numbers, .a_param = parameter};
  at_once("rg_lru", [&] { rg_lru(context, {}, r, {.o = numbers}); });
  at_once("rg_lru_backward", [&] {
    rg_lru_backward(context, {}, r, numbers, numbers, {},
                    {.x = numbers, .r = numbers, .i = numbers, .a_param = parameter});
  });
  const Rwkv4Inputs w{.k = numbers, .v = numbers, .w = parameter, .u = parameter};
  at_once("rwkv4", [&] { rwkv4(context, w, {.o = numbers}); });
  at_once("rwkv4_backward", [&] {
    rwkv4_backward(context, w, numbers, {},
                   {.k = numbers, .v = numbers, .w = parameter, .u = parameter});
  });
  const SelectiveScanInputs s{
      .x = numbers, .dt = numbers, .a = parameter_rows, .b = narrow, .c = narrow};
  at_once("selective_scan", [&] { selective_scan(context, {}, s, {.o = numbers}); });
  at_once("selective_scan_backward", [&] {
    selective_scan_backward(
        context, {}, s, numbers, {},
        {.x = numbers, .dt = numbers, .a = parameter_rows, .b = narrow, .c = narrow});
  });
  const ShortConvInputs c{.x = numbers, .weight = parameter_rows, .bias = parameter};
  at_once("short_conv", [&] { short_conv(context, {}, c, numbers, {}); });
  at_once("short_conv_backward", [&] {
    short_conv_backward(context, {}, c, numbers, {}, numbers, parameter_rows, parameter, {});
  });
}

TEST_F(WithoutTokens, Memories) {
  const MlstmInputs m{.q = rows, .k = rows, .v = rows, .i = numbers, .f = numbers};
  at_once("mlstm", [&] { mlstm(context, {}, m, {.o = rows}); });
  at_once("mlstm_backward", [&] {
    mlstm_backward(context, {}, m, {.o = rows},
                   {.q = rows, .k = rows, .v = rows, .i = numbers, .f = numbers});
  });
  const RfaGateInputs r{.q = rows, .k = rows, .v = rows, .gate = numbers, .w = square};
  at_once("rfa_gate", [&] { rfa_gate(context, r, {.o = rows}); });
  at_once("rfa_gate_backward", [&] {
    rfa_gate_backward(context, r, {.o = rows}, {.q = rows, .k = rows, .v = rows, .gate = numbers});
  });
  const GsaInputs g{.q = rows, .k = rows, .v = rows, .s = rows, .g = rows};
  at_once("gsa", [&] { gsa(context, {}, g, {.o = rows}); });
  at_once("gsa_backward", [&] {
    gsa_backward(context, {}, g, {.o = rows},
                 {.q = rows, .k = rows, .v = rows, .s = rows, .g = rows});
  });
  const AbcInputs a{.q = rows, .k = rows, .v = rows, .s = rows};
  at_once("abc", [&] { abc(context, {}, a, {.o = rows}); });
  at_once("abc_backward", [&] {
    abc_backward(context, {}, a, {.o = rows}, {.q = rows, .k = rows, .v = rows, .s = rows});
  });
  const GatedOjaRuleInputs o{.q = rows, .k = rows, .v = rows, .beta = numbers, .gv = rows};
  at_once("gated_oja_rule", [&] { gated_oja_rule(context, {}, o, rows, {}); });
  at_once("gated_oja_rule_backward", [&] {
    gated_oja_rule_backward(context, {}, o, rows, {},
                            {.q = rows, .k = rows, .v = rows, .beta = numbers, .gv = rows});
  });
  const TttLinearInputs t{
      .q = rows, .k = rows, .v = rows, .w = parameter_rows, .b = parameter_rows, .eta = numbers};
  at_once("ttt_linear", [&] { ttt_linear(context, {}, t, {.o = rows}); });
  at_once("ttt_linear_backward", [&] {
    ttt_linear_backward(context, {}, t, {.o = rows},
                        {.q = rows,
                         .k = rows,
                         .v = rows,
                         .w = parameter_rows,
                         .b = parameter_rows,
                         .eta = numbers});
  });
}

// Maps of the positions, and channels, as well as heads. With queries and no positions: zeros.
TEST_F(WithoutTokens, LambdaLayer) {
  const Tensor wide{&one_, DType::kF32, {1, 0, 1, kMany}};
  for (const Tensor& x : {rows, wide}) {
    const LambdaLayerInputs l{.q = x, .k = x, .v = x};
    at_once("lambda_layer", [&] { lambda_layer(context, l, x); });
    at_once("lambda_layer_backward", [&] { lambda_layer_backward(context, l, x, x, x, x); });
  }
  float query = 2, o = NAN, d_query = NAN;
  const Tensor row{&query, DType::kF32, {1, 1, 1, 1}}, out{&o, DType::kF32, {1, 1, 1, 1}};
  const LambdaLayerInputs queries{.q = row, .k = rows, .v = rows};
  at_once("queries alone", [&] { lambda_layer(context, queries, out); });
  EXPECT_EQ(o, 0);
  at_once("queries alone, backward", [&] {
    lambda_layer_backward(context, queries, row, Tensor{&d_query, DType::kF32, {1, 1, 1, 1}}, rows,
                          rows);
  });
  EXPECT_EQ(d_query, 0);
}

// Its points are not tokens: without queries the points get gradients of zero.
TEST_F(WithoutTokens, NadarayaWatson) {
  float x[6] = {1, 2, 3, 4, 5, 6}, d_x[6] = {7, 7, 7, 7, 7, 7}, d_y[3] = {7, 7, 7};
  const Tensor queries{&one_, DType::kF32, {0, 2}}, o{&one_, DType::kF32, {0, 1}};
  const NadarayaWatsonInputs n{
      .x = Tensor{x, DType::kF32, {3, 2}}, .y = Tensor{x, DType::kF32, {3, 1}}, .queries = queries};
  at_once("nadaraya_watson", [&] { nadaraya_watson(context, {}, n, o); });
  at_once("nadaraya_watson_backward", [&] {
    nadaraya_watson_backward(context, {}, n, o, Tensor{d_x, DType::kF32, {3, 2}},
                             Tensor{d_y, DType::kF32, {3, 1}}, queries);
  });
  for (const float d : d_x) EXPECT_EQ(d, 0);
  for (const float d : d_y) EXPECT_EQ(d, 0);
}

TEST_F(WithoutTokens, Averages) {
  const LogLinearAttentionInputs l{
      .q = rows, .k = rows, .v = rows, .g = numbers, .level_scales = rows};
  at_once("log_linear_attention", [&] { log_linear_attention(context, {}, l, rows); });
  at_once("log_linear_attention_backward", [&] {
    log_linear_attention_backward(
        context, {}, l, rows,
        {.q = rows, .k = rows, .v = rows, .g = numbers, .level_scales = rows});
  });
  const EfficientAttentionInputs e{.q = rows, .k = rows, .v = rows};
  for (const bool causal : {false, true}) {
    at_once("efficient_attention",
            [&] { efficient_attention(context, {.causal = causal}, e, {.o = rows}); });
    at_once("efficient_attention_backward", [&] {
      efficient_attention_backward(context, {.causal = causal}, e, {.o = rows},
                                   {.q = rows, .k = rows, .v = rows});
    });
  }
}

}  // namespace
}  // namespace ouzel::test
