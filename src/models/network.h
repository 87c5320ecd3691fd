// The network of a model configuration: embedding, residual blocks, norm, head. Weights live in one
// flat array and may be changed from outside (the trainer does), followed by `pack`; a Model holds
// one that nobody changes any more.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ouzel/model.h"
#include "src/layers/block.h"
#include "src/layers/embedding.h"
#include "src/layers/linear.h"

namespace ouzel {

class Network {
 public:
  // Checks the configuration; allocates nothing that grows with the model's width.
  explicit Network(const ModelConfig& config);
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  std::int64_t parameters_without_embeddings() const;  // nor lm_head

  // Null until `allocate`.
  float* weights() { return weights_.f32(); }
  const float* weights() const { return weights_.f32(); }
  void allocate();
  // N(0, initializer_range), ones and zeros; a function of the seed alone.
  void initialise(Context& context, std::uint64_t seed);
  // After any change of the weights.
  void pack(Context& context);
  std::size_t packed_bytes() const;
  std::size_t scratch_bytes() const;  // of the operators, shared between threads
  std::string fingerprint() const;    // of configuration and weights

  State new_state(std::int64_t capacity) const { return State(layout_, capacity); }
  static SequenceMemory memory(const State& state);
  static void advance(State& state, std::int64_t tokens) { state.position_ += tokens; }
  const StateLayout& state_layout() const { return *layout_; }
  // States made from now on carry it. Only before the first state is made.
  void bind_states(const std::string& fingerprint) { layout_->fingerprint = fingerprint; }

  // Logits of every row, or of the last row of each sequence (LogitRows). `run.weights` is set
  // here.
  void forward(Run& run, std::span<const std::int32_t> tokens, Matrix logits, LogitRows rows) const;
  // losses[r] in nats; targets of -1 give 0.
  void losses(Run& run, std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
              float* losses) const;
  // The same with gradients: adds those of weight * sum(losses) to run.gradients. `recompute`:
  // frames of blocks are built again in the backward pass instead of being kept.
  void backward(Run& run, std::span<const std::int32_t> tokens,
                std::span<const std::int32_t> targets, float weight, float* losses,
                bool recompute) const;

 private:
  Matrix embed_and_mix(Run& run, std::span<const std::int32_t> tokens) const;

  ModelConfig config_;
  ParameterTable table_;
  std::shared_ptr<StateLayout> layout_ = std::make_shared<StateLayout>();
  std::vector<Linear*> linears_;
  Builder builder_;
  Embedding embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  Norm norm_;
  Linear head_;
  Buffer weights_;
};

}  // namespace ouzel
