// Laws that erase, in value lanes: blocks of rows over slabs of 32 values of a state S~ or of its
// gradient G~ (rows_backward.h).
//
//     forward    r_t = S~^T e_t + sum over the block's earlier rows (e_t . k_i) a_i + (e_t . b_i)
//     r_i backward   dv_t = G~^T k_t + sum over its later rows (k_t . q_i) do_i + (k_t . e_i) dr_i
#include "src/kernels/rows_backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_block.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/reset-inl.h"
#include "src/kernels/rows_lanes-inl.h"
#include "src/kernels/two_part-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Columns of a slab that are held at once: two vectors of AVX-512 or AVX2.
constexpr int kVectors = 2;
constexpr std::int64_t kColumns = kVectors * kLanes;

// Columns of a block's rows, in registers.
template <int kRows>
using Values = V[kRows][kVectors];

template <int kRows>
HWY_INLINE void load(D d, const float* from, std::int64_t pitch, Values<kRows>& x) {
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) x[i][j] = hn::Load(d, from + i * pitch + j * kLanes);
  }
}

// y += x a, of a row.
HWY_INLINE void add(D d, float a, const V (&x)[kVectors], V (&y)[kVectors]) {
  const V factor = hn::Set(d, a);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) y[j] = hn::MulAdd(factor, x[j], y[j]);
}

HWY_INLINE void store(D d, const V (&x)[kVectors], float* to) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) hn::Store(x[j], d, to + j * kLanes);
}

// body(key) for keys, whole groups of four.
template <class Body>
HWY_INLINE void for_keys(std::int64_t keys, Body body) {
  for (std::int64_t key = 0; key < keys; key += 4) {
    OUZEL_UNROLL
    for (int i = 0; i < 4; ++i) body(key + i);
  }
}

// y = S~^T x_t for kRows rows of x.
template <int kRows>
HWY_INLINE void read_block(D d, const ErasingArgs& a, const float* x, const float* slab,
                           Values<kRows>& y) {
  const std::int64_t pitch = a.key_pitch;
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) y[i][j] = hn::Zero(d);
  }
  for_keys(a.keys, [&](std::int64_t k) HWY_ATTR {
    const float* from = slab + k * kValueSlab;
    V state[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) state[j] = hn::Load(d, from + j * kLanes);
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const V key = hn::Set(d, x[i * pitch + k]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) y[i][j] = hn::MulAdd(key, state[j], y[i][j]);
    }
  });
}

// Columns of a state, and what they lost to rounding; low null: the sum is plain.
struct Columns {
  float *s, *low;
  Columns at(std::int64_t offset) const {
    return {s + offset, low != nullptr ? low + offset : nullptr};
  }
};

// What a block writes: x_t y_t^T of kRows rows, and x2_t y2_t^T (kTwo).
template <int kRows, bool kTwo>
struct Written {
  const float* x;
  const Values<kRows>& y;
  const float* x2;
  const Values<kRows>& y2;
  std::int64_t pitch;

  // state += that of a key.
  HWY_INLINE void add_to(D d, std::int64_t key, V (&state)[kVectors]) const {
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      add(d, x[i * pitch + key], y[i], state);
      if constexpr (kTwo) add(d, x2[i * pitch + key], y2[i], state);
    }
  }
};

// S~ += what is written, after S~ *= factor of its keys (kScale); where that is 0, 0.
template <int kRows, bool kTwo, bool kScale>
HWY_INLINE void write_rows(D d, std::int64_t keys, const Written<kRows, kTwo> written,
                           const float* factor, float* slab) {
  for_keys(keys, [&](std::int64_t k) HWY_ATTR {
    float* to = slab + k * kValueSlab;
    V state[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      state[j] = hn::Load(d, to + j * kLanes);
      if constexpr (kScale) {
        const V f = hn::Set(d, factor[k]);
        state[j] = hn::IfThenElseZero(is_kept(d, f), hn::Mul(state[j], f));
      }
    }
    written.add_to(d, k, state);
    store(d, state, to);
  });
}

