// The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202).
#pragma once

#include <cstdint>
#include <string>

#include "src/layers/layer.h"
#include "src/layers/linear.h"

namespace ouzel {

class Mlp final : public Mixer {
 public:
  Mlp(const Builder& builder, const std::string& prefix);

  Frame push(Arena& arena, const Run& run) const override;
  void forward(Run& run, Matrix x, Matrix y, Frame frame) const override;
  void backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const override;

 private:
  std::int64_t intermediate_;
  Linear gate_up_, down_;
};

}  // namespace ouzel
