// Multi-scale retention (RetNet, arXiv:2307.08621) as flash-linear-attention's MultiScaleRetention
// layer: y = o_proj(rmsnorm_head(retention(rotary(q), rotary(k), v)) * silu(g)). With grouped keys
// the decay is still one per query head, so each value head is read by `group` heads with states of
// their own.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ouzel/retention.h"
#include "src/base/context_impl.h"
#include "src/layers/linear.h"
#include "src/layers/mixers.h"
#include "src/layers/norm.h"
#include "src/layers/projections.h"
#include "src/layers/recurrent_state.h"
#include "src/ops/pointwise.h"

namespace ouzel {
namespace {

constexpr double kRotaryBase = 10000;
constexpr std::int64_t kRowBlock = 64;

// to[r, h] = from[r, h / group].
void repeat_heads(Context& context, View<const float, 3> from, View<float, 3> to) {
  const std::int64_t rows = to.extent[0], heads = to.extent[1];
  const std::int64_t group = heads / from.extent[1];
  const std::size_t bytes = static_cast<std::size_t>(to.extent[2]) * sizeof(float);
  context.impl().run((rows + kRowBlock - 1) / kRowBlock, [&](std::int64_t block, Scratch&) {
    const std::int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t r = block * kRowBlock; r < end; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) std::memcpy(to(r, h), from(r, h / group), bytes);
    }
  });
}

// Its gradient: to[r, j] = sum of from[r, h] over the heads of group j, in order.
void sum_heads(Context& context, View<const float, 3> from, View<float, 3> to) {
  const std::int64_t rows = to.extent[0], heads = from.extent[1], size = to.extent[2];
  const std::int64_t group = heads / to.extent[1];
  context.impl().run((rows + kRowBlock - 1) / kRowBlock, [&](std::int64_t block, Scratch&) {
    const std::int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t r = block * kRowBlock; r < end; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* in = from(r, h);
        float* out = to(r, h / group);
        if (h % group == 0) {
          std::copy_n(in, size, out);
        } else {
          for (std::int64_t i = 0; i < size; ++i) out[i] += in[i];
        }
      }
    }
  });
}

