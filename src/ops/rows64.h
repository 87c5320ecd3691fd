// What operators in float64 share: rows to and from other floats, work space, heads that share
// keys, and the states of a sequence in reverse.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/kernels/dense64.h"
#include "src/ops/arguments.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {

// n numbers of a float32 row, zeros where it is null; and back, where it is wanted.
inline void read(const float* row, std::int64_t n, double* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = row == nullptr ? 0 : static_cast<double>(row[i]);
}
inline void write(const double* from, std::int64_t n, float* row) {
  for (std::int64_t i = 0; i < n && row != nullptr; ++i) row[i] = static_cast<float>(from[i]);
}
// The same of floats of any type.
void read(const AnyRows<const void>& row, std::int64_t n, double* to);
void write(const double* from, std::int64_t n, const AnyRows<void>& row);
// The address of a row, or null where the view has no data.
template <class T, int Rank, class... Index>
T* row_at(const View<T, Rank>& view, Index... index) {
  return view.data == nullptr ? nullptr : view(index...);
}
template <class Void, int Rank, class... Index>
AnyRows<Void> row_at(const AnyView<Void, Rank>& view, Index... index) {
  return view.data == nullptr ? AnyRows<Void>() : view(index...);
}
// A matrix [rows, columns] that stands at these indices of a view, its rows contiguous.
template <class T, int Rank, class... Index>
void read_matrix(const View<T, Rank>& view, const Matrix64& to, Index... index) {
  for (std::int64_t r = 0; r < to.rows; ++r) {
    check_cancelled_at(r);
    read(row_at(view, index..., r), to.columns, to.data + r * to.columns);
  }
}
template <int Rank, class... Index>
void write_matrix(const Matrix64& from, const View<float, Rank>& view, Index... index) {
  for (std::int64_t r = 0; r < from.rows; ++r) {
    write(from.data + r * from.columns, from.columns, row_at(view, index..., r));
  }
}

// A state [H, K, V] and its normaliser z [H, K], as one matrix [K, V + 1] of head h.
inline void read_with_z(const View<const float, 4>& s, const View<const float, 3>& z,
                        std::int64_t n, std::int64_t h, const Matrix64& to) {
  for (std::int64_t r = 0; r < to.rows; ++r) {
    double* row = to.data + r * to.columns;
    read(row_at(s, n, h, r), to.columns - 1, row);
    read(row_at(z, n, h, r), 1, row + to.columns - 1);
  }
}
inline void write_with_z(const Matrix64& from, const View<float, 4>& s, const View<float, 3>& z,
                         std::int64_t n, std::int64_t h) {
  for (std::int64_t r = 0; r < from.rows; ++r) {
    const double* row = from.data + r * from.columns;
    write(row, from.columns - 1, row_at(s, n, h, r));
    write(row + from.columns - 1, 1, row_at(z, n, h, r));
  }
}

// The factor of a log decay, which is 0 where rounding took it above; NaN stays.
inline double decay_of(double g) { return std::exp(std::min(g, 0.0)); }

inline void clear(double* x, std::int64_t n) { std::fill(x, x + n, 0.0); }
inline void copy(const double* from, std::int64_t n, double* to) { std::copy(from, from + n, to); }
// x := softmax(x)
inline void softmax64(double* x, std::int64_t n) {
  double top = x[0], sum = 0;
  for (std::int64_t i = 1; i < n; ++i) top = std::max(top, x[i]);
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - top);
  for (std::int64_t i = 0; i < n; ++i) x[i] /= sum;
}

// How many heads of `many` share one of `few`; refuses counts that do not divide.
std::int64_t group_of(const char* op, const char* many_name, std::int64_t many,
                      const char* few_name, std::int64_t few);

// Makes room for one Work(memory, sizes...) a task.
template <class Work, class... Sizes>
void reserve_for(Context& context, const Sizes&... sizes) {
  ScratchCounter counter;
  Work work(counter, sizes...);
  context.impl().reserve(counter.bytes());
}

// A task for each of `heads` heads of every sequence n of a call: body(n, head, sequence, work).
template <class Work, class Call, class Body>
void each_head(Context& context, const Call& call, std::int64_t heads, const Body& body) {
  reserve_for<Work>(context, call.sizes);
  context.impl().run(call.sequences.count() * heads, [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t n = task / heads;
    Work work(scratch, call.sizes);
    body(n, task % heads, call.sequences[n], work);
  });
}

// The states of a sequence, read backwards: kept at the begins of blocks, recomputed within them.
// advance(t, state) takes the state before token t to that after it.
class StateHistory {
 public:
  template <class Memory>
  StateHistory(Memory& memory, std::int64_t size, std::int64_t tokens)
      : size_(size),
        kept_(memory.template take<double>(size * ((tokens + kBlock - 1) / kBlock))),
        states_(memory.template take<double>(size * (kBlock + 1))) {}

  // All tokens, from the initial state to the final one.
  template <class Advance>
  void run(double* state, std::int64_t tokens, const Advance& advance) {
    tokens_ = tokens;
    block_ = -1;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (t % kBlock == 0) copy(state, size_, kept_ + t / kBlock * size_);
      advance(t, state);
    }
  }
  // The state before token t; that after it stands `size` behind. The same advance as in run().
  template <class Advance>
  double* before(std::int64_t t, const Advance& advance) {
    const std::int64_t block = t / kBlock, first = block * kBlock;
    if (block != block_) {
      block_ = block;
      copy(kept_ + block * size_, size_, states_);
      for (std::int64_t i = 0; i < std::min(kBlock, tokens_ - first); ++i) {
        copy(states_ + i * size_, size_, states_ + (i + 1) * size_);
        advance(first + i, states_ + (i + 1) * size_);
      }
    }
    return states_ + (t - first) * size_;
  }

 private:
  static constexpr std::int64_t kBlock = 16;
  std::int64_t size_, tokens_ = 0, block_ = -1;
  double *kept_, *states_;
};

}  // namespace ouzel
