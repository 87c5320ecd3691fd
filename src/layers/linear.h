// Linear projections y = x W^T (+ b), several of the same input as one product: the matrices of q,
// k and v stand one after the other in the flat array of parameters and are one taller matrix.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/layers/builder.h"
#include "src/layers/layer.h"
#include "src/ops/matmul.h"

namespace ouzel {

class Linear {
 public:
  struct Part {
    std::string name;  // "model.layers.0.attn.q_proj"; ".weight" and ".bias" are appended
    std::int64_t outputs = 0;
  };
  Linear(const Builder& builder, const std::vector<Part>& parts, std::int64_t inputs,
         bool bias = false);
  // Shares the matrix [outputs, inputs] at `offset` with its owner.
  Linear(const Builder& builder, std::int64_t offset, std::int64_t outputs, std::int64_t inputs);
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  std::int64_t outputs() const { return outputs_; }  // of all parts together
  // After any change of the weights.
  void pack(Context& context, const float* weights);
  std::size_t packed_bytes() const { return PackedMatrix::bytes(outputs_, inputs_); }
  // What the operators of `backward` share as scratch, at most.
  std::size_t scratch_bytes() const;
  void forward(Run& run, Matrix x, Matrix y, bool accumulate = false) const;
  // dx = dy W, and the gradients of W and b.
  void backward(Run& run, Matrix x, Matrix dy, Matrix dx) const;

 private:
  std::int64_t weight_ = 0, bias_ = -1;  // offsets; -1: no bias
  std::int64_t outputs_ = 0, inputs_ = 0;
  PackedMatrix packed_;
};

}  // namespace ouzel
