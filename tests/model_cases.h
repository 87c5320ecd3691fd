// Tiny models of every type for tests, and a float64 twin of the whole model, written from the
// layers' equations token by token.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ouzel/model.h"
#include "src/base/random.h"

namespace ouzel::test {

struct ModelCase {
  std::string name;
  ModelConfig config;
};

// Two layers of odd shapes, all of them different; weights large enough that every part matters.
inline std::vector<ModelCase> model_cases() {
  const auto base = [](const char* type, std::int64_t heads, std::int64_t hidden) {
    ModelConfig config = ModelConfig::defaults(type);
    config.vocab_size = 19;
    config.hidden_size = hidden;
    config.num_hidden_layers = 2;
    config.intermediate_size = 29;
    config.initializer_range = 0.4;
    config.mixer.num_heads = heads;
    return config;
  };
  std::vector<ModelCase> cases;
  cases.push_back({"transformer", base("transformer", 3, 18)});
  {
    ModelConfig c = base("transformer", 4, 24);
    c.mixer.num_kv_heads = 2;
    c.mixer.window_size = 5;
    c.mixer.rope_theta = 500;
    c.mixer.qkv_bias = true;
    c.mixer.qk_norm = true;
    c.tie_word_embeddings = true;
    cases.push_back({"transformer_window_gqa_bias_norm_tied", c});
  }
  cases.push_back({"linear_attn", base("linear_attn", 3, 18)});
  {
    ModelConfig c = base("linear_attn", 4, 20);
    c.mixer.num_kv_heads = 2;
    c.mixer.feature_map = FeatureMapKind::kElu1;
    c.mixer.norm_feature_map = true;
    c.mixer.expand_k = 0.6;
    c.mixer.expand_v = 1.4;
    c.mixer.elementwise_affine = false;
    cases.push_back({"linear_attn_elu_norm_gqa", c});
  }
  {
    ModelConfig c = base("linear_attn", 2, 16);
    c.mixer.tie_feature_map_qk = true;
    c.mixer.use_short_conv = true;
    c.mixer.conv_size = 3;
    cases.push_back({"linear_attn_tied_map_conv", c});
  }
  cases.push_back({"retnet", base("retnet", 3, 18)});
  {
    ModelConfig c = base("retnet", 4, 16);
    c.mixer.num_kv_heads = 2;
    c.mixer.use_short_conv = true;
    c.mixer.use_output_gate = false;
    cases.push_back({"retnet_gqa_conv_ungated", c});
  }
  {
    ModelConfig c = base("retnet", 2, 16);
    c.num_hidden_layers = 4;
    MixerConfig window = MixerConfig::defaults(MixerKind::kSoftmaxAttention);
    window.num_heads = 2;
    window.window_size = 4;
    MixerConfig full = MixerConfig::defaults(MixerKind::kSoftmaxAttention);
    full.num_heads = 4;
    MixerConfig linear = MixerConfig::defaults(MixerKind::kLinearAttention);
    linear.num_heads = 4;
    linear.feature_map = FeatureMapKind::kIdentity;
    c.attn = {{{1}, window}, {{2}, linear}, {{3}, full}};
    cases.push_back({"hybrid", c});
  }
  return cases;
}

inline std::vector<std::int32_t> random_tokens(std::int64_t count, std::int64_t vocab,
                                               std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab))));
  }
  return tokens;
}

class ReferenceModel {
 public:
  using Row = std::vector<double>;
  using Rows = std::vector<Row>;

  ModelConfig config;
  std::map<std::string, Row> parameters;

  ReferenceModel(const ModelConfig& config, const std::vector<Parameter>& list) : config(config) {
    for (const Parameter& parameter : list) {
      const float* values = static_cast<const float*>(parameter.tensor.data);
      parameters[parameter.name] = Row(values, values + parameter.tensor.size());
    }
  }

