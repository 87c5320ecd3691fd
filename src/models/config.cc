// config.json with flash-linear-attention's keys.
#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/base/text.h"
#include "src/formats/json.h"

namespace ouzel {
namespace {

struct NamedMap {
  FeatureMapKind kind;
  const char* name;
};
constexpr NamedMap kMaps[] = {{FeatureMapKind::kElementwiseProduct, "elementwise_product"},
                              {FeatureMapKind::kElu1, "elu"},
                              {FeatureMapKind::kRelu, "relu"},
                              {FeatureMapKind::kIdentity, "identity"}};

constexpr const char* kMapNames = "elementwise_product, elu, relu, identity";

struct NamedMixer {
  MixerKind kind;
  const char* name;
  const char* architecture;
};
constexpr NamedMixer kMixers[] = {
    {MixerKind::kSoftmaxAttention, "transformer", "TransformerForCausalLM"},
    {MixerKind::kLinearAttention, "linear_attn", "LinearAttentionForCausalLM"},
    {MixerKind::kRetention, "retnet", "RetNetForCausalLM"},
};

constexpr const char* kTypeNames = "transformer, linear_attn, retnet";

const NamedMixer& entry_of(MixerKind kind) {
  return *std::find_if(std::begin(kMixers), std::end(kMixers),
                       [&](const NamedMixer& m) { return m.kind == kind; });
}

const NamedMixer* entry_of(const std::string& model_type) {
  const auto* found = std::find_if(std::begin(kMixers), std::end(kMixers),
                                   [&](const NamedMixer& m) { return m.name == model_type; });
  return found == std::end(kMixers) ? nullptr : found;
}

std::string unknown_type(const std::string& type) {
  return fmt::format("model type '{}' is not one of {}", type, kTypeNames);
}

// Keys of files that transformers and flash-linear-attention write: what they say of a model is
// true of all of ours, or is about how others run it.
constexpr std::string_view kKeysOfOthers[] = {
    "_name_or_path",
    "architectures",
    "attn_mode",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
    "fuse_swiglu",
    "id2label",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_l2warp",
};

// A sentence for each key of a file that is none of ours: for all of them when `strict`, else for
// those that are near to one of ours which the object leaves out. Other writers' keys are many: one
// beside the key that it resembles is theirs.
class UnknownKeys {
 public:
  UnknownKeys(const std::string& what, bool strict) : what_(what), strict_(strict) {}

  void add(const Json& object, const std::string& key, const std::string& where,
           const std::vector<std::string>& known) {
    const std::optional<std::string> near = nearest(key, known);
    if (strict_ ? std::ranges::find(kKeysOfOthers, key) != std::end(kKeysOfOthers)
                : !near || object.contains(*near)) {
      return;
    }
    if (++count_ > kMostNamed) return;
    sentences_.push_back(
        fmt::format("{}: there is no key '{}{}'{}", what_, where, printable(key),
                    near ? fmt::format("; did you mean '{}{}'?", where, *near) : "; leave it out"));
    if (!strict_) sentences_.back() += " It is ignored";
  }

  std::vector<std::string> sentences() const {
    std::vector<std::string> all = sentences_;
    if (count_ > kMostNamed) {
      all.push_back(fmt::format("{}: and so on with {} more keys", what_, count_ - kMostNamed));
    }
    return all;
  }