// The same in two parts, what is written summed from zero.
template <int kRows, bool kTwo>
HWY_INLINE void write_two_parts(D d, std::int64_t keys, const Written<kRows, kTwo> written,
                                const float* factor, Columns slab) {
  for (std::int64_t k = 0; k < keys; ++k, slab = slab.at(kValueSlab)) {
    const V f = hn::Set(d, factor != nullptr ? factor[k] : 1.0f);
    V change[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) change[j] = hn::Zero(d);
    written.add_to(d, k, change);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V s = hn::Load(d, slab.s + j * kLanes);
      V low = hn::Load(d, slab.low + j * kLanes);
      hn::Store(two_part_sum(d, s, low, f, hn::Sub(f, hn::Set(d, 1.0f)), change[j]), d,
                slab.s + j * kLanes);
      hn::Store(low, d, slab.low + j * kLanes);
    }
  }
}

template <int kRows, bool kTwo>
HWY_INLINE void write_block(D d, const ErasingArgs& a, const float* x, const Values<kRows>& y,
                            const float* x2, const Values<kRows>& y2, const float* factor,
                            const Columns& slab) {
  const Written<kRows, kTwo> written{x, y, x2, y2, a.key_pitch};
  if (slab.low != nullptr) {
    write_two_parts(d, a.keys, written, factor, slab);
  } else if (factor == nullptr) {
    write_rows<kRows, kTwo, false>(d, a.keys, written, nullptr, slab.s);
  } else {
    write_rows<kRows, kTwo, true>(d, a.keys, written, factor, slab.s);
  }
}

// Columns of S~ times the factors of keys; where one is 0, 0.
void scale_keys(const Folds& folds, const float* factor, std::int64_t keys, std::int64_t columns,
                float* slab) {
  const D d;
  for (std::int64_t key = 0; key < keys; ++key, slab += kValueSlab) {
    const float f = factor[folds.per_key ? key : 0];
    if (f == 1.0f) continue;
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      hn::Store(f == 0.0f ? hn::Zero(d) : hn::Mul(hn::Load(d, slab + c), hn::Set(d, f)), d,
                slab + c);
    }
  }
}

// Columns that are held at once times the factors of values; where one is 0, 0.
void scale_values(const float* factor, std::int64_t keys, float* slab) {
  const D d;
  for (std::int64_t c = 0; c < kColumns; c += kLanes) {
    const V f = hn::Load(d, factor + c);
    const auto kept = is_kept(d, f);
    for (std::int64_t key = 0; key < keys; ++key) {
      float* s = slab + key * kValueSlab + c;
      hn::Store(hn::IfThenElseZero(kept, hn::Mul(hn::Load(d, s), f)), d, s);
    }
  }
}

void decay(const ErasingArgs& a, std::int64_t row, std::int64_t column, const Columns& slab) {
  for (float* part : {slab.s, slab.low}) {
    if (part == nullptr) continue;
    if (const float* factor = a.key_decay(row)) {
      scale_keys(*a.folds, factor, a.keys, kColumns, part);
    }
    if (a.value_decay != nullptr) {
      scale_values(a.value_decay + row * a.value_pitch + column, a.keys, part);
    }
  }
}

// From Lambda = 1 at a chunk's begin to S itself at its end, or into G~ from G at its end.
void leave(const ErasingArgs& a, Columns slab) {
  if (a.folds == nullptr || a.folds->lambda == nullptr) return;
  const Folds& folds = *a.folds;
  const float* lambda = folds.lambda + folds.rows * folds.pitch;
  if (slab.low == nullptr) {
    scale_keys(folds, lambda, a.keys, kValueSlab, slab.s);
    return;
  }
  const D d;
  for (std::int64_t key = 0; key < a.keys; ++key, slab = slab.at(kValueSlab)) {
    const std::int64_t i = folds.per_key ? key : 0;
    const V factor = hn::Set(d, lambda[i]), minus_1 = math::expm1(d, hn::Set(d, folds.total[i]));
    for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
      const V s = hn::Load(d, slab.s + c);
      V low = hn::Load(d, slab.low + c);
      hn::Store(two_part_sum(d, s, low, factor, minus_1, hn::Zero(d)), d, slab.s + c);
      hn::Store(low, d, slab.low + c);
    }
  }
}

