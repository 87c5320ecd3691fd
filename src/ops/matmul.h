// Matrix products of the projections: y = x W^T and its two gradients, by our own tile GEMM. A row
// of the result never depends on how many rows the call has: one output element is one chain of
// fused multiply-adds over the inner dimension, in order, whatever the shape, thread count or
// packing. So a token alone and a token in a batch agree bit for bit.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// A weight W [N, K] (rows are outputs, as PyTorch stores it) copied into the panels that the tile
// reads. Made once for inference, once per optimiser step in training.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // Repacks; allocates only when the shape grows.
  void pack(Context& context, View<const float, 2> w);
  std::int64_t outputs() const { return n_; }  // N
  std::int64_t inputs() const { return k_; }   // K
  const float* panels() const { return memory_.f32(); }
  static std::size_t bytes(std::int64_t n, std::int64_t k);

 private:
  Buffer memory_;
  std::int64_t n_ = 0, k_ = 0;
};

// All matrices have unit last stride; rows may be strided.

// y [M, N] = x [M, K] W^T, plus y if accumulate.
void linear(Context& context, View<const float, 2> x, const PackedMatrix& w, View<float, 2> y,
            bool accumulate = false);
// dx [M, K] = dy [M, N] W, plus dx if accumulate. W [N, K] unpacked.
void linear_backward_input(Context& context, View<const float, 2> dy, View<const float, 2> w,
                           View<float, 2> dx, bool accumulate = false);
// dw [N, K] += dy [M, N]^T x [M, K]. The sum over rows is cut into blocks and parts by the shape
// alone, so it does not depend on the thread count.
void linear_backward_weight(Context& context, View<const float, 2> dy, View<const float, 2> x,
                            View<float, 2> dw);
// Memory that it shares between threads, at most.
std::size_t linear_backward_weight_bytes(std::int64_t n, std::int64_t k);

}  // namespace ouzel