 private:
  static constexpr std::size_t kMostNamed = 100;  // a file of others would fill a terminal
  const std::string& what_;
  bool strict_;
  std::size_t count_ = 0;
  std::vector<std::string> sentences_;
};

// One object of the file, at `where` in it ("attn."); errors name the file and the key.
class Reader {
 public:
  Reader(const Json& object, const std::string& what, std::string where = "")
      : object_(object), what_(what), where_(std::move(where)) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: {}", what_, why));
  }
  // A key, as errors name it.
  std::string name(const std::string& key) const { return where_ + key; }
  const Json* find(const char* key) const {
    known_.emplace_back(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX)) {
      fail(fmt::format("'{}' should be a whole number and is {}", name(key), value->dump()));
    }
    return value->get<std::int64_t>();
  }
  std::int64_t required(const char* key) const {
    if (find(key) == nullptr) missing_.emplace_back(key);
    return integer(key, 0);
  }
  double number(const char* key, double fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number())
      fail(fmt::format("'{}' should be a number and is {}", name(key), value->dump()));
    return value->get<double>();
  }
  bool boolean(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      fail(fmt::format("'{}' should be true or false and is {}", name(key), value->dump()));
    }
    return value->get<bool>();
  }
  std::string string(const char* key, const std::string& fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string())
      fail(fmt::format("'{}' should be a string and is {}", name(key), value->dump()));
    return value->get<std::string>();
  }
  // Refuses every value of a key but the listed ones (null and absent are always fine).
  void only(const char* key, std::initializer_list<Json> allowed, const char* reason) const {
    const Json* value = find(key);
    if (value == nullptr || std::find(allowed.begin(), allowed.end(), *value) != allowed.end()) {
      return;
    }
    fail(fmt::format("'{}': {} is not supported ({})", name(key), value->dump(), reason));
  }

  // "'num_heads' is missing (is 'num_head' meant?)"
  std::string missing(const std::string& key) const {
    const auto near = nearest(key, unknown());
    return fmt::format("'{}' is missing", name(key)) +
           (near ? fmt::format(" (is '{}' meant?)", printable(*near)) : "");
  }

  // When every key was asked for: refuses an object that lacks required ones, and adds the keys
  // that are none of ours.
  void finish(UnknownKeys& keys) const {
    std::vector<std::string> faults;
    for (const std::string& key : missing_) faults.push_back(missing(key));
    if (!faults.empty()) fail(joined(faults));
    for (const std::string& key : unknown()) keys.add(object_, key, where_, known_);
  }

 private:
  std::vector<std::string> unknown() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object_.items()) {
      if (std::find(known_.begin(), known_.end(), key) == known_.end()) keys.push_back(key);
    }
    return keys;
  }

  const Json& object_;
  const std::string& what_;
  const std::string where_;
  mutable std::vector<std::string> known_, missing_;  // keys that were asked for; and required
};

MixerConfig read_mixer(const Reader& in, MixerKind kind) {
  MixerConfig c = MixerConfig::defaults(kind);
  c.num_heads = in.required("num_heads");
  c.num_kv_heads = in.integer("num_kv_heads", 0);
  if (kind == MixerKind::kSoftmaxAttention) {
    c.window_size = in.integer("window_size", c.window_size);
    c.rope_theta = in.number("rope_theta", c.rope_theta);
    c.qkv_bias = in.boolean("qkv_bias", c.qkv_bias);
    c.qk_norm = in.boolean("qk_norm", c.qk_norm);
    in.only("rope_scaling", {}, "positions are turned by rope_theta alone");
    in.only("elementwise_affine", {true}, "norms have weights");
    return c;
  }
  c.expand_k = in.number("expand_k", c.expand_k);
  c.expand_v = in.number("expand_v", c.expand_v);
  c.elementwise_affine = in.boolean("elementwise_affine", c.elementwise_affine);
  c.use_short_conv = in.boolean("use_short_conv", c.use_short_conv);
  c.conv_size = in.integer("conv_size", c.conv_size);
  in.only("conv_bias", {false}, "short convolutions have no bias");
  if (kind == MixerKind::kRetention) {
    c.use_output_gate = in.boolean("use_output_gate", c.use_output_gate);
    in.only("feature_map", {}, "retention takes q and k as they are");
    in.only("gate_fn", {"swish", "silu"}, "the output gate is swish");
    return c;
  }
  const std::string map = in.string("feature_map", "elementwise_product");
  const auto* found = std::find_if(std::begin(kMaps), std::end(kMaps),
                                   [&](const NamedMap& m) { return m.name == map; });
  if (found == std::end(kMaps)) {
    in.fail(fmt::format("'{}' is '{}'; known are {}", in.name("feature_map"), map, kMapNames));
  }
  c.feature_map = found->kind;
  c.tie_feature_map_qk = in.boolean("tie_feature_map_qk", c.tie_feature_map_qk);
  c.norm_feature_map = in.boolean("norm_feature_map", c.norm_feature_map);
  in.only("norm_q", {false}, "features are not normalised by their sum");
  in.only("norm_k", {false}, "features are not normalised by their sum");
  in.only("output_norm", {"rmsnorm"}, "the output norm is rmsnorm");
  return c;
}