// out = v - c * r with a number of c per row or per value.
HWY_INLINE void subtract(D d, const ErasingArgs& a, std::int64_t t, std::int64_t column,
                         const V (&v)[kVectors], const V (&r)[kVectors], V (&out)[kVectors]) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V c = a.c_per_value ? hn::Load(d, a.c + t * a.value_pitch + column + j * kLanes)
                              : hn::Set(d, a.c[t]);
    out[j] = hn::NegMulAdd(c, r[j], v[j]);
  }
}

// dc = -dv * r, and what was written.
template <int kRows>
HWY_INLINE void strengths(D d, const ErasingArgs& a, std::int64_t row, std::int64_t column,
                          const Values<kRows>& dv) {
  V sums[kRowBlock];
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t t = row + i, at = t * a.value_pitch + column;
    V r[kVectors], v[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      r[j] = hn::Load(d, a.r + at + j * kLanes);
      v[j] = hn::Load(d, a.v + at + j * kLanes);
    }
    subtract(d, a, t, column, v, r, v);
    store(d, v, a.written + at);
    sums[i] = hn::Zero(d);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V x = hn::Neg(hn::Mul(dv[i][j], r[j]));
      if (a.c_per_value) hn::Store(x, d, a.dc + at + j * kLanes);
      sums[i] = hn::Add(sums[i], x);
    }
  }
  if (a.c_per_value) return;
  constexpr float kNone[kRowBlock] = {};
  const float* before = column == 0 ? kNone : a.dc + row;
  if constexpr (kRows == kRowBlock) {
    add_lanes(d, sums, before, a.dc + row);
  } else {
    a.dc[row] = *before + hn::GetLane(hn::SumOfLanes(d, sums[0]));
  }
}

// A block's rows, and what it multiplies the state by: see ErasingArgs. One row does so itself.
struct Block {
  const float *q, *k, *e, *b, *factor;  // factor null: 1

  Block(const ErasingArgs& a, std::int64_t row, std::int64_t rows)
      : q(a.q), k(a.k), e(a.e), b(a.b), factor(nullptr) {
    if (rows > 1 && a.key_decay(row) != nullptr) {
      q = a.block_q, k = a.block_k, e = a.block_e, b = a.block_b;
      factor = a.block_factor + row * a.key_pitch;
    }
    for (const float** x : {&q, &k, &e, &b}) {
      if (*x != nullptr) *x += row * a.key_pitch;
    }
  }
};

template <int kRows, bool kGeneral>
HWY_NOINLINE void forward(const ErasingArgs& a, std::int64_t row, std::int64_t column,
                          const Columns& slab) {
  const D d;
  const Block block(a, row, kRows);
  const std::int64_t at = row * a.value_pitch + column;
  if (kRows == 1 && !a.before) decay(a, row, column, slab);
  Values<kRows> r, written;
  read_block<kRows>(d, a, block.e, slab.s, r);
  load<kRows>(d, a.v + at, a.value_pitch, written);
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t t = row + i;
    OUZEL_UNROLL
    for (int j = 0; j < i; ++j) {
      add(d, a.ek[t * kRowBlock + j], written[j], r[i]);
      if constexpr (kGeneral) add(d, a.eb[t * kRowBlock + j], r[j], r[i]);
    }
    if constexpr (!kGeneral) subtract(d, a, t, column, written[i], r[i], written[i]);
    store(d, r[i], a.r + t * a.value_pitch + column);
  }
  if (kRows == 1 && a.before) decay(a, row, column, slab);
  write_block<kRows, kGeneral>(d, a, block.k, written, block.b, r, block.factor, slab);
}

