#include "bench/chunked_blas.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ouzel/tensor.h"
#include "src/kernels/law_rows.h"
#include "src/kernels/recurrence_block.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = 64;  // of a chunk: with 32 it takes as long, with 128 longer

// One head's chunks. Rows of a chunk are called by capitals: Q and E have the product of decays
// since the chunk began, K and B are divided by it, so that
//
//     U = v, or (I + diag(beta) tril(E K^T, -1))^-1 diag(beta) (v - E S)    W = S^T a
//     o = Q S + tril(Q K^T) U + tril(Q B^T) W    S' = P (S + K^T U + B^T W)
class Chunks {
 public:
  Chunks(const OpenBlas& blas, Isa isa, const ChunkedScan& scan)
      : blas_(blas),
        isa_(isa),
        scan_(scan),
        size_(scan.size),
        collinear_(scan.beta != nullptr),
        general_(scan.a != nullptr),
        memory_(static_cast<std::size_t>((kRows * kTokens + 2 * size_ + 1) * size_ +
                                         kSquares * kTokens * kTokens) *
                sizeof(float)) {
    float* next = memory_.f32();
    const auto take = [&next](std::int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    for (float** rows : {&q_,      &k_,   &e_,  &b_,  &u_,  &w_,  &o_,  &log_, &decay_,  &inverse_,
                         &before_, &d_o_, &dq_, &dk_, &de_, &db_, &du_, &dw_,  &gained_, &lost_}) {
      *rows = take(kTokens * size_);
    }
    for (float** square : {&pairs_, &other_pairs_, &erase_pairs_, &system_, &d_pairs_}) {
      *square = take(kTokens * kTokens);
    }
    d_state_ = take(size_ * size_);
    after_ = take(size_ * size_);
    gate_ = take(size_);
  }

  void forward(std::int64_t head, float* o, float* states) {
    for (std::int64_t t = 0; t < scan_.tokens; t += kTokens) {
      if (t == 0) std::fill_n(states + state_at(head, t), size_ * size_, 0.0f);
      state_ = states + state_at(head, t);
      rows_ = std::min(kTokens, scan_.tokens - t);
      prepare(head, t);
      read(q_, 0, o_);
      add_pairs(pairs_, u_, o_);
      if (general_) add_pairs(other_pairs_, w_, o_);
      store(o_, 1, head, t, o);
      if (t + kTokens >= scan_.tokens) return;
      float* after = states + state_at(head, t + kTokens);
      std::copy_n(state_, size_ * size_, after);
      write(k_, u_, after);
      if (general_) write(b_, w_, after);
      decay_state(after);
    }
  }

  void backward(std::int64_t head, const float* states, const float* d_o,
                const ChunkedGradients& to) {
    std::fill_n(d_state_, size_ * size_, 0.0f);
    for (std::int64_t t = (scan_.tokens - 1) / kTokens * kTokens; t >= 0; t -= kTokens) {
      state_ = states + state_at(head, t);
      rows_ = std::min(kTokens, scan_.tokens - t);
      prepare(head, t);
      load(d_o, head, t, 1, d_o_);
      chunk_backward(head, t, to);
    }
  }

 private:
  static constexpr std::int64_t kRows = 20, kSquares = 5;

  std::int64_t at(std::int64_t head, std::int64_t t) const { return t * scan_.heads + head; }
  std::int64_t state_at(std::int64_t head, std::int64_t t) const {
    const std::int64_t chunks = (scan_.tokens + kTokens - 1) / kTokens;
    return (head * chunks + t / kTokens) * size_ * size_;
  }

  void load(const float* rows, std::int64_t head, std::int64_t t, float factor, float* to) const {
    load_rows(isa_, {.from = rows + at(head, t) * size_,
                     .stride = scan_.heads * size_,
                     .rows = rows_,
                     .size = size_,
                     .factor = factor,
                     .to = to,
                     .pitch = size_});
  }
  void store(const float* rows, float factor, std::int64_t head, std::int64_t t, float* to) const {
    store_rows(isa_, {.from = rows,
                      .pitch = size_,
                      .rows = rows_,
                      .size = size_,
                      .factor = factor,
                      .to = to + at(head, t) * size_,
                      .stride = scan_.heads * size_});
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
  void decay_state(float* state) const {
    if (scan_.g == nullptr) return;
    if (scan_.per_key) return scale_rows(isa_, size_, size_, last_decay(), state);
    for (std::int64_t i = 0; i < size_; ++i)
      scale_rows(isa_, 1, size_, last_decay(), state + i * size_);
  }
  const float* last_decay() const { return decay_ + (rows_ - 1) * (scan_.per_key ? size_ : 1); }

  void product(Transpose tx, const float* x, Transpose ty, const float* y, std::int64_t m,
               std::int64_t n, std::int64_t k, float beta, float* out) const {
    blas_.sgemm(tx, ty, m, n, k, x, y, beta, out);
  }
  // x y^T with zeros where a token would meet itself (`strict`) or a later one, its rows times
  // `factor` or, where this is null, `all`.
  void pairs(const float* x, const float* y, bool strict, const float* factor, float all,
             float* out) const {
    product(Transpose::kNo, x, Transpose::kYes, y, rows_, rows_, size_, 0, out);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::int64_t kept = strict ? i : i + 1;
      const float by = factor != nullptr ? factor[i] : all;
      for (std::int64_t j = 0; j < kept; ++j) out[i * rows_ + j] *= by;
      std::fill(out + i * rows_ + kept, out + (i + 1) * rows_, 0.0f);
    }
  }
  // y += m x, and y += m^T x, for what `pairs` gave.
  void add_pairs(const float* m, const float* x, float* y) const {
    product(Transpose::kNo, m, Transpose::kNo, x, rows_, size_, rows_, 1, y);
  }
  void add_pairs_turned(const float* m, const float* x, float* y) const {
    product(Transpose::kYes, m, Transpose::kNo, x, rows_, size_, rows_, 1, y);
  }
  // y = x S + beta y; y = x S^T; S += x^T y.
  void read(const float* x, float beta, float* y) const {
    product(Transpose::kNo, x, Transpose::kNo, state_, rows_, size_, size_, beta, y);
  }
  void read_turned(const float* x, const float* state, float* y) const {
    product(Transpose::kNo, x, Transpose::kYes, state, rows_, size_, size_, 0, y);
  }
  void write(const float* x, const float* y, float* state) const {
    product(Transpose::kYes, x, Transpose::kNo, y, size_, size_, rows_, 1, state);
  }

  // E is minus the rows of k here, and `system_` I + diag(beta) tril(k K^T, -1).
  void erase_along_key(std::int64_t head, std::int64_t t) {
    numbers(scan_.beta, head, t, beta_);
    std::transform(beta_, beta_ + rows_, minus_beta_, [](float x) { return -x; });
    load(scan_.k, head, t, -1, e_);
    times(decay_, e_);
    read(e_, 1, u_);
    scale_rows(isa_, rows_, size_, beta_, u_);
    pairs(e_, k_, true, minus_beta_, 0, system_);
    blas_.solve_unit_lower(Transpose::kNo, rows_, size_, system_, u_);
  }
  // (I - tril(E B^T, -1)) W = E S + tril(E K^T, -1) v
  void erase_in_general(std::int64_t head, std::int64_t t) {
    load(scan_.a, head, t, 1, e_);
    times(before_, e_);
    load(scan_.b, head, t, 1, b_);
    times(inverse_, b_);
    read(e_, 0, w_);
    pairs(e_, k_, true, nullptr, 1, erase_pairs_);
    add_pairs(erase_pairs_, u_, w_);
    pairs(e_, b_, true, nullptr, -1, system_);
    blas_.solve_unit_lower(Transpose::kNo, rows_, size_, system_, w_);
    pairs(q_, b_, false, nullptr, 1, other_pairs_);
  }
  void prepare(std::int64_t head, std::int64_t t) {
    fold(head, t);
    load(scan_.q, head, t, scan_.scale, q_);
    times(decay_, q_);
    load(scan_.k, head, t, 1, k_);
    times(inverse_, k_);
    load(scan_.v, head, t, 1, u_);
    if (collinear_) erase_along_key(head, t);
    if (general_) erase_in_general(head, t);
    pairs(q_, k_, false, nullptr, 1, pairs_);
  }

  // From the gradient of the state after the chunk to that of the state before it.
  void chunk_backward(std::int64_t head, std::int64_t t, const ChunkedGradients& to) {
    decay_state(d_state_);
    if (scan_.g != nullptr) gate_of_state();
    product(Transpose::kNo, k_, Transpose::kNo, d_state_, rows_, size_, size_, 0, du_);
    add_pairs_turned(pairs_, d_o_, du_);
    read_turned(u_, d_state_, dk_);
    read_turned(d_o_, state_, dq_);
    pairs(d_o_, u_, false, nullptr, 1, d_pairs_);
    add_pairs(d_pairs_, k_, dq_);
    add_pairs_turned(d_pairs_, q_, dk_);
    if (general_) general_backward();
    if (collinear_) collinear_backward(head, t, to.beta);
    write(q_, d_o_, d_state_);
    if (general_) write(e_, dw_, d_state_);
    if (collinear_) write(e_, du_, d_state_);
    if (scan_.g != nullptr) gates(head, t, to.g);
    times(decay_, dq_);
    store(dq_, scan_.scale, head, t, to.q);
    times(inverse_, dk_);
    store(du_, 1, head, t, to.v);
    if (collinear_) {
      times(decay_, de_);
      for (std::int64_t i = 0; i < rows_ * size_; ++i) dk_[i] -= de_[i];
    }
    store(dk_, 1, head, t, to.k);
    if (!general_) return;
    times(before_, de_);
    times(inverse_, db_);
    store(de_, 1, head, t, to.a);
    store(db_, 1, head, t, to.b);
  }
  void general_backward() {
    product(Transpose::kNo, b_, Transpose::kNo, d_state_, rows_, size_, size_, 0, dw_);
    add_pairs_turned(other_pairs_, d_o_, dw_);
    blas_.solve_unit_lower(Transpose::kYes, rows_, size_, system_, dw_);
    read_turned(w_, d_state_, db_);
    pairs(d_o_, w_, false, nullptr, 1, d_pairs_);
    add_pairs(d_pairs_, b_, dq_);
    add_pairs_turned(d_pairs_, q_, db_);
    read_turned(dw_, state_, de_);
    pairs(dw_, w_, true, nullptr, 1, d_pairs_);
    add_pairs(d_pairs_, b_, de_);
    add_pairs_turned(d_pairs_, e_, db_);
    pairs(dw_, u_, true, nullptr, 1, d_pairs_);
    add_pairs(d_pairs_, k_, de_);
    add_pairs_turned(d_pairs_, e_, dk_);
    add_pairs_turned(erase_pairs_, dw_, du_);
  }
  // `du_` becomes the gradient of v.
  void collinear_backward(std::int64_t head, std::int64_t t, float* d_beta) {
    blas_.solve_unit_lower(Transpose::kYes, rows_, size_, system_, du_);
    // u is beta times what does not depend on it.
    float dots[kTokens];
    row_dots(isa_, rows_, size_, size_, du_, u_, dots);
    for (std::int64_t i = 0; i < rows_; ++i) d_beta[at(head, t + i)] = dots[i] / beta_[i];
    scale_rows(isa_, rows_, size_, beta_, du_);
    read_turned(du_, state_, de_);
    pairs(du_, u_, true, nullptr, 1, d_pairs_);
    add_pairs(d_pairs_, k_, de_);
    add_pairs_turned(d_pairs_, e_, dk_);
  }

  // What the state after the chunk, P (S + ...), gives to all log decays; `d_state_` has the P.
  void gate_of_state() {
    std::copy_n(state_, size_ * size_, after_);
    write(k_, u_, after_);
    if (general_) write(b_, w_, after_);
    row_dots(isa_, size_, size_, size_, after_, d_state_, gate_);
  }
  // A log decay has a part in all rows from its own on: sums from the last row up.
  void gates(std::int64_t head, std::int64_t t, float* dg) {
    multiply_rows(isa_, rows_, size_, q_, dq_, false, gained_);
    if (collinear_) multiply_rows(isa_, rows_, size_, e_, de_, true, gained_);
    // Row i of a general erase has the decays before its own.
    if (general_) multiply_rows(isa_, rows_ - 1, size_, e_ + size_, de_ + size_, true, gained_);
    multiply_rows(isa_, rows_, size_, k_, dk_, false, lost_);
    if (general_) multiply_rows(isa_, rows_, size_, b_, db_, true, lost_);
    for (std::int64_t i = rows_ - 1; i >= 0; --i) {
      float* row = gained_ + i * size_;
      float sum = 0;
      for (std::int64_t c = 0; c < size_; ++c) {
        gate_[c] += row[c] - lost_[i * size_ + c];
        row[c] = gate_[c];
        sum += gate_[c];
      }
      if (!scan_.per_key) dg[at(head, t + i)] = sum;
    }
    if (scan_.per_key) store(gained_, 1, head, t, dg);
  }

  const OpenBlas& blas_;
  Isa isa_;
  const ChunkedScan& scan_;
  std::int64_t size_, rows_ = 0;
  bool collinear_, general_;
  Buffer memory_;
  float *q_, *k_, *e_, *b_, *u_, *w_, *o_, *log_, *decay_, *inverse_, *before_;  // [64, size]
  float *d_o_, *dq_, *dk_, *de_, *db_, *du_, *dw_, *gained_, *lost_;
  float *pairs_, *other_pairs_, *erase_pairs_, *system_, *d_pairs_;  // [64, 64]
  float *d_state_, *after_, *gate_;
  const float* state_ = nullptr;  // before the chunk
  float beta_[kTokens], minus_beta_[kTokens];
};

}  // namespace

