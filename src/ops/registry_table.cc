// The rows of the table of operators.
#include "src/ops/registry.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/linear_attention.h"
#include "ouzel/recurrence.h"
#include "ouzel/retention.h"
#include "ouzel/short_conv.h"
#include "ouzel/softmax_attention.h"
#include "src/ops/operator_call.h"

namespace ouzel {
namespace {

using enum AttributeKind;

// Attributes that several rows have.
const AttributeInfo kScale = {"scale", kNumber, "Factor on q (default: K^-0.5)"};
const AttributeInfo kCuSeqlens = {
    "cu_seqlens", kIntegers, "Bounds [0, ..., T] of sequences packed along T of a batch of one"};
const AttributeInfo kReverse = {"reverse", kFlag, "Process tokens from last to first", "false"};
const AttributeInfo kForm = {"form", kText, "How to compute", "auto", {"auto", "scan", "parallel"}};
const AttributeInfo kHeads = {"H", kInteger, "Number of value heads, checked if given"};

// Tensors of every matrix-state law without a normaliser.
const TensorInfo kQuery = {"q", "B T HQ K", "dq"};
const TensorInfo kKey = {"k", "B T HK K", "dk"};
const TensorInfo kValue = {"v", "B T HV V", "dv"};
const TensorInfo kInitialState = {"initial_state", "N HV F V", "dh0", true, "form!=parallel"};
const TensorInfo kOutput = {"o", "B T HO V", "do"};
const TensorInfo kFinalState = {"final_state", "N HV F V", "dht", false, "form!=parallel"};
const TensorInfo kWeights = {"weights", "B HV T T", "", false, "form=parallel"};
const TensorInfo kLogDecay = {"g_gamma", "HV", "", true, "", DType::kF64};

Form form_of(const Attributes& attributes) {
  const std::string form = attributes.text("form");
  return form == "scan" ? Form::kScan : form == "parallel" ? Form::kParallel : Form::kAuto;
}

// A law of the recurrence: its forward and backward calls, bound to their options.
struct Law {
  std::function<std::size_t(const RecurrenceInputs&)> saved_bytes;
  std::function<void(const RecurrenceInputs&, const RecurrenceOutputs&)> forward;
  std::function<void(const RecurrenceInputs&, const void* saved, const RecurrenceOutputGrads&,
                     const RecurrenceInputGrads&)>
      backward;
};

// A state view of two tensors of the call, and what it points to. With a normaliser a state is both
// S and z: one that was not given is zeros.
class CallState {
 public:
  CallState(const OperatorCall& call, Tensor s, Tensor z, bool normalized) {
    if (!s.present() && !z.present()) return;
    const std::int64_t n = call.extent("N"), h = call.extent("HV"), f = call.extent("F");
    if (!s.present()) {
      s_ = Array({n, h, f, call.extent("V")});
      s = s_.tensor;
    }
    if (!z.present() && normalized) {
      z_ = Array({n, h, f});
      z = z_.tensor;
    }
    view_ = state_view(s, z, storage_);
  }
  const StateView& view() const { return view_; }