template <int kRows, bool kGeneral>
HWY_NOINLINE void backward(const ErasingArgs& a, std::int64_t row, std::int64_t column,
                           const Columns& slab) {
  const D d;
  const Block block(a, row, kRows);
  const std::int64_t query = a.rows * a.key_pitch, values = a.rows * a.value_pitch;
  const float* output_grad = a.output_grad + row * a.value_pitch + column;
  Values<kRows> dv, dr, upstream;
  read_block<kRows>(d, a, block.k, slab.s, dv);
  if constexpr (kGeneral) read_block<kRows>(d, a, block.b, slab.s, dr);
  // What reaches row i of the block's rows from i on, by the products of their q and e with x_i.
  const auto reach = [&](std::int64_t n) HWY_ATTR {
    load<kRows>(d, output_grad + n * values, a.value_pitch, upstream);
    const std::int64_t first = (n * a.rows + row) * kRowBlock;
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = i; j < kRows; ++j) {
        add(d, a.qk[first + j * kRowBlock + i], upstream[j], dv[i]);
        if constexpr (kGeneral) add(d, a.qb[first + j * kRowBlock + i], upstream[j], dr[i]);
      }
    }
  };
  for (std::int64_t n = a.queries - 1; n > 0; --n) reach(n);
  reach(0);
  OUZEL_UNROLL
  for (int i = kRows - 1; i >= 0; --i) {
    const std::int64_t t = row + i;
    OUZEL_UNROLL
    for (int j = i + 1; j < kRows; ++j) {
      const std::int64_t pair = (row + j) * kRowBlock + i;
      add(d, a.ek[pair], dr[j], dv[i]);
      if constexpr (kGeneral) add(d, a.eb[pair], dr[j], dr[i]);
    }
    if constexpr (!kGeneral) {
      const V zero[kVectors] = {hn::Zero(d), hn::Zero(d)};
      subtract(d, a, t, column, zero, dv[i], dr[i]);
    }
    store(d, dv[i], a.dv + t * a.value_pitch + column);
    store(d, dr[i], a.dr + t * a.value_pitch + column);
  }
  if constexpr (!kGeneral) strengths<kRows>(d, a, row, column, dv);
  if (kRows > 1) {
    write_block<kRows, true>(d, a, block.q, upstream, block.e, dr, block.factor, slab);
  } else {
    write_block<kRows, false>(d, a, block.q, upstream, nullptr, upstream, block.factor, slab);
  }
  for (std::int64_t n = 1; n < a.queries; ++n) {
    load<kRows>(d, output_grad + n * values, a.value_pitch, upstream);
    write_block<kRows, false>(d, a, block.q + n * query, upstream, nullptr, upstream, nullptr,
                              slab);
  }
  if (kRows > 1) return;
  if (a.before) decay(a, row, column, slab);
  write_block<kRows, false>(d, a, block.e, dr, nullptr, dr, nullptr, slab);
  if (!a.before) decay(a, row, column, slab);
}

// x times the decay of a row, of the vector of keys from `key` on.
HWY_INLINE V decayed(D d, const ErasingArgs& a, std::int64_t row, std::int64_t key, V x) {
  return hn::Mul(x, hn::Load(d, a.key_decay(row) + (a.folds->per_key ? key : 0)));
}

// The inner products of the rows x of a block with those of y that stand before them, and with
// their own; with the decays between, that of x's row only if it is `after` that.
template <int kRows>
HWY_INLINE void block_products(const ErasingArgs& a, const float* x, const float* y,
                               std::int64_t begin, bool after, float* out) {
  const D d;
  V sums[kRows][kRowBlock];
  OUZEL_UNROLL
  for (int t = 0; t < kRows; ++t) {
    OUZEL_UNROLL
    for (int i = 0; i < kRowBlock; ++i) sums[t][i] = hn::Zero(d);
  }
  x += begin * a.key_pitch;
  y += begin * a.key_pitch;
  const bool decays = a.key_decay(begin) != nullptr;
  for (std::int64_t key = 0; key < a.keys; key += kLanes) {
    V other[kRows];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) other[i] = hn::Load(d, y + i * a.key_pitch + key);
    OUZEL_UNROLL
    for (int t = 0; t < kRows; ++t) {
      V row = hn::Load(d, x + t * a.key_pitch + key);
      OUZEL_UNROLL
      for (int i = t; i >= 0; --i) {
        if (i < t && decays && (after || i + 1 < t)) row = decayed(d, a, begin + i + 1, key, row);
        sums[t][i] = hn::MulAdd(row, other[i], sums[t][i]);
      }
    }
  }
  constexpr float kNone[kRowBlock] = {};
  OUZEL_UNROLL
  for (int t = 0; t < kRows; ++t) add_lanes(d, sums[t], kNone, out + (begin + t) * kRowBlock);
}