std::int64_t chunked_states(const ChunkedScan& scan) {
  return scan.heads * ((scan.tokens + kTokens - 1) / kTokens) * scan.size * scan.size;
}

void chunked_scan(const OpenBlas& blas, Isa isa, const ChunkedScan& scan, float* o, float* states) {
  Chunks chunks(blas, isa, scan);
  for (std::int64_t head = 0; head < scan.heads; ++head) chunks.forward(head, o, states);
}

void chunked_backward(const OpenBlas& blas, Isa isa, const ChunkedScan& scan, const float* states,
                      const float* d_o, const ChunkedGradients& to) {
  Chunks chunks(blas, isa, scan);
  for (std::int64_t head = 0; head < scan.heads; ++head) chunks.backward(head, states, d_o, to);
}

Row over_blas(Row row, const CaseOptions& options, const std::function<void()>& ours,
              const std::function<void(const OpenBlas&)>& theirs,
              const std::vector<ComparedArrays>& compared) {
  const OpenBlas* blas = OpenBlas::get();
  if (blas == nullptr) {
    row.variant = "OpenBLAS is not installed: no ratio";
    return row;
  }
  blas->set_threads(1);
  row.variant = "over chunks of 64 by OpenBLAS " + blas->core();
  row.clock = "one call; ratio: the time of the same by OpenBLAS's products over ours";
  row = with_ratio(std::move(row), options.runs, ours, [&] { theirs(*blas); });
  row.error = 0;
  row.bound = 1e-4;
  for (const ComparedArrays& arrays : compared) {
    double difference = 0, square = 0;
    for (std::int64_t i = 0; i < arrays.ours->size(); ++i) {
      const double x = arrays.ours->data()[i], y = arrays.theirs->data()[i];
      difference += (x - y) * (x - y);
      square += x * x;
    }
    const double error = std::sqrt(difference / square);
    if (!(error <= *row.error)) row.error = error;
  }
  return row;
}

}  // namespace ouzel::bench
