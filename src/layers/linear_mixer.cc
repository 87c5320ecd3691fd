// Linear attention as flash-linear-attention's LinearAttention layer:
// y = o_proj(rmsnorm_head(linear_attention(phi_q(q), phi_k(k), v))), the scale K^-0.5 whatever the
// map, the normaliser (`norm_feature_map`) with 1e-10 added to the denominator.
#include <cmath>
#include <vector>

#include "ouzel/linear_attention.h"
#include "src/layers/linear.h"
#include "src/layers/mixers.h"
#include "src/layers/norm.h"
#include "src/layers/projections.h"
#include "src/layers/recurrent_state.h"

namespace ouzel {
namespace {

// A learned map (W1 x + b1) * (W2 x + b2): offsets of its parameters.
class HadamardMap {
 public:
  HadamardMap(ParameterTable& table, const std::string& name, std::int64_t size)
      : size_(size),
        w1_(table.add(name + ".layer1.weight", {size, size}, Init::kNormal)),
        b1_(table.add(name + ".layer1.bias", {size}, Init::kZeros)),
        w2_(table.add(name + ".layer2.weight", {size, size}, Init::kNormal)),
        b2_(table.add(name + ".layer2.bias", {size}, Init::kZeros)) {}

  FeatureMapWeights weights(const float* base) const {
    return {View<const float, 2>(base + w1_, {size_, size_}),
            View<const float, 1>(base + b1_, {size_}),
            View<const float, 2>(base + w2_, {size_, size_}),
            View<const float, 1>(base + b2_, {size_})};
  }
  FeatureMapWeightGrads gradients(float* base) const {
    return {View<float, 2>(base + w1_, {size_, size_}), View<float, 1>(base + b1_, {size_}),
            View<float, 2>(base + w2_, {size_, size_}), View<float, 1>(base + b2_, {size_})};
  }

