// Softmax attention as flash-linear-attention's Attention layer: rotary positions, causal, a
// sliding window if wanted, grouped keys: y = o_proj(softmax_attention(rotary(q), rotary(k), v)). A
// state holds rotated keys and values: of every token (a row each, capacity reserved) or of the
// last `window_size` ones (token p at slot p % window_size).
#include <algorithm>
#include <cstring>

#include "ouzel/softmax_attention.h"
#include "src/layers/linear.h"
#include "src/layers/mixers.h"
#include "src/layers/norm.h"
#include "src/ops/pointwise.h"

namespace ouzel {
namespace {

// Keys gathered from a window begin at a multiple of as many tokens from the sequence's start
// (masked rows of zeros lead up to them), so that the online softmax sees the blocks it would see
// in one call.
constexpr std::int64_t kAlign = 64;

void copy_rows(std::int64_t rows, std::int64_t width, const float* from, std::int64_t from_stride,
               float* to, std::int64_t to_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * to_stride, from + r * from_stride,
                static_cast<std::size_t>(width) * sizeof(float));
  }
}

class SoftmaxMixer final : public Mixer {
 public:
  SoftmaxMixer(const Builder& builder, const std::string& prefix, const MixerConfig& config)
      : heads_(config.num_heads),
        kv_heads_(config.kv_heads()),
        size_(config.key_size(builder.config.hidden_size)),
        window_(config.window_size),
        rope_theta_(config.rope_theta),
        qkv_(builder,
             {{prefix + ".q_proj", heads_ * size_},
              {prefix + ".k_proj", kv_heads_ * size_},
              {prefix + ".v_proj", kv_heads_ * size_}},
             builder.config.hidden_size, config.qkv_bias),
        out_(builder, {{prefix + ".o_proj", builder.config.hidden_size}}, heads_ * size_) {
    if (config.qk_norm) {
      q_norm_ =
          std::make_unique<Norm>(builder.table, prefix + ".q_norm", size_, builder.config.norm_eps);
      k_norm_ =
          std::make_unique<Norm>(builder.table, prefix + ".k_norm", size_, builder.config.norm_eps);
    }
    const bool grows = window_ == 0;
    for (auto [part, name] : {std::pair{&k_part_, ".k"}, std::pair{&v_part_, ".v"}}) {
      *part = grows ? builder.state.add(prefix + name, {kv_heads_, size_}, true)
                    : builder.state.add(prefix + name, {window_, kv_heads_, size_});
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
    qkv_.forward(run, x, saved.projected);
    if (q_norm_) {
      q_norm_->forward(run, q_of(saved.projected), q_of(saved.qk), saved.q_rstd);
      k_norm_->forward(run, k_of(saved.projected), k_of(saved.qk), saved.k_rstd);
    }
    const std::size_t mark = run.arena.used();
    auto* caches = run.arena.take<KvCache>(run.step() ? run.sequences() : 0);
    run.compute([&] {
      rotary(run.context, rotated(saved.qk), run.positions, rope_theta_, /*inverse=*/false);
      if (run.step()) {
        step(run, saved, caches);
      } else if (run.initial.empty()) {
        softmax_attention(run.context, options(0), inputs_of(run, saved), outputs_of(run, saved));
      } else {
        if (run.segments != nullptr) std::fill_n(saved.o.data, saved.o.size(), 0.0f);
        for (std::int64_t n = 0; n < run.sequences(); ++n) continue_sequence(run, saved, n);
      }
    });
    run.arena.release(mark);
    out_.forward(run, saved.o, y, /*accumulate=*/true);
  }

  void backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const override {
    Arena at = run.arena.at(frame);
    const Saved saved(at, run, *this);
    const std::size_t mark = run.arena.used();
    const Matrix d_o = run.arena.matrix(run.rows(), heads_ * size_);
    const Matrix d_qkv = run.arena.matrix(run.rows(), qkv_.outputs());
    // Gradients of the keys and values of one sequence, those before it included.
    const std::int64_t rows = saved.keys.data != nullptr ? saved.keys.extent[1] : 0;
    const Matrix d_keys = run.arena.matrix(rows, kv_width());
    const Matrix d_values = run.arena.matrix(rows, kv_width());
    out_.backward(run, saved.o, dy, d_o);
    run.compute([&] {
      if (run.initial.empty()) {
        softmax_attention_backward(run.context, options(0), inputs_of(run, saved),
                                   sequences_of(run, saved.o, 0, heads_, size_), lse_of(run, saved),
                                   sequences_of(run, d_o, 0, heads_, size_),
                                   sequences_of(run, d_qkv, 0, heads_, size_),
                                   sequences_of(run, d_qkv, k_column(), kv_heads_, size_),
                                   sequences_of(run, d_qkv, v_column(), kv_heads_, size_));
      } else {
        if (run.segments != nullptr) std::fill_n(d_qkv.data, d_qkv.size(), 0.0f);
        for (std::int64_t n = 0; n < run.sequences(); ++n) {
          continue_sequence_backward(run, saved, n, d_o, d_qkv, d_keys, d_values);
        }
      }
      rotary(run.context, rotated(d_qkv), run.positions, rope_theta_, /*inverse=*/true);
    });
    if (q_norm_) {
      q_norm_->backward(run, q_of(saved.projected), saved.q_rstd, q_of(d_qkv), q_of(d_qkv));
      k_norm_->backward(run, k_of(saved.projected), saved.k_rstd, k_of(d_qkv), k_of(d_qkv));
    }
    qkv_.backward(run, x, d_qkv, dx);
    run.arena.release(mark);
  }

 private:
  struct Saved {
    Saved(Arena& arena, const Run& run, const SoftmaxMixer& mixer)
        : projected(arena.matrix(run.rows(), mixer.qkv_.outputs())),
          qk(columns(projected, 0, mixer.v_column())),
          o(arena.matrix(run.rows(), mixer.heads_ * mixer.size_)) {
      if (mixer.q_norm_) qk = arena.matrix(run.rows(), mixer.v_column());
      if (!run.initial.empty() && !run.step() && mixer.window_ != 0) {
        const std::array<std::int64_t, 3> extent = {
            run.sequences(), mixer.window_ - 1 + kAlign - 1 + run.tokens, mixer.kv_width()};
        keys = {arena.take<float>(extent[0] * extent[1] * extent[2]), extent};
        values = {arena.take<float>(extent[0] * extent[1] * extent[2]), extent};
      }
      if (!run.training) return;
      lse = arena.take<double>(run.rows() * mixer.heads_);
      if (mixer.q_norm_) {
        q_rstd = arena.take<float>(run.rows() * mixer.heads_);
        k_rstd = arena.take<float>(run.rows() * mixer.kv_heads_);
      }
    }
    Matrix projected;  // [rows, q | k | v]
    Matrix
        qk;  // [rows, q | k], normalised and turned; a part of `projected` unless they have norms
    Matrix o;
    // With a window and a state: keys and values of each sequence behind those before it.
    View<float, 3> keys, values;
    double* lse = nullptr;
    float *q_rstd = nullptr, *k_rstd = nullptr;
  };

  std::int64_t kv_width() const { return kv_heads_ * size_; }
  std::int64_t k_column() const { return heads_ * size_; }
  std::int64_t v_column() const { return k_column() + kv_width(); }
  View<float, 3> q_of(Matrix m) const { return heads_of(m, 0, heads_, size_); }
  View<float, 3> k_of(Matrix m) const { return heads_of(m, k_column(), kv_heads_, size_); }
  // q and k lie side by side and are turned together.
  View<float, 3> rotated(Matrix m) const { return heads_of(m, 0, heads_ + kv_heads_, size_); }

  SoftmaxAttentionOptions options(std::int64_t q_offset) const {
    SoftmaxAttentionOptions options;
    options.window = window_;
    options.q_offset = q_offset;
    return options;
  }
  SoftmaxAttentionInputs inputs_of(const Run& run, const Saved& saved) const {
    return {.q = sequences_of(run, saved.qk, 0, heads_, size_),
            .k = sequences_of(run, saved.qk, k_column(), kv_heads_, size_),
            .v = sequences_of(run, saved.projected, v_column(), kv_heads_, size_),
            .segments = run.segments};
  }
  Tensor lse_of(const Run& run, const Saved& saved) const {
    if (saved.lse == nullptr) return {};
    return {saved.lse, DType::kF64, {run.batch, run.tokens, heads_}};
  }
  SoftmaxAttentionOutputs outputs_of(const Run& run, const Saved& saved) const {
    return {sequences_of(run, saved.o, 0, heads_, size_), lse_of(run, saved)};
  }

  void step(Run& run, const Saved& saved, KvCache* caches) const {
    for (std::int64_t n = 0; n < run.sequences(); ++n) {
      const SequenceMemory& memory = run.final[static_cast<std::size_t>(n)];
      caches[n] = {memory.part(k_part_), memory.part(v_part_),
                   window_ == 0 ? memory.capacity : window_, memory.position};
    }
    const SoftmaxAttentionInputs inputs = inputs_of(run, saved);
    softmax_attention_step(run.context, options(0), inputs.q, inputs.k, inputs.v,
                           {caches, static_cast<std::size_t>(run.sequences())},
                           sequences_of(run, saved.o, 0, heads_, size_));
  }

  // The part of a sequence that a call holds, as a batch of one.
  struct Piece {
    std::int64_t row = 0, length = 0;  // first row; tokens
    std::int64_t past = 0, kept = 0;   // keys before them; of those, what the state holds
    SoftmaxAttentionInputs inputs;
    View<float, 4> o;
    View<double, 3> lse;
  };
  Piece piece_of(const Run& run, const Saved& saved, std::int64_t n) const {
    const SequenceMemory& memory = run.initial[static_cast<std::size_t>(n)];
    const Segment segment = run.segment(n);
    Piece piece;
    piece.row = segment.batch * run.tokens + segment.begin;
    piece.length = segment.length;
    piece.kept = window_ == 0 ? memory.position : std::min(memory.position, window_ - 1);
    piece.past = piece.kept + (memory.position - piece.kept) % kAlign;
    const std::int64_t keys = piece.past + piece.length;
    const auto batch_of_one = [&](float* data, std::int64_t rows, std::int64_t heads,
                                  std::int64_t stride) {
      return View<float, 4>(data, {1, rows, heads, size_}, {rows * stride, stride, size_, 1});
    };
    piece.inputs.q = batch_of_one(saved.qk(piece.row), piece.length, heads_, saved.qk.stride[0]);
    if (window_ != 0) {
      piece.inputs.k = batch_of_one(saved.keys(n), keys, kv_heads_, kv_width());
      piece.inputs.v = batch_of_one(saved.values(n), keys, kv_heads_, kv_width());
    } else {
      piece.inputs.k = batch_of_one(memory.part(k_part_), keys, kv_heads_, kv_width());
      piece.inputs.v = batch_of_one(memory.part(v_part_), keys, kv_heads_, kv_width());
    }
    piece.o = batch_of_one(saved.o(piece.row), piece.length, heads_, saved.o.stride[0]);
    if (saved.lse != nullptr) {
      piece.lse = {saved.lse + piece.row * heads_, {1, piece.length, heads_}};
    }
    return piece;
  }

  void continue_sequence(Run& run, const Saved& saved, std::int64_t n) const {
    const SequenceMemory& before = run.initial[static_cast<std::size_t>(n)];
    const SequenceMemory& after =
        run.final.empty() ? before : run.final[static_cast<std::size_t>(n)];
    const Piece piece = piece_of(run, saved, n);
    if (piece.length == 0 && before.base == after.base) return;
    const std::int64_t width = kv_width();
    for (const bool is_key : {true, false}) {
      const int part = is_key ? k_part_ : v_part_;
      const Matrix source = is_key ? saved.qk : saved.projected;
      const float* fresh = source(piece.row, is_key ? k_column() : v_column());
      const std::int64_t stride = source.stride[0];
      if (window_ == 0) {
        copy_rows(piece.length, width, fresh, stride, before.part(part) + before.position * width,
                  width);
        continue;
      }
      float* gathered = is_key ? saved.keys(n) : saved.values(n);
      const float* ring = before.part(part);
      const std::int64_t lead = piece.past - piece.kept;
      std::fill_n(gathered, lead * width, 0.0f);
      for (std::int64_t i = 0; i < piece.kept; ++i) {
        const std::int64_t slot = (before.position - piece.kept + i) % window_;
        copy_rows(1, width, ring + slot * width, width, gathered + (lead + i) * width, width);
      }
      copy_rows(piece.length, width, fresh, stride, gathered + piece.past * width, width);
      if (run.final.empty()) continue;
      float* out = after.part(part);
      if (out != ring) copy_rows(window_, width, ring, width, out, width);
      for (std::int64_t i = std::max<std::int64_t>(0, piece.length - window_); i < piece.length;
           ++i) {
        const std::int64_t slot = (before.position + i) % window_;
        copy_rows(1, width, fresh + i * stride, width, out + slot * width, width);
      }
    }
    if (piece.length == 0) return;
    softmax_attention(run.context, options(piece.past), piece.inputs,
                      {piece.o, saved.lse != nullptr ? Tensor(piece.lse) : Tensor()});
  }

  // Gradients stop at the keys and values of earlier calls (truncated back-propagation).
  void continue_sequence_backward(Run& run, const Saved& saved, std::int64_t n, Matrix d_o,
                                  Matrix d_qkv, Matrix d_keys, Matrix d_values) const {
    const Piece piece = piece_of(run, saved, n);
    if (piece.length == 0) return;
    const std::int64_t keys = piece.past + piece.length, stride = d_qkv.stride[0];
    const auto one = [&](float* data, std::int64_t rows, std::int64_t heads, std::int64_t step) {
      return View<float, 4>(data, {1, rows, heads, size_}, {rows * step, step, size_, 1});
    };
    softmax_attention_backward(run.context, options(piece.past), piece.inputs, piece.o, piece.lse,
                               one(d_o(piece.row), piece.length, heads_, d_o.stride[0]),
                               one(d_qkv(piece.row), piece.length, heads_, stride),
                               one(d_keys.data, keys, kv_heads_, kv_width()),
                               one(d_values.data, keys, kv_heads_, kv_width()));
    copy_rows(piece.length, kv_width(), d_keys(piece.past), kv_width(),
              d_qkv(piece.row, k_column()), stride);
    copy_rows(piece.length, kv_width(), d_values(piece.past), kv_width(),
              d_qkv(piece.row, v_column()), stride);
  }

  std::int64_t heads_, kv_heads_, size_, window_;
  double rope_theta_;
  Linear qkv_, out_;
  std::unique_ptr<Norm> q_norm_, k_norm_;  // null: none
  int k_part_ = -1, v_part_ = -1;
};

}  // namespace

std::unique_ptr<Mixer> make_softmax_mixer(const Builder& builder, const std::string& prefix,
                                          const MixerConfig& config) {
  return std::make_unique<SoftmaxMixer>(builder, prefix, config);
}

}  // namespace ouzel
