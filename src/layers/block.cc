#include "src/layers/block.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "src/base/context_impl.h"
#include "src/ops/pointwise.h"

namespace ouzel {
namespace {

std::string prefix_of(std::int64_t layer, const char* part) {
  return fmt::format("model.layers.{}.{}", layer, part);
}

std::unique_ptr<Mixer> make_mixer(const Builder& builder, std::int64_t layer) {
  const MixerConfig& config = builder.config.mixer_of(layer);
  const std::string prefix = prefix_of(layer, "attn");
  switch (config.kind) {
    case MixerKind::kSoftmaxAttention:
      return make_softmax_mixer(builder, prefix, config);
    case MixerKind::kLinearAttention:
      return make_linear_mixer(builder, prefix, config);
    case MixerKind::kRetention:
      break;
  }
  return make_retention_mixer(builder, prefix, config);
}

View<float, 3> ungrouped(Matrix m) { return heads_of(m, 0, 1, m.extent[1]); }

// Dense matrices; nothing to do for one and the same.
void copy(const Run& run, Matrix from, Matrix to) {
  if (from.data == to.data) return;
  run.compute([&] {
    constexpr std::int64_t kBlock = 1 << 14;
    const std::int64_t size = from.size();
    run.context.impl().run((size + kBlock - 1) / kBlock, [&](std::int64_t block, Scratch&) {
      const std::int64_t begin = block * kBlock, count = std::min(kBlock, size - begin);
      std::memcpy(to.data + begin, from.data + begin,
                  static_cast<std::size_t>(count) * sizeof(float));
    });
  });
}

}  // namespace

struct Block::Saved {
  Saved(Arena& arena, const Run& run, const Block& block) {
    if (run.training) {
      middle = arena.matrix(run.rows(), block.hidden_);
      attn_rstd = arena.take<float>(run.rows());
      mlp_rstd = arena.take<float>(run.rows());
    }
    mixer = block.mixer_->push(arena, run);
    mlp = block.mlp_.push(arena, run);
  }
  Matrix middle;  // the stream between the two halves
  float *attn_rstd = nullptr, *mlp_rstd = nullptr;
  Frame mixer = 0, mlp = 0;
};

Block::Block(const Builder& builder, std::int64_t layer)
    : hidden_(builder.config.hidden_size),
      attn_norm_(builder.table, prefix_of(layer, "attn_norm"), hidden_, builder.config.norm_eps),
      mixer_(make_mixer(builder, layer)),
      mlp_norm_(builder.table, prefix_of(layer, "mlp_norm"), hidden_, builder.config.norm_eps),
      mlp_(builder, prefix_of(layer, "mlp")) {}

Frame Block::push(Arena& arena, const Run& run) const {
  const Frame frame = arena.used();
  Saved(arena, run, *this);
  return frame;
}

void Block::forward(Run& run, Matrix x, Matrix y, Frame frame) const {
  Arena at = run.arena.at(frame);
  const Saved saved(at, run, *this);
  const std::size_t mark = run.arena.used();
  const Matrix normed = run.arena.matrix(run.rows(), hidden_);
  const Matrix middle = run.training ? saved.middle : y;
  attn_norm_.forward(run, ungrouped(x), ungrouped(normed), saved.attn_rstd);
  copy(run, x, middle);
  mixer_->forward(run, normed, middle, saved.mixer);
  mlp_norm_.forward(run, ungrouped(middle), ungrouped(normed), saved.mlp_rstd);
  copy(run, middle, y);
  mlp_.forward(run, normed, y, saved.mlp);
  run.arena.release(mark);
}

void Block::backward(Run& run, Matrix x, Matrix d, Frame frame) const {
  Arena at = run.arena.at(frame);
  const Saved saved(at, run, *this);
  half_backward(run, mlp_norm_, mlp_, saved.middle, saved.mlp_rstd, d, saved.mlp);
  half_backward(run, attn_norm_, *mixer_, x, saved.attn_rstd, d, saved.mixer);
}

void Block::half_backward(Run& run, const Norm& norm, const Mixer& inner, Matrix x,
                          const float* rstd, Matrix d, Frame frame) const {
  const std::size_t mark = run.arena.used();
  const Matrix normed = run.arena.matrix(run.rows(), hidden_);
  const Matrix d_normed = run.arena.matrix(run.rows(), hidden_);
  norm.forward(run, ungrouped(x), ungrouped(normed), nullptr);
  inner.backward(run, normed, d, d_normed, frame);
  norm.backward(run, ungrouped(x), rstd, ungrouped(d_normed), ungrouped(d_normed));
  run.compute([&] { add(run.context, d_normed, d); });
  run.arena.release(mark);
}

}  // namespace ouzel