 private:
  Array s_, z_;
  std::vector<SequenceState> storage_;
  StateView view_;
};

// Views take states as memory that may be written; these are only read.
Tensor readable(const ConstTensor& tensor) {
  Tensor view;
  view.data = const_cast<void*>(tensor.data);
  view.dtype = tensor.dtype;
  view.rank = tensor.rank;
  view.extent = tensor.extent;
  view.stride = tensor.stride;
  return view;
}

void run_law(OperatorCall& call, const Law& law, bool normalized = false) {
  const auto state = [&](const Tensor& s, const Tensor& z) {
    return CallState(call, s, z, normalized);
  };
  const CallState initial =
      state(readable(call.in("initial_state")), readable(call.in("initial_z")));
  const CallState final = state(call.out("final_state"), call.out("z"));
  const RecurrenceInputs inputs = {.q = call.in("q"),
                                   .k = call.in("k"),
                                   .v = call.in("v"),
                                   .initial_state = initial.view(),
                                   .segments = call.segments()};
  Buffer saved;
  if (call.backward()) saved = Buffer(law.saved_bytes(inputs));
  law.forward(inputs, {.o = call.out("o"),
                       .final_state = final.view(),
                       .weights = call.out("weights"),
                       .saved = saved.data()});
  if (!call.backward()) return;
  const CallState final_grad = state(readable(call.in("dht")), readable(call.in("dzt")));
  const CallState initial_grad = state(call.out("dh0"), call.out("dz0"));
  law.backward(inputs, saved.data(), {.o = call.in("do"), .final_state = final_grad.view()},
               {.q = call.out("dq"),
                .k = call.out("dk"),
                .v = call.out("dv"),
                .initial_state = initial_grad.view()});
}

FeatureMapKind feature_map_of(const Attributes& attributes) {
  const std::string name = attributes.text("feature_map");
  return name == "elu1"                  ? FeatureMapKind::kElu1
         : name == "relu"                ? FeatureMapKind::kRelu
         : name == "elementwise_product" ? FeatureMapKind::kElementwiseProduct
                                         : FeatureMapKind::kIdentity;
}

void run_linear_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  LinearAttentionOptions options;
  options.feature_map.kind = feature_map_of(attributes);
  options.feature_map.q = {call.in("W1"), call.in("b1"), call.in("W2"), call.in("b2")};
  options.scale = attributes.number("scale");
  options.normalize = attributes.flag("normalize");
  options.eps = attributes.number("eps");
  options.causal = attributes.flag("causal");
  options.reverse = attributes.flag("reverse");
  options.form = form_of(attributes);
  FeatureMapGrads map_grads;
  map_grads.q = {call.out("dW1"), call.out("db1"), call.out("dW2"), call.out("db2")};
  run_law(call,
          {.saved_bytes = [&](const auto& in) { return linear_attention_saved_bytes(options, in); },
           .forward = [&](const auto& in,
                          const auto& out) { linear_attention(call.context(), options, in, out); },
           .backward =
               [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
                 linear_attention_backward(call.context(), options, in, saved, d_out, d_in,
                                           &map_grads);
               }},
          options.normalize);
}

// Log decays of lightning attention's heads (formulas in the table).
std::vector<double> lightning_log_decays(std::int64_t heads, std::int64_t layer,
                                         std::int64_t layers, bool geometric) {
  std::vector<double> decays;
  const auto n = static_cast<double>(heads);
  const auto of = static_cast<double>(layers);
  const auto at = static_cast<double>(layer);
  for (std::int64_t i = 0; i < heads; ++i) {
    const auto h = static_cast<double>(i);
    // The geometric rule divides by layers - 1: a model of one layer is taken as its first.
    decays.push_back(geometric ? -std::exp2(-8 * (h + 1) / n) *
                                     (1 - (layers > 1 ? at / (of - 1) : 0) + 1e-5)
                               : -(8 / n) * (1 - at / of) * h);
  }
  return decays;
}

// Retention with the decays that the call gives as `g_gamma`, else with those of the rule.
void run_with_decays(OperatorCall& call, std::vector<double> rule) {
  const Attributes& attributes = call.attributes();
  const std::int64_t heads = call.extent("HV");
  if (const auto said = attributes.integer("H"); said && *said != heads) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: H says {} heads and v has {}", call.name(), *said, heads));
  }
  std::span<const double> decays = rule;
  if (const ConstTensor given = call.in("g_gamma"); given.present()) {
    decays = {static_cast<const double*>(given.data), static_cast<std::size_t>(heads)};
  }
  const RetentionOptions options = {.scale = attributes.number("scale"),
                                    .log_decay = decays,
                                    .reverse = attributes.flag("reverse"),
                                    .form = form_of(attributes)};
  run_law(call, {.saved_bytes = [&](const auto& in) { return retention_saved_bytes(options, in); },
                 .forward = [&](const auto& in,
                                const auto& out) { retention(call.context(), options, in, out); },
                 .backward =
                     [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
                       retention_backward(call.context(), options, in, saved, d_out, d_in);
                     }});
}

void run_retention(OperatorCall& call) { run_with_decays(call, {}); }

void run_lightning_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  std::vector<double> decays;
  if (!call.in("g_gamma").present()) {
    const auto layer = attributes.integer("layer_idx"), layers = attributes.integer("num_layers");
    if (!layer || !layers || *layer < 0 || *layer >= *layers) {
      throw Error(ErrorKind::kInvalidArgument,
                  "lightning_attention: the decay comes from layer_idx in [0, num_layers) and "
                  "num_layers, or from the tensor g_gamma [HV]; give either");
    }
    decays = lightning_log_decays(call.extent("HV"), *layer, *layers,
                                  attributes.text("slopes") == "geometric");
  }
  run_with_decays(call, std::move(decays));
}

void run_softmax_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  const SoftmaxAttentionOptions options = {.scale = attributes.number("scale"),
                                           .causal = attributes.flag("causal"),
                                           .window = attributes.integer("window_size").value_or(0),
                                           .q_offset = attributes.integer("q_offset").value_or(0)};
  const SoftmaxAttentionInputs inputs = {
      .q = call.in("q"), .k = call.in("k"), .v = call.in("v"), .segments = call.segments()};
  Array lse;
  if (call.backward())
    lse = Array({call.extent("B"), call.extent("TQ"), call.extent("HQ")}, DType::kF64);
  const Tensor o = call.out("o");
  softmax_attention(call.context(), options, inputs, {.o = o, .lse = lse.tensor});
  if (!call.backward()) return;
  softmax_attention_backward(call.context(), options, inputs, o, lse.tensor, call.in("do"),
                             call.out("dq"), call.out("dk"), call.out("dv"));
}

void run_short_conv(OperatorCall& call) {
  const ShortConvOptions options = {.activation = call.attributes().text("activation") == "silu"
                                                      ? ConvActivation::kSilu
                                                      : ConvActivation::kNone};
  const ShortConvInputs inputs = {.x = call.in("x"),
                                  .weight = call.in("weight"),
                                  .bias = call.in("bias"),
                                  .initial_state = call.in("initial_state"),
                                  .segments = call.segments()};
  short_conv(call.context(), options, inputs, call.out("o"), call.out("final_state"));
  if (!call.backward()) return;
  short_conv_backward(call.context(), options, inputs, call.in("do"), call.in("dht"),
                      call.out("dx"), call.out("dweight"), call.out("dbias"), call.out("dh0"));
}

