#include "src/layers/mlp.h"

#include "src/ops/pointwise.h"

namespace ouzel {
namespace {

struct Saved {
  Saved(Arena& arena, const Run& run, std::int64_t intermediate)
      : gate_up(arena.matrix(run.rows(), 2 * intermediate)),
        gate(columns(gate_up, 0, intermediate)),
        up(columns(gate_up, intermediate, intermediate)) {}
  Matrix gate_up, gate, up;
};

}  // namespace

Mlp::Mlp(const Builder& builder, const std::string& prefix)
    : intermediate_(builder.config.mlp_size()),
      gate_up_(builder,
               {{prefix + ".gate_proj", intermediate_}, {prefix + ".up_proj", intermediate_}},
               builder.config.hidden_size),
      down_(builder, {{prefix + ".down_proj", builder.config.hidden_size}}, intermediate_) {}

Frame Mlp::push(Arena& arena, const Run& run) const {
  const Frame frame = arena.used();
  Saved(arena, run, intermediate_);
  return frame;
}

void Mlp::forward(Run& run, Matrix x, Matrix y, Frame frame) const {
  Arena at = run.arena.at(frame);
  const Saved saved(at, run, intermediate_);
  const std::size_t mark = run.arena.used();
  const Matrix product = run.arena.matrix(run.rows(), intermediate_);
  gate_up_.forward(run, x, saved.gate_up);
  run.compute([&] { swiglu(run.context, saved.gate, saved.up, product); });
  down_.forward(run, product, y, /*accumulate=*/true);
  run.arena.release(mark);
}

void Mlp::backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const {
  Arena at = run.arena.at(frame);
  const Saved saved(at, run, intermediate_);
  const std::size_t mark = run.arena.used();
  const Matrix product = run.arena.matrix(run.rows(), intermediate_);
  const Matrix dproduct = run.arena.matrix(run.rows(), intermediate_);
  run.compute([&] { swiglu(run.context, saved.gate, saved.up, product); });
  down_.backward(run, product, dy, dproduct);
  // The gradients of gate and up replace them.
  run.compute(
      [&] { swiglu_backward(run.context, saved.gate, saved.up, dproduct, saved.gate, saved.up); });
  gate_up_.backward(run, x, saved.gate_up, dx);
  run.arena.release(mark);
}

}  // namespace ouzel