void write_mixer(const MixerConfig& c, Json& out) {
  out["num_heads"] = c.num_heads;
  out["num_kv_heads"] = c.num_kv_heads != 0 ? Json(c.num_kv_heads) : Json();
  if (c.kind == MixerKind::kSoftmaxAttention) {
    out["window_size"] = c.window_size != 0 ? Json(c.window_size) : Json();
    out["rope_theta"] = c.rope_theta;
    out["qkv_bias"] = c.qkv_bias;
    out["qk_norm"] = c.qk_norm;
    return;
  }
  out["expand_k"] = c.expand_k;
  out["expand_v"] = c.expand_v;
  out["elementwise_affine"] = c.elementwise_affine;
  out["use_short_conv"] = c.use_short_conv;
  out["conv_size"] = c.conv_size;
  if (c.kind == MixerKind::kRetention) {
    out["use_output_gate"] = c.use_output_gate;
    return;
  }
  out["feature_map"] = std::find_if(std::begin(kMaps), std::end(kMaps), [&](const NamedMap& m) {
                         return m.kind == c.feature_map;
                       })->name;
  out["tie_feature_map_qk"] = c.tie_feature_map_qk;
  out["norm_feature_map"] = c.norm_feature_map;
}

ModelConfig::Hybrid read_hybrid(const Json& entry, const std::string& what,
                                const std::string& where, UnknownKeys& keys) {
  const Reader in(entry, what, where);
  if (!entry.is_object()) in.fail("'attn' should be an object or a list of objects");
  const std::string type = in.string("model_type", "transformer");
  const NamedMixer* mixer = entry_of(type);
  if (mixer == nullptr) in.fail("'attn': " + unknown_type(type));
  const Json* layers = in.find("layers");
  if (layers == nullptr || !layers->is_array())
    in.fail("'attn': 'layers' should be a list of layer numbers");
  ModelConfig::Hybrid hybrid;
  for (const Json& layer : *layers) {
    if (!layer.is_number_integer()) in.fail("'attn': 'layers' should be a list of layer numbers");
    hybrid.layers.push_back(layer.get<std::int64_t>());
  }
  hybrid.mixer = read_mixer(in, mixer->kind);
  in.finish(keys);
  return hybrid;
}

[[noreturn]] void invalid(const std::string& why) {
  throw Error(ErrorKind::kInvalidArgument, "model configuration: " + why);
}

void check_range(const char* name, double value, double least, double most) {
  if (!(value >= least && value <= most)) {
    invalid(fmt::format("{} is {}, which is not in [{}, {}]", name, value, least, most));
  }
}

// Bounds on what a file may ask for: sizes stay far from overflow.
constexpr double kMostFeatures = 1 << 20, kMostLayers = 1 << 16, kMostTokens = 1 << 24;

