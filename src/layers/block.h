// A residual block: x += mixer(norm(x)); x += mlp(norm(x)) (pre-norm).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "src/layers/mixers.h"
#include "src/layers/mlp.h"
#include "src/layers/norm.h"

namespace ouzel {

class Block {
 public:
  Block(const Builder& builder, std::int64_t layer);

  Frame push(Arena& arena, const Run& run) const;
  // y = block(x); in place (y is x) unless training.
  void forward(Run& run, Matrix x, Matrix y, Frame frame) const;
  // `d` holds the gradient of y and receives that of x.
  void backward(Run& run, Matrix x, Matrix d, Frame frame) const;

 private:
  struct Saved;
  // d += gradient of inner(norm(x)) for the upstream gradient d.
  void half_backward(Run& run, const Norm& norm, const Mixer& inner, Matrix x, const float* rstd,
                     Matrix d, Frame frame) const;

  std::int64_t hidden_;
  Norm attn_norm_;
  std::unique_ptr<Mixer> mixer_;
  Norm mlp_norm_;
  Mlp mlp_;
};

}  // namespace ouzel