  // One sequence from the zero state.
  Rows logits(const std::vector<std::int32_t>& tokens) const {
    const Row& table = parameters.at("model.embeddings.weight");
    const auto hidden = static_cast<std::size_t>(config.hidden_size);
    Rows x;
    for (std::int32_t token : tokens) {
      const auto* row = table.data() + static_cast<std::size_t>(token) * hidden;
      x.emplace_back(row, row + hidden);
    }
    for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      add(x, mix(norm(x, prefix + "attn_norm", hidden), prefix + "attn", config.mixer_of(layer)));
      add(x, mlp(norm(x, prefix + "mlp_norm", hidden), prefix + "mlp"));
    }
    x = norm(x, "model.norm", hidden);
    return linear(x, config.tie_word_embeddings ? "model.embeddings" : "lm_head");
  }

  // Sum of the losses in nats.
  double loss(const std::vector<std::int32_t>& tokens,
              const std::vector<std::int32_t>& targets) const {
    const Rows rows = logits(tokens);
    double total = 0;
    for (std::size_t t = 0; t < rows.size(); ++t) {
      double top = rows[t][0], sum = 0;
      for (double value : rows[t]) top = std::max(top, value);
      for (double value : rows[t]) sum += std::exp(value - top);
      total += top + std::log(sum) - rows[t][static_cast<std::size_t>(targets[t])];
    }
    return total;
  }

 private:
  static double silu(double x) { return x / (1 + std::exp(-x)); }
  static void add(Rows& x, const Rows& y) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
    }
  }

  Rows linear(const Rows& x, const std::string& name) const {
    const Row& w = parameters.at(name + ".weight");
    const auto bias = parameters.find(name + ".bias");
    Rows y;
    for (const Row& row : x) {
      Row out(w.size() / row.size(), 0.0);
      for (std::size_t o = 0; o < out.size(); ++o) {
        if (bias != parameters.end()) out[o] = bias->second[o];
        for (std::size_t i = 0; i < row.size(); ++i) out[o] += w[o * row.size() + i] * row[i];
      }
      y.push_back(std::move(out));
    }
    return y;
  }
  // Groups of `size`; no weight of that name: none.
  Rows norm(Rows x, const std::string& name, std::size_t size) const {
    const auto weight = parameters.find(name + ".weight");
    for (Row& row : x) {
      for (std::size_t begin = 0; begin < row.size(); begin += size) {
        double sum = 0;
        for (std::size_t i = 0; i < size; ++i) sum += row[begin + i] * row[begin + i];
        const double scale = 1 / std::sqrt(sum / static_cast<double>(size) + config.norm_eps);
        for (std::size_t i = 0; i < size; ++i) {
          row[begin + i] *= scale * (weight != parameters.end() ? weight->second[i] : 1);
        }
      }
    }
    return x;
  }
  Rows mlp(const Rows& x, const std::string& prefix) const {
    Rows gate = linear(x, prefix + ".gate_proj");
    const Rows up = linear(x, prefix + ".up_proj");
    for (std::size_t t = 0; t < gate.size(); ++t) {
      for (std::size_t i = 0; i < gate[t].size(); ++i) gate[t][i] = silu(gate[t][i]) * up[t][i];
    }
    return linear(gate, prefix + ".down_proj");
  }
  // Turns pairs (i, i + size / 2) of each head by t * base^(-2 i / size).
  static void rotate(Rows& x, std::size_t size, double base) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t begin = 0; begin < x[t].size(); begin += size) {
        for (std::size_t i = 0; i < size / 2; ++i) {
          const double angle =
              static_cast<double>(t) *
              std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(size));
          double &a = x[t][begin + i], &b = x[t][begin + size / 2 + i];
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = a * std::sin(angle) + b * std::cos(angle);
          a = turned;
        }
      }
    }
  }
  Rows convolve(const Rows& x, const std::string& name) const {
    const Row& w = parameters.at(name + ".weight");
    Rows y(x.size(), Row(x[0].size(), 0.0));
    const std::size_t taps = w.size() / x[0].size();
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t c = 0; c < x[t].size(); ++c) {
        for (std::size_t j = 0; j < taps; ++j) {
          if (t + j + 1 >= taps) y[t][c] += w[c * taps + j] * x[t + j + 1 - taps][c];
        }
        y[t][c] = silu(y[t][c]);
      }
    }
    return y;
  }
  Rows map_features(const Rows& x, const std::string& name, std::size_t size,
                    FeatureMapKind kind) const {
    Rows y = x;
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t c = 0; c < x[t].size(); ++c) {
        const double value = x[t][c];
        if (kind == FeatureMapKind::kElu1) y[t][c] = value > 0 ? value + 1 : std::exp(value);
        if (kind == FeatureMapKind::kRelu) y[t][c] = std::max(value, 0.0);
        if (kind != FeatureMapKind::kElementwiseProduct) continue;
        const std::size_t begin = c / size * size, o = c % size;
        double product = 1;
        for (const char* layer : {".layer1", ".layer2"}) {
          double sum = parameters.at(name + layer + ".bias")[o];
          for (std::size_t i = 0; i < size; ++i) {
            sum += parameters.at(name + layer + ".weight")[o * size + i] * x[t][begin + i];
          }
          product *= sum;
        }
        y[t][c] = product;
      }
    }
    return y;
  }

  Rows mix(const Rows& x, const std::string& prefix, const MixerConfig& mixer) const {
    const auto heads = static_cast<std::size_t>(mixer.num_heads);
    const std::size_t group = heads / static_cast<std::size_t>(mixer.kv_heads());
    const auto keys = static_cast<std::size_t>(mixer.key_size(config.hidden_size));
    const auto values = static_cast<std::size_t>(mixer.value_size(config.hidden_size));
    const bool softmax = mixer.kind == MixerKind::kSoftmaxAttention;
    const bool retention = mixer.kind == MixerKind::kRetention;
    Rows q = linear(x, prefix + ".q_proj"), k = linear(x, prefix + ".k_proj"),
         v = linear(x, prefix + ".v_proj");
    if (mixer.use_short_conv) {
      q = convolve(q, prefix + ".q_conv1d");
      k = convolve(k, prefix + ".k_conv1d");
      v = convolve(v, prefix + ".v_conv1d");
    }
    if (mixer.qk_norm) {
      q = norm(q, prefix + ".q_norm", keys);
      k = norm(k, prefix + ".k_norm", keys);
    }
    if (softmax || retention) {
      rotate(q, keys, softmax ? mixer.rope_theta : 10000);
      rotate(k, keys, softmax ? mixer.rope_theta : 10000);
    } else {
      q = map_features(q, prefix + ".feature_map_q", keys, mixer.feature_map);
      k = map_features(k, prefix + (mixer.tie_feature_map_qk ? ".feature_map_q" : ".feature_map_k"),
                       keys, mixer.feature_map);
    }
    // Every mixer is o_t = sum_j weight(t, j) v_j, here with the weights written out.
    Rows o(x.size(), Row(heads * values, 0.0));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        Row weight(t + 1, 0.0);
        double sum = 0;
        for (std::size_t j = 0; j <= t; ++j) {
          double score = 0;
          for (std::size_t i = 0; i < keys; ++i) {
            score += q[t][h * keys + i] * k[j][h / group * keys + i];
          }
          score /= std::sqrt(static_cast<double>(keys));
          const auto age = static_cast<double>(t - j);
          if (softmax) {
            const bool seen =
                mixer.window_size == 0 || age < static_cast<double>(mixer.window_size);
            weight[j] = seen ? std::exp(score) : 0;
          } else if (retention) {
            weight[j] = score * std::pow(1 - std::exp2(-5.0 - static_cast<double>(h)), age);
          } else {
            weight[j] = score;
          }
          sum += weight[j];
        }
        const double divisor = softmax ? sum : mixer.norm_feature_map ? sum + 1e-10 : 1;
        for (std::size_t j = 0; j <= t; ++j) {
          for (std::size_t i = 0; i < values; ++i) {
            o[t][h * values + i] += weight[j] / divisor * v[j][h / group * values + i];
          }
        }
      }
    }
    if (retention) {
      o = norm(o, prefix + (mixer.use_output_gate ? ".g_norm_swish_gate" : ".g_norm"), values);
      if (mixer.use_output_gate) {
        const Rows gate = linear(x, prefix + ".g_proj");
        for (std::size_t t = 0; t < o.size(); ++t) {
          for (std::size_t i = 0; i < o[t].size(); ++i) o[t][i] *= silu(gate[t][i]);
        }
      }
    } else if (!softmax) {
      o = norm(o, prefix + ".norm", values);
    }
    return linear(o, prefix + ".o_proj");
  }
};

}  // namespace ouzel::test