void check_mixer(const MixerConfig& c, std::int64_t hidden) {
  check_range("num_heads", static_cast<double>(c.num_heads), 1, kMostFeatures);
  check_range("num_kv_heads", static_cast<double>(c.num_kv_heads), 0, kMostFeatures);
  if (c.num_heads % c.kv_heads() != 0) {
    invalid(fmt::format("num_heads {} is not a multiple of num_kv_heads {}", c.num_heads,
                        c.kv_heads()));
  }
  check_range("window_size", static_cast<double>(c.window_size), 0, kMostTokens);
  check_range("expand_k", c.expand_k, 1e-3, 1e3);
  check_range("expand_v", c.expand_v, 1e-3, 1e3);
  check_range("conv_size", static_cast<double>(c.conv_size), 1, 64);
  if (!(c.rope_theta > 1)) invalid(fmt::format("rope_theta is {}, not above 1", c.rope_theta));
  // Others have parameters or a running maximum, which no layer and no State holds.
  const bool known =
      std::ranges::any_of(kMaps, [&](const NamedMap& map) { return map.kind == c.feature_map; });
  if (c.kind == MixerKind::kLinearAttention && !known) {
    invalid(fmt::format("feature_map is one that models do not have; known are {}", kMapNames));
  }
  const bool recurrent = c.kind != MixerKind::kSoftmaxAttention;
  const auto keys =
      static_cast<std::int64_t>(static_cast<double>(hidden) * (recurrent ? c.expand_k : 1));
  const auto values =
      static_cast<std::int64_t>(static_cast<double>(hidden) * (recurrent ? c.expand_v : 1));
  for (auto [name, size] : {std::pair{"key", keys}, std::pair{"value", values}}) {
    if (size < c.num_heads || size % c.num_heads != 0) {
      invalid(fmt::format("the {} size {} of hidden_size {} does not divide into {} heads", name,
                          size, hidden, c.num_heads));
    }
  }
  if (c.kind != MixerKind::kLinearAttention && c.key_size(hidden) % 2 != 0) {
    invalid(fmt::format("rotary positions need an even head size, not {}", c.key_size(hidden)));
  }
}

}  // namespace

const char* name_of(MixerKind kind) { return entry_of(kind).name; }

MixerConfig MixerConfig::defaults(MixerKind kind) {
  MixerConfig config;
  config.kind = kind;
  if (kind == MixerKind::kRetention) config.expand_v = 2;
  return config;
}

std::int64_t MixerConfig::key_size(std::int64_t hidden_size) const {
  const double expand = kind == MixerKind::kSoftmaxAttention ? 1 : expand_k;
  return static_cast<std::int64_t>(static_cast<double>(hidden_size) * expand) / num_heads;
}

std::int64_t MixerConfig::value_size(std::int64_t hidden_size) const {
  const double expand = kind == MixerKind::kSoftmaxAttention ? 1 : expand_v;
  return static_cast<std::int64_t>(static_cast<double>(hidden_size) * expand) / num_heads;
}

ModelConfig ModelConfig::defaults(const std::string& model_type) {
  const NamedMixer* mixer = entry_of(model_type);
  if (mixer == nullptr) throw Error(ErrorKind::kInvalidArgument, unknown_type(model_type));
  ModelConfig config;
  config.mixer = MixerConfig::defaults(mixer->kind);
  if (mixer->kind == MixerKind::kRetention) config.hidden_ratio = 2;
  return config;
}

const MixerConfig& ModelConfig::mixer_of(std::int64_t layer) const {
  for (const Hybrid& hybrid : attn) {
    if (std::find(hybrid.layers.begin(), hybrid.layers.end(), layer) != hybrid.layers.end()) {
      return hybrid.mixer;
    }
  }
  return mixer;
}

std::int64_t ModelConfig::mlp_size() const {
  if (intermediate_size != 0) return intermediate_size;
  const auto size =
      static_cast<std::int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return (size + 255) / 256 * 256;
}

void ModelConfig::check() const {
  check_range("vocab_size", static_cast<double>(vocab_size), 1, kMostTokens);
  check_range("hidden_size", static_cast<double>(hidden_size), 1, kMostFeatures);
  check_range("num_hidden_layers", static_cast<double>(num_hidden_layers), 1, kMostLayers);
  check_range("intermediate_size", static_cast<double>(intermediate_size), 0, kMostFeatures);
  check_range("hidden_ratio", hidden_ratio, 1e-3, 1e3);
  check_range("norm_eps", norm_eps, 0, 1);
  check_range("initializer_range", initializer_range, 0, 1e3);
  check_mixer(mixer, hidden_size);
  std::set<std::int64_t> seen;
  for (const Hybrid& hybrid : attn) {
    check_mixer(hybrid.mixer, hidden_size);
    for (std::int64_t layer : hybrid.layers) {
      if (layer < 0 || layer >= num_hidden_layers) {
        invalid(fmt::format("attn names layer {}; there are {}", layer, num_hidden_layers));
      }
      if (!seen.insert(layer).second) invalid(fmt::format("attn names layer {} twice", layer));
    }
  }
}

