#include "bench/chunked_blas.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ouzel/tensor.h"
#include "src/kernels/law_rows.h"
#include "src/kernels/recurrence_block.h"

namespace ouzel::bench {
namespace {

// Tokens of a chunk: with 32 it takes as long, with 128 longer.
constexpr std::int64_t kTokens = 64;

class Chunks {
 public:
  Chunks(const OpenBlas& blas, Isa isa, const ChunkedScan& scan)
      : blas_(blas),
        isa_(isa),
        scan_(scan),
        size_(scan.size),
        memory_(
            static_cast<std::size_t>(11 * kTokens * size_ + size_ * size_ + 3 * kTokens * kTokens) *
            sizeof(float)) {
    float* next = memory_.f32();
    const auto take = [&next](std::int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    for (float** rows : {&q_, &k_, &e_, &b_, &u_, &w_, &o_, &log_, &decay_, &inverse_, &before_}) {
      *rows = take(kTokens * size_);
    }
    for (float** square : {&pairs_, &erase_pairs_, &system_}) *square = take(kTokens * kTokens);
    state_ = take(size_ * size_);
  }

  void run(std::int64_t head) {
    std::fill_n(state_, size_ * size_, 0.0f);
    for (std::int64_t t = 0; t < scan_.tokens; t += kTokens) {
      rows_ = std::min(kTokens, scan_.tokens - t);
      chunk(head, t);
    }
  }

 private:
  std::int64_t at(std::int64_t head, std::int64_t t) const { return t * scan_.heads + head; }

  void load(const float* rows, std::int64_t head, std::int64_t t, float factor, float* to) const {
    load_rows(isa_, {.from = rows + at(head, t) * size_,
                     .stride = scan_.heads * size_,
                     .rows = rows_,
                     .size = size_,
                     .factor = factor,
                     .to = to,
                     .pitch = size_});
  }
  void numbers(const float* from, std::int64_t head, std::int64_t t, float* to) const {
    for (std::int64_t i = 0; i < rows_; ++i) to[i] = from[at(head, t + i)];
  }

  // Products of decays since the chunk began, their inverses, and those before each token.
  void fold(std::int64_t head, std::int64_t t) {
    if (scan_.g == nullptr) return;
    const std::int64_t pitch = scan_.per_key ? size_ : 1, count = rows_ * pitch;
    scan_.per_key ? load(scan_.g, head, t, 1, log_) : numbers(scan_.g, head, t, log_);
    for (std::int64_t i = pitch; i < count; ++i) log_[i] += log_[i - pitch];
    decay_factors(isa_, count, log_, decay_);
    for (std::int64_t i = 0; i < count; ++i) log_[i] = -log_[i];
    decay_factors(isa_, count, log_, inverse_);
    std::fill_n(before_, pitch, 1.0f);
    std::copy_n(decay_, count - pitch, before_ + pitch);
  }
  void times(const float* factors, float* rows) const {
    if (scan_.g == nullptr) return;
    scan_.per_key ? multiply_rows(isa_, rows_, size_, factors, rows, false, rows)
                  : scale_rows(isa_, rows_, size_, factors, rows);
  }

  // x y^T with zeros where a token would meet itself (`strict`) or a later one, its rows times
  // `factor` or, where this is null, `all`.
  void pairs(const float* x, const float* y, bool strict, const float* factor, float all,
             float* out) const {
    blas_.sgemm(Transpose::kNo, Transpose::kYes, rows_, rows_, size_, x, y, 0, out);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::int64_t kept = strict ? i : i + 1;
      const float by = factor != nullptr ? factor[i] : all;
      for (std::int64_t j = 0; j < kept; ++j) out[i * rows_ + j] *= by;
      std::fill(out + i * rows_ + kept, out + (i + 1) * rows_, 0.0f);
    }
  }
  // y = x S, or y += x S.
  void read(const float* x, float beta, float* y) const {
    blas_.sgemm(Transpose::kNo, Transpose::kNo, rows_, size_, size_, x, state_, beta, y);
  }
  // y += m x for what `pairs` gave.
  void add_pairs(const float* m, const float* x, float* y) const {
    blas_.sgemm(Transpose::kNo, Transpose::kNo, rows_, size_, rows_, m, x, 1, y);
  }
  void write(const float* x, const float* y) const {
    blas_.sgemm(Transpose::kYes, Transpose::kNo, size_, size_, rows_, x, y, 1, state_);
  }

