// A scan as it is written on top of a library of matrix products: chunk by chunk, tokens of a chunk
// meet in triangular matrices, and an erase is a triangular system (the WY form of Yang et al.,
// "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024). What the
// laws are compared to.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "bench/openblas.h"
#include "ouzel/context.h"

namespace ouzel::bench {

// S_t = Diag(exp(g_t)) S_{t-1} + erase + k_t v_t^T, o_t = S_t^T (scale q_t). Dense arrays
// [T, H, D], heads of K = V = `size` numbers, a multiple of 16; what a law lacks is null. Where a
// chunk's decays come near 1e-38 the products of rows and their inverses are meaningless.
struct ChunkedScan {
  std::int64_t tokens = 0, heads = 0, size = 0;
  float scale = 1;
  const float *q = nullptr, *k = nullptr, *v = nullptr;
  const float* g = nullptr;     // [T, H, K], or [T, H]
  bool per_key = false;         // which of the two
  const float* beta = nullptr;  // [T, H]: v_t becomes beta_t (v_t - S^T k_t), S decayed already
  const float *a = nullptr, *b = nullptr;  // [T, H, K]: erases b_t (S_{t-1}^T a_t)^T
};
std::int64_t chunked_states(const ChunkedScan& scan);  // numbers: the state before each chunk
void chunked_scan(const OpenBlas& blas, Isa isa, const ChunkedScan& scan, float* o, float* states);

struct ChunkedGradients {
  float *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr, *beta = nullptr;
  float *a = nullptr, *b = nullptr;
};
void chunked_backward(const OpenBlas& blas, Isa isa, const ChunkedScan& scan, const float* states,
                      const float* d_o, const ChunkedGradients& to);

// What is to be agreed on: ours, theirs.
struct ComparedArrays {
  const Data* ours;
  const Data* theirs;
};
// `row` with the time of OpenBLAS's call over that of ours, and the largest RMS of a difference
// over the RMS of ours.
Row over_blas(Row row, const CaseOptions& options, const std::function<void()>& ours,
              const std::function<void(const OpenBlas&)>& theirs,
              const std::vector<ComparedArrays>& compared);

}  // namespace ouzel::bench
