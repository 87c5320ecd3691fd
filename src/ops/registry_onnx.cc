// The rows of ONNX's nodes LinearAttention and CausalConvWithState (opset 27), with its names and
// packed layouts: heads lie side by side in the last axis, convolutions have channels before
// tokens. Each is a call of one of the other operators on views of the same memory.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/laws.h"
#include "ouzel/linear_attention.h"
#include "ouzel/short_conv.h"
#include "src/base/context_impl.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

[[noreturn]] void refuse(const OperatorCall& call, const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", call.name(), sentence));
}

std::int64_t heads_of(const OperatorCall& call, const char* attribute) {
  const auto heads = call.attributes().integer(attribute);
  if (!heads || *heads < 1) refuse(call, fmt::format("{} must be given, at least 1", attribute));
  return *heads;
}

void set_attention_extents(OperatorCall& call) {
  const std::int64_t query_heads = heads_of(call, "q_num_heads");
  const std::int64_t heads = heads_of(call, "kv_num_heads");
  if (query_heads % heads != 0) {
    refuse(call,
           fmt::format("q_num_heads {} must be a multiple of kv_num_heads {}", query_heads, heads));
  }
  const auto size = [&](const char* letter, const char* tensor, std::int64_t count) {
    const std::int64_t width = call.extent(letter);
    if (width % count == 0) return width / count;
    refuse(call, fmt::format("the last axis of {}, {}, must be a multiple of its {} heads", tensor,
                             width, count));
  };
  const std::int64_t keys = size("QD", "query", query_heads);
  const std::int64_t values = size("VD", "value", heads);
  call.set_extent("KD", heads * keys, "the key size of query");
  call.set_extent("HV", heads, "kv_num_heads");
  call.set_extent("K", keys, "query");
  call.set_extent("V", values, "value");
  call.set_extent("OD", query_heads * values, "value");
  const auto one_of = [&](const char* tensor, const char* letter, std::int64_t a, std::int64_t b) {
    if (!call.in(tensor).present()) return;
    const std::int64_t width = call.extent(letter);
    if (width == a || width == b) return;
    refuse(call, fmt::format("the last axis of {} must be {} or {}, not {}", tensor, a, b, width));
  };
  one_of("decay", "GD", heads, heads * keys);
  one_of("beta", "BD", heads, 1);
}

// [B, T, heads * size] as [B, T, heads, size].
template <bool Const>
BasicTensor<Const> by_head(const BasicTensor<Const>& packed, std::int64_t heads) {
  if (!packed.present()) return packed;
  BasicTensor<Const> x = packed;
  x.rank = 4;
  x.extent[3] = packed.extent[2] / heads;
  x.extent[2] = heads;
  x.stride[2] = x.extent[3];
  x.stride[3] = 1;
  return x;
}

const MatrixLaw& law_of(const std::string& rule, bool per_key) {
  if (rule == "gated") return per_key ? gla : simple_gla;
  if (rule == "delta") return delta_rule;
  return per_key ? kda : gated_delta_rule;
}

