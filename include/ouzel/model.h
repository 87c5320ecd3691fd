// Language models: a configuration, an immutable Model made from it, and State, the value that
// holds all a model needs to go on. One forward call serves whole sequences and single tokens.
//
//     const Model model = Model::load("folder");        // config.json + model.safetensors
//     State state = model.new_state();
//     Workspace workspace;
//     model.forward(context, workspace, {tokens, {1, T}}, state, {logits, {1, V}});
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/feature_map.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// What mixes tokens in a layer, named by flash-linear-attention's model types.
enum class MixerKind {
  kSoftmaxAttention,  // "transformer": rotary positions, sliding window, grouped heads
  kLinearAttention,   // "linear_attn"
  kRetention,         // "retnet": rotary positions, decay per head, gated norm
};

// "transformer", "linear_attn", "retnet".
OUZEL_EXPORT const char* name_of(MixerKind kind);

// One mixer. Members carry the names and the defaults of flash-linear-attention's configuration
// keys.
struct MixerConfig {
  MixerKind kind = MixerKind::kRetention;
  std::int64_t num_heads = 4;
  std::int64_t num_kv_heads = 0;  // 0: num_heads
  // Softmax attention only.
  std::int64_t window_size = 0;  // 0: every earlier token
  double rope_theta = 10000;     // retention turns by 10000 always
  bool qkv_bias = false;
  bool qk_norm = false;  // RMSNorm of each head of q and k
  // Linear attention and retention.
  double expand_k = 1, expand_v = 1;  // key and value sizes of all heads together, over hidden_size
  bool elementwise_affine = true;     // the output norm has a weight
  bool use_short_conv = false;
  std::int64_t conv_size = 4;
  // Linear attention only.
  FeatureMapKind feature_map = FeatureMapKind::kElementwiseProduct;
  bool tie_feature_map_qk = false;
  bool norm_feature_map = false;  // the normaliser
  // Retention only.
  bool use_output_gate = true;

  // The defaults of a kind (they differ in num_heads and expand_v).
  OUZEL_EXPORT static MixerConfig defaults(MixerKind kind);
  std::int64_t kv_heads() const { return num_kv_heads != 0 ? num_kv_heads : num_heads; }
  // Of one head.
  OUZEL_EXPORT std::int64_t key_size(std::int64_t hidden_size) const;
  OUZEL_EXPORT std::int64_t value_size(std::int64_t hidden_size) const;
};

// A model's shape. Every layer is x += mixer(norm(x)); x += mlp(norm(x)).
struct OUZEL_EXPORT ModelConfig {
  // Some layers with another mixer (a hybrid): `attn` in config.json, where an entry without
  // "model_type" is softmax attention, as in flash-linear-attention.
  struct Hybrid {
    std::vector<std::int64_t> layers = {};
    MixerConfig mixer = {};
  };

  MixerConfig mixer;  // of every layer that `attn` does not name; its kind is the model type
  std::vector<Hybrid> attn;
  std::int64_t vocab_size = 256;
  std::int64_t hidden_size = 256;
  std::int64_t num_hidden_layers = 4;
  double hidden_ratio = 4;
  std::int64_t intermediate_size =
      0;  // 0: hidden_size * hidden_ratio * 2/3, up to a multiple of 256
  double norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  // What `from_json` noticed: a sentence for each ignored key that is near to one of ours, named
  // there, which the text leaves out ("num_kv_head"); of 100 keys at most. Computes nothing, and is
  // not written by `to_json`.
  std::vector<std::string> warnings = {};

  // The defaults of a model type: "transformer", "linear_attn" or "retnet".
  static ModelConfig defaults(const std::string& model_type);
  // Reads config.json's text; `what` names it in errors. Keys that change what a model computes and
  // that we do not implement are refused by name; others are ignored, and named in `warnings` if
  // they look misspelt. `strict`, for a text that was written for us: others are refused too, but
  // for those that stand in every file of transformers ("torch_dtype"). Throws Error(kBadFile).
  static ModelConfig from_json(const std::string& text, const std::string& what,
                               bool strict = false);
  std::string to_json() const;
  // Throws Error(kInvalidArgument) naming the member that does not fit.
  void check() const;

  const MixerConfig& mixer_of(std::int64_t layer) const;
  std::int64_t mlp_size() const;  // intermediate_size, resolved
};

struct Parameter {
  std::string name;  // "model.layers.0.attn.q_proj.weight"
  ConstTensor tensor;
};

class Network;      // src/models/network.h
class StateLayout;  // src/layers/state.h