  // u = beta (v - S^T k) of all tokens at once: (I + diag(beta) K K^T) u = diag(beta) (v - K S).
  void erase_along_key(std::int64_t head, std::int64_t t) {
    float beta[kTokens], minus_beta[kTokens];
    numbers(scan_.beta, head, t, beta);
    std::transform(beta, beta + rows_, minus_beta, [](float x) { return -x; });
    load(scan_.k, head, t, -1, e_);
    times(decay_, e_);
    read(e_, 1, u_);
    scale_rows(isa_, rows_, size_, beta, u_);
    pairs(e_, k_, true, minus_beta, 0, system_);
    blas_.solve_unit_lower(rows_, size_, system_, u_);
  }
  // w = S^T a of all tokens at once: (I - A B^T) w = A S + A K^T v.
  void erase_in_general(std::int64_t head, std::int64_t t) {
    load(scan_.a, head, t, 1, e_);
    times(before_, e_);
    load(scan_.b, head, t, 1, b_);
    times(inverse_, b_);
    read(e_, 0, w_);
    pairs(e_, k_, true, nullptr, 1, erase_pairs_);
    add_pairs(erase_pairs_, u_, w_);
    pairs(e_, b_, true, nullptr, -1, system_);
    blas_.solve_unit_lower(rows_, size_, system_, w_);
  }

  void chunk(std::int64_t head, std::int64_t t) {
    fold(head, t);
    load(scan_.q, head, t, scan_.scale, q_);
    times(decay_, q_);
    load(scan_.k, head, t, 1, k_);
    times(inverse_, k_);
    load(scan_.v, head, t, 1, u_);
    if (scan_.beta != nullptr) erase_along_key(head, t);
    if (scan_.a != nullptr) erase_in_general(head, t);
    read(q_, 0, o_);
    pairs(q_, k_, false, nullptr, 1, pairs_);
    add_pairs(pairs_, u_, o_);
    write(k_, u_);
    if (scan_.a != nullptr) {
      pairs(q_, b_, false, nullptr, 1, pairs_);
      add_pairs(pairs_, w_, o_);
      write(b_, w_);
    }
    store_rows(isa_, {.from = o_,
                      .pitch = size_,
                      .rows = rows_,
                      .size = size_,
                      .to = scan_.o + at(head, t) * size_,
                      .stride = scan_.heads * size_});
    if (scan_.g == nullptr) return;
    if (!scan_.per_key) std::fill_n(inverse_, size_, decay_[rows_ - 1]);
    scale_rows(isa_, size_, size_, scan_.per_key ? decay_ + (rows_ - 1) * size_ : inverse_, state_);
  }

  const OpenBlas& blas_;
  Isa isa_;
  const ChunkedScan& scan_;
  std::int64_t size_, rows_ = 0;
  Buffer memory_;
  float *q_, *k_, *e_, *b_, *u_, *w_, *o_, *log_, *decay_, *inverse_, *before_;  // [64, size]
  float *pairs_, *erase_pairs_, *system_;                                        // [64, 64]
  float* state_;
};

}  // namespace

void chunked_scan(const OpenBlas& blas, Isa isa, const ChunkedScan& scan) {
  Chunks chunks(blas, isa, scan);
  for (std::int64_t head = 0; head < scan.heads; ++head) chunks.run(head);
}

Row over_chunked_blas(Row row, const CaseOptions& options, ChunkedScan scan, const Data& o,
                      const std::function<void()>& ours) {
  const OpenBlas* blas = OpenBlas::get();
  if (blas == nullptr) {
    row.variant = "OpenBLAS is not installed: no ratio";
    return row;
  }
  blas->set_threads(1);
  row.variant = "over chunks of 64 by OpenBLAS " + blas->core();
  row.clock = "one call; ratio: the time of the same by OpenBLAS's products over ours";
  const Data theirs = o.like();
  scan.o = theirs.data();
  row = with_ratio(std::move(row), options.runs, ours,
                   [&] { chunked_scan(*blas, options.isa, scan); });
  double difference = 0, square = 0;
  for (std::int64_t i = 0; i < o.size(); ++i) {
    const double x = o.data()[i], y = theirs.data()[i];
    difference += (x - y) * (x - y);
    square += x * x;
  }
  row.error = std::sqrt(difference / square);
  row.bound = 1e-4;
  return row;
}

}  // namespace ouzel::bench