 private:
  std::int64_t size_, w1_, b1_, w2_, b2_;
};

class LinearMixer final : public Mixer {
 public:
  LinearMixer(const Builder& builder, const std::string& prefix, const MixerConfig& config)
      : config_(config),
        heads_(config.num_heads),
        kv_heads_(config.kv_heads()),
        key_size_(config.key_size(builder.config.hidden_size)),
        value_size_(config.value_size(builder.config.hidden_size)),
        projections_(builder, prefix,
                     {heads_ * key_size_, kv_heads_ * key_size_, kv_heads_ * value_size_, 0},
                     config),
        norm_(builder.table, prefix + ".norm", value_size_, builder.config.norm_eps,
              config.elementwise_affine),
        out_(builder, {{prefix + ".o_proj", builder.config.hidden_size}}, heads_ * value_size_),
        state_(builder.state, prefix, kv_heads_, key_size_, value_size_, /*residue=*/true,
               config.norm_feature_map) {
    if (config.feature_map != FeatureMapKind::kElementwiseProduct) return;
    maps_.emplace_back(builder.table, prefix + ".feature_map_q", key_size_);
    if (!config.tie_feature_map_qk) {
      maps_.emplace_back(builder.table, prefix + ".feature_map_k", key_size_);
    } else {
      for (const char* tensor : {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"}) {
        builder.table.add_alias(prefix + ".feature_map_k." + tensor);
      }
    }
  }

  Frame push(Arena& arena, const Run& run) const override {
    const Frame frame = arena.used();
    Saved(arena, run, *this);
    return frame;
  }

  void forward(Run& run, Matrix x, Matrix y, Frame frame) const override {
    Arena at = run.arena.at(frame);
    const Saved saved(at, run, *this);
    const std::size_t mark = run.arena.used();
    const Matrix normed = run.arena.matrix(run.rows(), heads_ * value_size_);
    auto* before = run.arena.take<SequenceState>(run.sequences());
    auto* after = run.arena.take<SequenceState>(run.sequences());
    projections_.forward(run, x, saved.projections);
    run.compute([&] {
      const LinearAttentionOptions options = options_of(run);
      const RecurrenceInputs inputs = inputs_of(run, saved.projections, before);
      const View<float, 4> o = sequences_of(run, saved.o, 0, heads_, value_size_);
      if (run.step()) {
        linear_attention_step(run.context, options, inputs.q, inputs.k, inputs.v,
                              inputs.initial_state, o);
      } else {
        linear_attention(run.context, options, inputs,
                         {o, state_.view(run.final, after), {}, saved.recurrence});
      }
    });
    norm_.forward(run, by_head(saved.o), by_head(normed), saved.rstd);
    out_.forward(run, normed, y, /*accumulate=*/true);
    run.arena.release(mark);
  }

  void backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const override {
    Arena at = run.arena.at(frame);
    const Saved saved(at, run, *this);
    const std::size_t mark = run.arena.used();
    const Matrix normed = run.arena.matrix(run.rows(), heads_ * value_size_);
    const Matrix d_o = run.arena.matrix(run.rows(), heads_ * value_size_);
    const Matrix d_qkv = run.arena.matrix(run.rows(), saved.projections.projected.extent[1]);
    auto* before = run.arena.take<SequenceState>(run.sequences());
    norm_.forward(run, by_head(saved.o), by_head(normed), nullptr);
    out_.backward(run, normed, dy, d_o);
    norm_.backward(run, by_head(saved.o), saved.rstd, by_head(d_o), by_head(d_o));
    run.compute([&] {
      FeatureMapGrads map_grads;
      if (!maps_.empty()) map_grads.q = maps_[0].gradients(run.gradients);
      if (maps_.size() > 1) map_grads.k = maps_[1].gradients(run.gradients);
      linear_attention_backward(
          run.context, options_of(run), inputs_of(run, saved.projections, before), saved.recurrence,
          {sequences_of(run, d_o, 0, heads_, value_size_), {}},
          {.q = q_of(run, d_qkv), .k = k_of(run, d_qkv), .v = v_of(run, d_qkv)},
          maps_.empty() ? nullptr : &map_grads);
    });
    projections_.backward(run, x, saved.projections, d_qkv, dx);
    run.arena.release(mark);
  }

 private:
  struct Saved {
    Saved(Arena& arena, const Run& run, const LinearMixer& mixer)
        : projections(arena, run, mixer.projections_),
          o(arena.matrix(run.rows(), mixer.heads_ * mixer.value_size_)) {
      if (!run.training) return;
      rstd = arena.take<float>(run.rows() * mixer.heads_);
      std::vector<SequenceState> storage(static_cast<std::size_t>(run.sequences()));
      recurrence = arena.take<char>(static_cast<std::int64_t>(linear_attention_saved_bytes(
          mixer.options_of(run), mixer.inputs_of(run, projections, storage.data()))));
    }
    Projections::Saved projections;
    Matrix o;
    float* rstd = nullptr;
    void* recurrence = nullptr;
  };

  View<float, 4> q_of(const Run& run, Matrix qkv) const {
    return sequences_of(run, qkv, 0, heads_, key_size_);
  }
  View<float, 4> k_of(const Run& run, Matrix qkv) const {
    return sequences_of(run, qkv, heads_ * key_size_, kv_heads_, key_size_);
  }
  View<float, 4> v_of(const Run& run, Matrix qkv) const {
    return sequences_of(run, qkv, (heads_ + kv_heads_) * key_size_, kv_heads_, value_size_);
  }
  View<float, 3> by_head(Matrix m) const { return heads_of(m, 0, heads_, value_size_); }

  RecurrenceInputs inputs_of(const Run& run, const Projections::Saved& saved,
                             SequenceState* storage) const {
    return {.q = q_of(run, saved.qkv),
            .k = k_of(run, saved.qkv),
            .v = v_of(run, saved.qkv),
            .initial_state = state_.view(run.initial, storage),
            .segments = run.segments};
  }
  LinearAttentionOptions options_of(const Run& run) const {
    LinearAttentionOptions options;
    options.feature_map.kind = config_.feature_map;
    if (!maps_.empty()) options.feature_map.q = maps_[0].weights(run.weights);
    if (maps_.size() > 1) options.feature_map.k = maps_[1].weights(run.weights);
    options.scale = 1 / std::sqrt(static_cast<double>(key_size_));
    options.normalize = config_.norm_feature_map;
    options.eps = 1e-10;
    return options;
  }

  MixerConfig config_;
  std::int64_t heads_, kv_heads_, key_size_, value_size_;  // sizes of a head
  Projections projections_;
  std::vector<HadamardMap> maps_;  // of q and k; one for both if tied; none for a fixed map
  Norm norm_;
  Linear out_;
  RecurrentState state_;
};

}  // namespace

std::unique_ptr<Mixer> make_linear_mixer(const Builder& builder, const std::string& prefix,
                                         const MixerConfig& config) {
  return std::make_unique<LinearMixer>(builder, prefix, config);
}

}  // namespace ouzel