// All that a model needs to go on after some tokens: sums with their residues, normalisers,
// convolution windows, keys and values of softmax layers, the position, and the sampler's bytes. A
// value: copies are independent. Reserved memory apart, its size never grows.
class OUZEL_EXPORT State {
 public:
  State();  // of no model: may only be assigned to
  ~State();
  State(const State& other);
  State& operator=(const State& other);
  State(State&& other) noexcept;
  State& operator=(State&& other) noexcept;

  // Same model, position, sampler and content; what is reserved and not yet used does not count.
  friend OUZEL_EXPORT bool operator==(const State& a, const State& b);

  std::int64_t position() const { return position_; }  // tokens seen
  std::size_t bytes() const;                           // of memory, reserved capacity included
  // Tokens that softmax layers without a window have room for.
  std::int64_t capacity() const { return capacity_; }
  // Grows that room (never shrinks it); the content stays. Nothing to do for a model without such
  // layers. Throws Error(kInvalidArgument) for a negative number and for what no memory can hold,
  // Error(kOutOfMemory) for what this one does not.
  void reserve(std::int64_t tokens);
  // Of the model and of the format of states.
  const std::string& fingerprint() const;
  // Back to the zero state; capacity stays.
  void clear();

  // Writes one file (safetensors), atomically. Throws Error(kIo).
  void save(const std::string& path) const;

  // Opaque to the model: what a sampler needs to go on. Saved, copied and compared with the rest.
  std::vector<std::uint8_t> sampler;

 private:
  friend class Model;
  friend class Network;
  friend class StateAccess;
  State(std::shared_ptr<const StateLayout> layout, std::int64_t capacity);

  std::shared_ptr<const StateLayout> layout_;
  Buffer memory_;
  std::int64_t capacity_ = 0;
  std::int64_t position_ = 0;
};

// Memory of activations, kept between calls so that equal calls allocate nothing. One per thread of
// calls; holds nothing that matters to the result.
class OUZEL_EXPORT Workspace {
 public:
  Workspace();
  ~Workspace();
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  std::size_t bytes() const;

 private:
  friend class Model;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Which rows of logits a forward call gives: of every token [B * T, vocab], or of each sequence's
// last token [N, vocab].
enum class LogitRows { kAll, kLast };

// Weights and configuration, immutable: any number of sessions and threads may share one (each with
// its own Context, Workspace and State). Copies share the weights.
class OUZEL_EXPORT Model {
 public:
  // Random weights: N(0, initializer_range) matrices, norms 1, biases 0, from `seed` alone.
  Model(Context& context, const ModelConfig& config, std::uint64_t seed);
  // Reads FOLDER/config.json and FOLDER/model.safetensors (or the files that
  // model.safetensors.index.json names), F32, F16 or BF16. Throws Error(kIo) when a file is
  // missing, Error(kBadFile) with every tensor that is missing, unused or misshapen in one
  // sentence.
  static Model load(Context& context, const std::string& folder);
  // Writes both files, float32. Ended at any moment, it leaves the model that was there, this one,
  // or weights alone, which `load` refuses: never weights beside another's configuration. Throws
  // Error(kInvalidArgument) for the folder of a training run, which would restore its own weights.
  void save(const std::string& folder) const;

  const ModelConfig& config() const;
  std::vector<Parameter> parameters() const;
  std::int64_t parameter_count() const;
  const std::string& fingerprint() const;  // of configuration and weights, 16 hexadecimal digits

  // The zero state. `capacity`: see State::capacity.
  State new_state(std::int64_t capacity = 0) const;
  // Reads a state that State::save wrote, with room for at least `capacity` tokens. Throws
  // Error(kBadFile) naming both fingerprints when it is of another model or format.
  State load_state(const std::string& path, std::int64_t capacity = 0) const;

  // Processes tokens [B, T], each in [0, vocab_size). Sequence n (row n, or segment n of
  // `segments`) continues states[n], which is advanced; no states: all start from zero and nothing
  // is kept. Logits: see LogitRows; rows without a token are 0. With T = 1 (and no segments) the
  // step operators run and nothing is allocated once the workspace has seen the shape. Throws
  // Error(kInvalidArgument); states are then unspecified only if the context was cancelled midway.
  void forward(Context& context, Workspace& workspace, View<const std::int32_t, 2> tokens,
               std::span<State* const> states, View<float, 2> logits,
               LogitRows rows = LogitRows::kLast, const Segments* segments = nullptr) const;
  // One sequence.
  void forward(Context& context, Workspace& workspace, std::span<const std::int32_t> tokens,
               State& state, View<float, 2> logits, LogitRows rows = LogitRows::kLast) const;

 private:
  explicit Model(std::shared_ptr<const Network> network);
  std::shared_ptr<const Network> network_;
};

}  // namespace ouzel