void attend(OperatorCall& call) {
  const std::string rule = call.attributes().text("update_rule");
  const std::int64_t query_heads = call.extent("OD") / call.extent("V"), heads = call.extent("HV");
  const double given = call.attributes().number("scale").value_or(0);
  const std::optional<double> scale = given == 0 ? std::nullopt : std::optional(given);
  // Where heads have one key, both shapes of a decay mean the same.
  const bool decays = call.in("decay").present();
  const bool per_key = decays && call.extent("GD") != heads;
  const auto decay = [&](const auto& x) { return per_key ? by_head(x, heads) : x; };
  // One strength for all heads is a view of it in each; its gradient is the sum of theirs.
  const bool shared = call.in("beta").present() && call.extent("BD") < heads;
  ConstTensor beta = call.in("beta");
  Tensor beta_grad = call.out("dbeta");
  Array beta_grads;
  if (shared) {
    beta.extent[2] = heads;
    beta.stride[2] = 0;
    if (beta_grad.present()) {
      beta_grads = Array({call.extent("B"), call.extent("T"), heads});
      beta_grad = beta_grads.tensor;
    }
  }
  std::vector<SequenceState> storage[4];
  const auto state = [&](const ConstTensor& s, std::size_t which) {
    if (!s.present()) return StateView();
    return state_view(writable(s), {}, storage[which]);
  };
  const RecurrenceInputs inputs = {.q = by_head(call.in("query"), query_heads),
                                   .k = by_head(call.in("key"), heads),
                                   .v = by_head(call.in("value"), heads),
                                   .g = decay(call.in("decay")),
                                   .beta = beta,
                                   .initial_state = state(call.in("past_state"), 0)};
  RecurrenceOutputs outputs = {.o = by_head(call.out("output"), query_heads),
                               .final_state = state(call.out("present_state"), 1)};
  const bool linear = rule == "linear";
  const LinearAttentionOptions linear_options = {.scale = scale};
  const LawOptions options = {.scale = scale};
  const MatrixLaw& law = law_of(rule, per_key);
  if (call.extent("T") == 1 && !call.backward()) {
    // A step reads and writes a state once: on a copy.
    Array scratch;
    Tensor present = call.out("present_state");
    if (!present.present()) {
      scratch = Array::unset({call.extent("B"), heads, call.extent("K"), call.extent("V")});
      present = scratch.tensor;
    }
    copy_or_clear(call.context(), call.in("past_state"), present);
    const StateView state_now = state(present, 1);
    RecurrenceInputs token = inputs;
    token.initial_state = {};
    if (linear) {
      linear_attention_step(call.context(), linear_options, token.q, token.k, token.v, state_now,
                            outputs.o);
    } else {
      law.step(call.context(), options, token, state_now, outputs.o);
    }
    return;
  }
  Buffer saved;
  if (call.wants_outputs()) {
    if (call.backward() && !linear) saved = Buffer(law.saved_bytes(options, inputs));
    outputs.saved = saved.data();
    if (linear) {
      linear_attention(call.context(), linear_options, inputs, outputs);
    } else {
      law(call.context(), options, inputs, outputs);
    }
  }
  if (!call.backward()) return;
  const RecurrenceOutputGrads output_grads = {.o = by_head(call.in("doutput"), query_heads),
                                              .final_state = state(call.in("dpresent_state"), 2)};
  const RecurrenceInputGrads grads = {.q = by_head(call.out("dquery"), query_heads),
                                      .k = by_head(call.out("dkey"), heads),
                                      .v = by_head(call.out("dvalue"), heads),
                                      .g = decay(call.out("ddecay")),
                                      .beta = beta_grad,
                                      .initial_state = state(call.out("dpast_state"), 3)};
  if (linear) {
    linear_attention_backward(call.context(), linear_options, inputs, nullptr, output_grads, grads,
                              nullptr);
  } else {
    law.backward(call.context(), options, inputs, saved.data(), output_grads, grads);
  }
  if (!shared || !beta_grad.present()) return;
  const View<float, 3> sums = call.out("dbeta").view<float, 3>();
  const View<float, 3> parts = beta_grad.view<float, 3>();
  for (std::int64_t b = 0; b < parts.extent[0]; ++b) {
    for (std::int64_t t = 0; t < parts.extent[1]; ++t) {
      float sum = 0;
      for (std::int64_t h = 0; h < heads; ++h) sum += parts.at(b, t, h);
      sums.at(b, t, 0) = sum;
    }
  }
}

// What a law refuses, a decay above 0, it calls by its own names.
void run_attention(OperatorCall& call) {
  try {
    attend(call);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kInvalidArgument) throw;
    refuse(call, fmt::format("decay is g here: {}", e.what()));
  }
}

void set_conv_extents(OperatorCall& call) {
  call.set_extent("TP", call.extent("W") - 1, "the width of weight");
}

// [B, D, T] into [B, T, D], or back: tiles of whole cache lines, through memory of their own. Rows
// are often a multiple of a page apart, so that few of their lines stay in the first-level cache.
void exchange_axes(Context& context, const ConstTensor& from, const Tensor& to) {
  if (!from.present() || !to.present()) return;
  constexpr std::int64_t kTile = 16;
  const View<const float, 3> x = from.view<const float, 3>();
  const View<float, 3> y = to.view<float, 3>();
  const std::int64_t tiles = (x.extent[1] + kTile - 1) / kTile;
  context.impl().run(x.extent[0] * tiles, [&](std::int64_t task, Scratch&) {
    const std::int64_t b = task / tiles, first = task % tiles * kTile;
    const std::int64_t rows = std::min(kTile, x.extent[1] - first);
    for (std::int64_t begin = 0; begin < x.extent[2]; begin += kTile) {
      check_cancelled_at(begin / kTile);
      const std::int64_t columns = std::min(kTile, x.extent[2] - begin);
      float tile[kTile][kTile];
      for (std::int64_t i = 0; i < rows; ++i) {
        std::copy_n(x(b, first + i, begin), columns, tile[i]);
      }
      for (std::int64_t j = 0; j < columns; ++j) {
        float* row = y(b, begin + j, first);
        for (std::int64_t i = 0; i < rows; ++i) row[i] = tile[i][j];
      }
    }
  });
}

// [B, D, 1] as [B, 1, D].
template <bool Const>
BasicTensor<Const> as_row(BasicTensor<Const> x) {
  std::swap(x.extent[1], x.extent[2]);
  x.stride[2] = std::exchange(x.stride[1], x.stride[0]);
  return x;
}

// Ouzel's window has one input more than the node's, the oldest, which no output reads.
Tensor past_of(const Array& window) {
  Tensor x = window.tensor;
  if (!x.present()) return x;
  x.data = static_cast<float*>(x.data) + x.stride[2];
  --x.extent[2];
  return x;
}
void copy_rows(const ConstTensor& from, const Tensor& to) {
  const View<const float, 3> x = from.view<const float, 3>();
  const View<float, 3> y = to.view<float, 3>();
  for (std::int64_t b = 0; b < x.extent[0]; ++b) {
    for (std::int64_t d = 0; d < x.extent[1]; ++d) {
      for (std::int64_t j = 0; j < x.extent[2]; ++j) y.at(b, d, j) = x.at(b, d, j);
    }
  }
}