void products(const ErasingArgs& a, const float* x, const float* y, bool after, float* out) {
  for (std::int64_t t = 0, end; t < a.rows; t = end) {
    end = block_end(a.rows, a.four, t);
    end - t == kRowBlock ? block_products<kRowBlock>(a, x, y, t, after, out)
                         : block_products<1>(a, x, y, t, after, out);
  }
}

// Whether q reads a row's state after its decay.
bool reads_after(const ErasingArgs& a) { return !a.before || a.e != nullptr; }

// The rows of a block times its decays: see ErasingArgs.
void decay_block(const ErasingArgs& a, std::int64_t begin, std::int64_t end) {
  const D d;
  const std::int64_t query = a.rows * a.key_pitch;
  for (std::int64_t key = 0; key < a.keys; key += kLanes) {
    const auto scaled = [&](V product, const float* from, float* to, std::int64_t t) HWY_ATTR {
      if (from == nullptr) return;
      const std::int64_t at = t * a.key_pitch + key;
      hn::Store(hn::Mul(product, hn::Load(d, from + at)), d, to + at);
    };
    const auto scaled_queries = [&](V product, std::int64_t t) HWY_ATTR {
      for (std::int64_t n = 0; a.qk != nullptr && n < a.queries; ++n) {
        scaled(product, a.q + n * query, a.block_q + n * query, t);
      }
    };
    V product = hn::Set(d, 1.0f);
    for (std::int64_t t = begin; t < end; ++t) {
      if (!reads_after(a)) scaled_queries(product, t);
      if (a.before) scaled(product, a.e, a.block_e, t);
      product = decayed(d, a, t, key, product);
      if (!a.before) scaled(product, a.e, a.block_e, t);
      if (reads_after(a)) scaled_queries(product, t);
    }
    hn::Store(product, d, a.block_factor + begin * a.key_pitch + key);
    product = hn::Set(d, 1.0f);
    for (std::int64_t t = end - 1; t >= begin; --t) {
      scaled(product, a.k, a.block_k, t);
      scaled(product, a.b, a.block_b, t);
      product = decayed(d, a, t, key, product);
    }
  }
}

}  // namespace

void BlockProducts(const ErasingArgs& a) {
  const std::int64_t query = a.rows * a.key_pitch;
  if (a.four && a.key_decay(0) != nullptr) {
    for (std::int64_t t = 0, end; t < a.rows; t = end) {
      end = block_end(a.rows, a.four, t);
      decay_block(a, t, end);
    }
  }
  if (a.e != nullptr && !a.erase_products_stand) {
    products(a, a.e, a.k, !a.before, a.ek);
    if (a.b != nullptr) products(a, a.e, a.b, !a.before, a.eb);
  }
  if (a.qk == nullptr) return;
  for (std::int64_t n = 0; n < a.queries; ++n) {
    products(a, a.q + n * query, a.k, reads_after(a), a.qk + n * a.rows * kRowBlock);
    if (a.b != nullptr) products(a, a.q + n * query, a.b, true, a.qb + n * a.rows * kRowBlock);
  }
}

