// The projections of a recurrent mixer: q, k, v and, where there is one, the output gate, as one
// product; q, k and v may pass a short causal convolution with SiLU.
#pragma once

#include <cstdint>
#include <string>

#include "ouzel/model.h"
#include "src/layers/layer.h"
#include "src/layers/linear.h"

namespace ouzel {

class Projections {
 public:
  struct Sizes {
    std::int64_t q = 0, k = 0, v = 0, g = 0;  // g = 0: no gate
    std::int64_t qkv() const { return q + k + v; }
  };
  // What forward leaves. `qkv` is a part of `projected` unless there is a convolution between the
  // two.
  struct Saved {
    Saved(Arena& arena, const Run& run, const Projections& p);
    Matrix projected;         // [rows, q | k | v | g]
    Matrix qkv;               // [rows, q | k | v]
    Matrix gate;              // [rows, g]
    float* window = nullptr;  // [N, q + k + v, conv_size], initial: kept for backward
  };

  Projections(const Builder& builder, const std::string& prefix, const Sizes& sizes,
              const MixerConfig& config);

  void forward(Run& run, Matrix x, const Saved& saved) const;
  // d_projected [rows, q | k | v | g] holds the gradients of q, k, v (after the convolution) and g.
  void backward(Run& run, Matrix x, const Saved& saved, Matrix d_projected, Matrix dx) const;

 private:
  void convolve(Run& run, const Saved& saved) const;

  Sizes sizes_;
  Linear linear_;
  std::int64_t conv_weight_ = -1;  // offset of [q + k + v, 1, conv_size]; -1: no convolution
  std::int64_t conv_size_ = 0;
  int window_part_ = -1;
};

}  // namespace ouzel