std::vector<OperatorInfo> make_table() {
  // linear_attention keeps states in its causal form only, and z beside S if it is normalised.
  const auto when = [](TensorInfo info, const char* condition) {
    info.when += (info.when.empty() ? "" : " ") + std::string(condition);
    return info;
  };
  const char* learned = "feature_map=elementwise_product";
  return {
      {"linear_attention",
       {"linear_attn"},
       "S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t); o_t = S_t^T (scale phi(q_t)), "
       "divided by (scale phi(q_t)) . z_t + eps if normalize; not causal: S and z of the whole "
       "sequence",
       "arXiv:2006.16236",
       {kQuery,
        kKey,
        kValue,
        {"W1", "M K|HK M K", "dW1", false, learned},
        {"b1", "M|HK M", "db1", true, learned},
        {"W2", "M K|HK M K", "dW2", false, learned},
        {"b2", "M|HK M", "db2", true, learned},
        when(kInitialState, "causal=true"),
        {"initial_z", "N HV F", "dz0", true, "form!=parallel causal=true normalize=true"}},
       {kOutput,
        when(kFinalState, "causal=true"),
        {"z", "N HV F", "dzt", false, "form!=parallel causal=true normalize=true"},
        kWeights},
       {{"feature_map",
         kText,
         "Map phi of q and k",
         "identity",
         {"identity", "elu1", "relu", "elementwise_product"}},
        {"scale", kNumber, "Factor on phi(q) (default: K^-0.5 for the identity map, else 1)"},
        {"normalize", kFlag, "Divide by the sum of the weights", "false"},
        {"eps", kNumber,
         "Added to the sum of the weights (default: 1e-6; identity 1e-10; elementwise_product 0)"},
        {"causal", kFlag, "A token sees no later one", "true"},
        kReverse,
        kCuSeqlens,
        kForm},
       run_linear_attention},
      {"retention",
       {},
       "S_t = gamma_h S_{t-1} + k_t v_t^T, gamma_h = 1 - 2^(-5-h) or exp(g_gamma_h); "
       "o_t = S_t^T (scale q_t)",
       "arXiv:2307.08621",
       {kQuery, kKey, kValue, kLogDecay, kInitialState},
       {kOutput, kFinalState, kWeights},
       {kScale, kReverse, kCuSeqlens, kForm, kHeads},
       run_retention},
      {"lightning_attention",
       {"lightning"},
       "S_t = exp(g_h) S_{t-1} + k_t v_t^T; o_t = S_t^T (scale q_t); g_h = -(8/H) "
       "(1 - layer_idx/num_layers) h, or with geometric slopes -2^(-8(h+1)/H) "
       "(1 - layer_idx/(num_layers-1) + 1e-5)",
       "arXiv:2401.04658, arXiv:2501.08313",
       {kQuery, kKey, kValue, kLogDecay, kInitialState},
       {kOutput, kFinalState, kWeights},
       {kScale,
        {"layer_idx", kInteger, "Index of the layer, from 0"},
        {"num_layers", kInteger, "Number of layers"},
        {"slopes", kText, "Rule of the decays", "linear", {"linear", "geometric"}},
        kReverse,
        kCuSeqlens,
        kForm,
        kHeads},
       run_lightning_attention},
      {"softmax_attention",
       {"attention"},
       "o_i = sum_j softmax_j(scale q_i . k_j) v_j; causal: j <= i + q_offset; window_size w: "
       "i + q_offset - j < w",
       "arXiv:1706.03762, arXiv:2205.14135",
       {{"q", "B TQ HQ K", "dq"}, {"k", "B TK HK K", "dk"}, {"v", "B TK HK V", "dv"}},
       {{"o", "B TQ HQ V", "do"}},
       {kScale,
        {"causal", kFlag, "A query sees no later key", "true"},
        {"window_size", kInteger,
         "Keys that a query sees, the current one included (default: all)"},
        {"q_offset", kInteger, "Position of the first query among the keys", "0"},
        kCuSeqlens},
       run_softmax_attention},
      {"short_conv",
       {},
       "y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}); the state is the last W inputs",
       "arXiv:2212.14052",
       {{"x", "B T D", "dx"},
        {"weight", "D W|D 1 W", "dweight"},
        {"bias", "D", "dbias", true},
        {"initial_state", "N D W", "dh0", true}},
       {{"o", "B T D", "do"}, {"final_state", "N D W", "dht"}},
       {{"activation", kText, "Applied to the sum", "none", {"none", "silu"}}, kCuSeqlens},
       run_short_conv},
  };
}

}  // namespace

std::span<const OperatorInfo> operators() {
  static const std::vector<OperatorInfo> table = make_table();
  return table;
}

}  // namespace ouzel