ModelConfig ModelConfig::from_json(const std::string& text, const std::string& what, bool strict) {
  const Json json = parse_json(text, what);
  const Reader in(json, what);
  if (!json.is_object()) in.fail("a configuration is a JSON object");
  if (in.find("model_type") == nullptr) {
    in.fail(in.missing("model_type") + "; it is one of " + kTypeNames);
  }
  const std::string type = in.string("model_type", "");
  const NamedMixer* mixer = entry_of(type);
  if (mixer == nullptr) in.fail(unknown_type(type));
  ModelConfig config = defaults(type);
  config.mixer = read_mixer(in, mixer->kind);
  config.vocab_size = in.required("vocab_size");
  config.hidden_size = in.required("hidden_size");
  config.num_hidden_layers = in.required("num_hidden_layers");
  config.hidden_ratio = in.number("hidden_ratio", config.hidden_ratio);
  config.intermediate_size = in.integer("intermediate_size", 0);
  config.norm_eps = in.number("norm_eps", config.norm_eps);
  config.tie_word_embeddings = in.boolean("tie_word_embeddings", false);
  config.initializer_range = in.number("initializer_range", config.initializer_range);
  in.only("hidden_act", {"swish", "silu"}, "the MLP is SwiGLU");
  in.only("attention_bias", {false}, "use qkv_bias");
  in.only("mlp_bias", {false}, "the MLP has no bias");
  UnknownKeys keys(what, strict);
  if (const Json* attn = in.find("attn")) {
    if (attn->is_array()) {
      for (const Json& entry : *attn) {
        const std::string where = fmt::format("attn[{}].", config.attn.size());
        config.attn.push_back(read_hybrid(entry, what, where, keys));
      }
    } else {
      config.attn.push_back(read_hybrid(*attn, what, "attn.", keys));
    }
  }
  in.finish(keys);
  config.warnings = keys.sentences();
  if (strict && !config.warnings.empty()) {
    throw Error(ErrorKind::kBadFile, joined(config.warnings, "\n"));
  }
  try {
    config.check();
  } catch (const Error& error) {
    in.fail(error.what());
  }
  return config;
}

std::string ModelConfig::to_json() const {
  Json json;
  json["model_type"] = name_of(mixer.kind);
  json["architectures"] = {entry_of(mixer.kind).architecture};
  json["torch_dtype"] = "float32";
  json["vocab_size"] = vocab_size;
  json["hidden_size"] = hidden_size;
  json["num_hidden_layers"] = num_hidden_layers;
  json["hidden_ratio"] = hidden_ratio;
  json["intermediate_size"] = intermediate_size != 0 ? Json(intermediate_size) : Json();
  json["hidden_act"] = "swish";
  json["norm_eps"] = norm_eps;
  json["tie_word_embeddings"] = tie_word_embeddings;
  json["initializer_range"] = initializer_range;
  // Bytes have no marks of beginning and end.
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) json[key] = Json();
  write_mixer(mixer, json);
  std::vector<Json> entries;
  for (const Hybrid& hybrid : attn) {
    Json entry;
    if (hybrid.mixer.kind != MixerKind::kSoftmaxAttention) {
      entry["model_type"] = name_of(hybrid.mixer.kind);
    }
    entry["layers"] = hybrid.layers;
    write_mixer(hybrid.mixer, entry);
    entries.push_back(std::move(entry));
  }
  json["attn"] = entries.empty() ? Json() : entries.size() == 1 ? entries[0] : Json(entries);
  return json.dump(2) + "\n";
}

}  // namespace ouzel