void run_conv(OperatorCall& call) {
  const std::int64_t batch = call.extent("B"), tokens = call.extent("T"),
                     channels = call.extent("D");
  const auto rows = [&](bool wanted) {
    return wanted ? Array::unset({batch, tokens, channels}) : Array();
  };
  const auto window = [&](const ConstTensor& past, bool wanted) {
    Array w = wanted ? Array({batch, channels, call.extent("W")}) : Array();
    if (past.present()) copy_rows(past, past_of(w));
    return w;
  };
  const std::string activation = call.attributes().text("activation");
  const ShortConvOptions options = {.activation = activation == "none" ? ConvActivation::kNone
                                                                       : ConvActivation::kSilu};
  const Array x = rows(true), y = rows(true);
  const ConstTensor past = call.in("past_state");
  if (tokens == 1 && call.extent("W") > 1 && !call.backward()) {
    Array scratch;
    Tensor present = call.out("present_state");
    if (!present.present()) {
      scratch = Array::unset({batch, channels, call.extent("W") - 1});
      present = scratch.tensor;
    }
    copy_or_clear(call.context(), past, present);
    copy_tensor(call.context(), as_row(call.in("input")), x.tensor);
    short_conv_step(call.context(), options, x.tensor, call.in("weight"), call.in("bias"), present,
                    y.tensor);
    copy_tensor(call.context(), y.tensor, as_row(call.out("output")));
    return;
  }
  exchange_axes(call.context(), call.in("input"), x.tensor);
  const Array initial = window(past, past.present()), final = window({}, true);
  const ShortConvInputs inputs = {.x = x.tensor,
                                  .weight = call.in("weight"),
                                  .bias = call.in("bias"),
                                  .initial_state = initial.tensor};
  short_conv(call.context(), options, inputs, y.tensor, final.tensor);
  exchange_axes(call.context(), y.tensor, call.out("output"));
  if (const Tensor present = call.out("present_state"); present.present()) {
    copy_rows(past_of(final), present);
  }
  if (!call.backward()) return;
  const Array dy = rows(true), dx = rows(call.out("dinput").present());
  exchange_axes(call.context(), call.in("doutput"), dy.tensor);
  const ConstTensor upstream = call.in("dpresent_state");
  const Tensor past_grad = call.out("dpast_state");
  const Array final_grad = window(upstream, upstream.present());
  const Array initial_grad = window({}, past_grad.present());
  short_conv_backward(call.context(), options, inputs, dy.tensor, final_grad.tensor, dx.tensor,
                      call.out("dweight"), call.out("dbias"), initial_grad.tensor);
  exchange_axes(call.context(), dx.tensor, call.out("dinput"));
  if (past_grad.present()) copy_rows(past_of(initial_grad), past_grad);
}

}  // namespace

std::vector<OperatorInfo> onnx_rows() {
  const char* decays = "update_rule!=linear update_rule!=delta";
  const char* erases = "update_rule!=linear update_rule!=gated";
  TensorInfo decay = token_rows("decay", "B T GD", "ddecay");
  decay.when = decays;
  OperatorInfo attention = {
      "LinearAttention",
      {},
      "ONNX's node: linear_attention (linear), simple_gla or gla (gated), delta_rule (delta), "
      "gated_delta_rule or kda (gated_delta), heads packed side by side",
      "ONNX opset 27",
      {token_rows("query", "B T QD", "dquery"),
       token_rows("key", "B T KD", "dkey"),
       token_rows("value", "B T VD", "dvalue"),
       {"past_state", "B HV K V", "dpast_state", true},
       decay,
       {"beta", "B T BD", "dbeta", false, erases}},
      {token_rows("output", "B T OD", "doutput"), {"present_state", "B HV K V", "dpresent_state"}},
      {{"q_num_heads",
        kInteger,
        "Query heads, a multiple of kv_num_heads (needed)",
        "",
        {},
        kAtLeastOne},
       {"kv_num_heads", kInteger, "Key and value heads (needed)", "", {}, kAtLeastOne},
       {"update_rule",
        kText,
        "The law",
        "gated_delta",
        {"linear", "gated", "delta", "gated_delta"}},
       {"scale", kNumber, "Factor on the query; 0: (key size)^-0.5", "0"},
       {"chunk_size", kInteger, "A hint, without effect", "64"}},
      run_attention,
      {},
      set_attention_extents};
  OperatorInfo conv = {
      "CausalConvWithState",
      {},
      "ONNX's node: short_conv with channels before tokens and a state of the last W - 1 inputs",
      "ONNX opset 27",
      {{"input", "B D T", "dinput"},
       {"weight", "D 1 W", "dweight"},
       {"bias", "D", "dbias", true},
       {"past_state", "B D TP", "dpast_state", true}},
      {{"output", "B D T", "doutput"}, {"present_state", "B D TP", "dpresent_state"}},
      {{"activation", kText, "Applied to the sum", "none", {"none", "silu", "swish"}}},
      run_conv,
      {},
      set_conv_extents};
  return {attention, conv};
}

}  // namespace ouzel