class RetentionMixer final : public Mixer {
 public:
  RetentionMixer(const Builder& builder, const std::string& prefix, const MixerConfig& config)
      : heads_(config.num_heads),
        kv_heads_(config.kv_heads()),
        key_size_(config.key_size(builder.config.hidden_size)),
        value_size_(config.value_size(builder.config.hidden_size)),
        gated_(config.use_output_gate),
        projections_(builder, prefix,
                     {heads_ * key_size_, kv_heads_ * key_size_, kv_heads_ * value_size_,
                      gated_ ? heads_ * value_size_ : 0},
                     config),
        norm_(builder.table, prefix + (gated_ ? ".g_norm_swish_gate" : ".g_norm"), value_size_,
              builder.config.norm_eps, config.elementwise_affine),
        out_(builder, {{prefix + ".o_proj", builder.config.hidden_size}}, heads_ * value_size_),
        // Head 7 is the first whose decay, 1 - 2^-12, is slow enough for sums to need a residue.
        state_(builder.state, prefix, heads_, key_size_, value_size_, /*residue=*/heads_ > 7,
               /*normaliser=*/false) {}

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
      rotary(run.context, rotated(saved.projections.qkv), run.positions, kRotaryBase,
             /*inverse=*/false);
      if (kv_heads_ != heads_) {
        repeat_heads(run.context, kv_values(saved.projections.qkv),
                     heads_of(saved.values, 0, heads_, value_size_));
      }
      const RecurrenceInputs inputs = inputs_of(run, saved, before);
      const View<float, 4> o = sequences_of(run, saved.o, 0, heads_, value_size_);
      if (run.step()) {
        retention_step(run.context, {}, inputs.q, inputs.k, inputs.v, inputs.initial_state, o);
      } else {
        retention(run.context, {}, inputs,
                  {o, state_.view(run.final, after), {}, saved.recurrence});
      }
    });
    norm_.forward(run, by_head(saved.o), by_head(normed), saved.rstd, gate(saved));
    out_.forward(run, normed, y, /*accumulate=*/true);
    run.arena.release(mark);
  }

  void backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const override {
    Arena at = run.arena.at(frame);
    const Saved saved(at, run, *this);
    const std::size_t mark = run.arena.used();
    const Matrix normed = run.arena.matrix(run.rows(), heads_ * value_size_);
    const Matrix d_o = run.arena.matrix(run.rows(), heads_ * value_size_);
    const Matrix d_projected = run.arena.matrix(run.rows(), saved.projections.projected.extent[1]);
    const bool grouped = kv_heads_ != heads_;
    const Matrix d_values = grouped ? run.arena.matrix(run.rows(), heads_ * value_size_) : Matrix{};
    auto* before = run.arena.take<SequenceState>(run.sequences());
    norm_.forward(run, by_head(saved.o), by_head(normed), nullptr, gate(saved));
    out_.backward(run, normed, dy, d_o);
    View<float, 3> d_gate;
    if (gated_) d_gate = heads_of(d_projected, qkv_size(), heads_, value_size_);
    norm_.backward(run, by_head(saved.o), saved.rstd, by_head(d_o), by_head(d_o), gate(saved),
                   d_gate);
    run.compute([&] {
      retention_backward(
          run.context, {}, inputs_of(run, saved, before), saved.recurrence,
          {sequences_of(run, d_o, 0, heads_, value_size_), {}},
          {.q = sequences_of(run, d_projected, 0, heads_, key_size_),
           .k = sequences_of(run, d_projected, heads_ * key_size_, kv_heads_, key_size_),
           .v = grouped ? sequences_of(run, d_values, 0, heads_, value_size_)
                        : sequences_of(run, d_projected, value_column(), heads_, value_size_)});
      if (grouped) {
        sum_heads(run.context, heads_of(d_values, 0, heads_, value_size_), kv_values(d_projected));
      }
      rotary(run.context, rotated(d_projected), run.positions, kRotaryBase, /*inverse=*/true);
    });
    projections_.backward(run, x, saved.projections, d_projected, dx);
    run.arena.release(mark);
  }

 private:
  struct Saved {
    Saved(Arena& arena, const Run& run, const RetentionMixer& mixer)
        : projections(arena, run, mixer.projections_),
          o(arena.matrix(run.rows(), mixer.heads_ * mixer.value_size_)) {
      if (mixer.kv_heads_ != mixer.heads_) {
        values = arena.matrix(run.rows(), mixer.heads_ * mixer.value_size_);
      }
      if (!run.training) return;
      rstd = arena.take<float>(run.rows() * mixer.heads_);
      std::vector<SequenceState> storage(static_cast<std::size_t>(run.sequences()));
      recurrence = arena.take<char>(static_cast<std::int64_t>(
          retention_saved_bytes({}, mixer.inputs_of(run, *this, storage.data()))));
    }
    Projections::Saved projections;
    Matrix o;
    Matrix values;  // repeated for each head of a group; grouped heads only
    float* rstd = nullptr;
    void* recurrence = nullptr;
  };

  std::int64_t value_column() const { return (heads_ + kv_heads_) * key_size_; }
  std::int64_t qkv_size() const { return value_column() + kv_heads_ * value_size_; }
  // q and k lie side by side and are turned together.
  View<float, 3> rotated(Matrix m) const { return heads_of(m, 0, heads_ + kv_heads_, key_size_); }
  View<float, 3> kv_values(Matrix m) const {
    return heads_of(m, value_column(), kv_heads_, value_size_);
  }
  View<float, 3> by_head(Matrix m) const { return heads_of(m, 0, heads_, value_size_); }
  View<const float, 3> gate(const Saved& saved) const {
    return gated_ ? by_head(saved.projections.gate) : View<float, 3>{};
  }
  RecurrenceInputs inputs_of(const Run& run, const Saved& saved, SequenceState* storage) const {
    const Matrix qkv = saved.projections.qkv;
    return {.q = sequences_of(run, qkv, 0, heads_, key_size_),
            .k = sequences_of(run, qkv, heads_ * key_size_, kv_heads_, key_size_),
            .v = kv_heads_ != heads_ ? sequences_of(run, saved.values, 0, heads_, value_size_)
                                     : sequences_of(run, qkv, value_column(), heads_, value_size_),
            .initial_state = state_.view(run.initial, storage),
            .segments = run.segments};
  }

  std::int64_t heads_, kv_heads_, key_size_, value_size_;  // sizes of a head
  bool gated_;
  Projections projections_;
  Norm norm_;
  Linear out_;
  RecurrentState state_;
};

}  // namespace

std::unique_ptr<Mixer> make_retention_mixer(const Builder& builder, const std::string& prefix,
                                            const MixerConfig& config) {
  return std::make_unique<RetentionMixer>(builder, prefix, config);
}

}  // namespace ouzel