template <bool kGeneral>
void forward_slabs(const ErasingArgs& a) {
  for (std::int64_t value = 0; value < a.values; value += kValueSlab) {
    const Columns slab = Columns{a.state, a.low}.at(value * a.keys);
    for (std::int64_t t = 0, end; t < a.rows; t = end) {
      end = block_end(a.rows, a.four, t);
      for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
        end - t == kRowBlock ? forward<kRowBlock, kGeneral>(a, t, value + c, slab.at(c))
                             : forward<1, kGeneral>(a, t, value + c, slab.at(c));
      }
    }
    leave(a, slab);
  }
}

template <bool kGeneral>
void backward_slabs(const ErasingArgs& a) {
  for (std::int64_t value = 0; value < a.values; value += kValueSlab) {
    const Columns slab = Columns{a.state, a.low}.at(value * a.keys);
    leave(a, slab);
    for (std::int64_t t = a.rows, begin; t > 0; t = begin) {
      begin = block_begin(a.rows, a.four, t);
      for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
        t - begin == kRowBlock ? backward<kRowBlock, kGeneral>(a, begin, value + c, slab.at(c))
                               : backward<1, kGeneral>(a, begin, value + c, slab.at(c));
      }
    }
  }
}

void BlockForward(const ErasingArgs& a) {
  a.b == nullptr ? forward_slabs<false>(a) : forward_slabs<true>(a);
}

void BlockBackward(const ErasingArgs& a) {
  a.b == nullptr ? backward_slabs<false>(a) : backward_slabs<true>(a);
}

void TransposeSlabs(std::int64_t keys, std::int64_t values, const float* slabs, float* transposed) {
  for (std::int64_t value = 0; value < values; value += 4) {
    const float* slab = slabs + value / kValueSlab * keys * kValueSlab + value % kValueSlab;
    float* to = transposed + value * keys;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
    const hn::CappedTag<float, 4> d4;
    const hn::Repartition<double, decltype(d4)> d64;
    for (std::int64_t key = 0; key < keys; key += 4) {
      const auto at = [&](std::int64_t i)
                          HWY_ATTR { return hn::LoadU(d4, slab + (key + i) * kValueSlab); };
      const auto a = at(0), b = at(1), c = at(2), e = at(3);
      const auto ab = hn::BitCast(d64, hn::InterleaveLower(d4, a, b));
      const auto ce = hn::BitCast(d64, hn::InterleaveLower(d4, c, e));
      hn::Store(hn::BitCast(d4, hn::InterleaveLower(d64, ab, ce)), d4, to + key);
      hn::Store(hn::BitCast(d4, hn::InterleaveUpper(d64, ab, ce)), d4, to + keys + key);
      const auto ab2 = hn::BitCast(d64, hn::InterleaveUpper(d4, a, b));
      const auto ce2 = hn::BitCast(d64, hn::InterleaveUpper(d4, c, e));
      hn::Store(hn::BitCast(d4, hn::InterleaveLower(d64, ab2, ce2)), d4, to + 2 * keys + key);
      hn::Store(hn::BitCast(d4, hn::InterleaveUpper(d64, ab2, ce2)), d4, to + 3 * keys + key);
    }
#else
    for (std::int64_t i = 0; i < 4; ++i) {
      for (std::int64_t key = 0; key < keys; ++key) to[i * keys + key] = slab[key * kValueSlab + i];
    }
#endif
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(BlockProducts);
HWY_EXPORT(BlockForward);
HWY_EXPORT(BlockBackward);
HWY_EXPORT(TransposeSlabs);
void block_products(Isa isa, const ErasingArgs& args) { OUZEL_DISPATCH(isa, BlockProducts)(args); }
void block_forward(Isa isa, const ErasingArgs& args) { OUZEL_DISPATCH(isa, BlockForward)(args); }
void block_backward(Isa isa, const ErasingArgs& args) { OUZEL_DISPATCH(isa, BlockBackward)(args); }
void transpose_slabs(Isa isa, std::int64_t keys, std::int64_t values, const float* slabs,
                     float* transposed) {
  OUZEL_DISPATCH(isa, TransposeSlabs)(keys, values, slabs, transposed);
}
}  // namespace ouzel
#endif
