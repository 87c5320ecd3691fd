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
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_MIN(HWY_LANES(float), 16);
// Columns of a slab that are held at once: two vectors of AVX-512 or AVX2.
constexpr int kVectors = 2;
constexpr std::int64_t kColumns = kVectors * kLanes;

// Values of a block's rows, [4][32].
using Values = float[kRowBlock][kValueSlab];

// y (+)= S~^T x_t for kRows rows of x.
template <int kRows>
void read_block(const ErasingArgs& a, const float* x, std::int64_t row, const float* slab,
                Values& y) {
  const D d;
  const std::int64_t pitch = a.key_pitch;
  for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
    V sum[kRows][kVectors];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
    }
    const float* keys = x + row * pitch;
    const float* s = slab + c;
    for (std::int64_t k = 0; k < a.keys; ++k, s += kValueSlab) {
      V state[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) state[j] = hn::Load(d, s + j * kLanes);
      OUZEL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const V key = hn::Set(d, keys[i * pitch + k]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(key, state[j], sum[i][j]);
      }
    }
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) hn::Store(sum[i][j], d, y[i] + c + j * kLanes);
    }
  }
}

// S~ += sum of x_t y_t^T over kRows rows, after S~ *= factor of its keys (kScale); where that is 0,
// 0.
template <int kRows, bool kScale>
void write_block(const ErasingArgs& a, const float* x, std::int64_t row, const float* y,
                 std::int64_t y_pitch, const float* factor, float* slab) {
  const D d;
  const std::int64_t pitch = a.key_pitch;
  for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
    V value[kRows][kVectors];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j)
        value[i][j] = hn::Load(d, y + i * y_pitch + c + j * kLanes);
    }
    const float* keys = x + row * pitch;
    float* s = slab + c;
    for (std::int64_t k = 0; k < a.keys; ++k, s += kValueSlab) {
      V state[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        state[j] = hn::Load(d, s + j * kLanes);
        if constexpr (kScale) {
          const V f = hn::Set(d, factor[k]);
          state[j] = hn::IfThenElseZero(hn::Ne(f, hn::Zero(d)), hn::Mul(state[j], f));
        }
      }
      OUZEL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const V key = hn::Set(d, keys[i * pitch + k]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) state[j] = hn::MulAdd(key, value[i][j], state[j]);
      }
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) hn::Store(state[j], d, s + j * kLanes);
    }
  }
}

// S~ times the factors of keys; where one is 0, 0.
void scale_keys(const Folds& folds, const float* factor, std::int64_t keys, float* slab) {
  const D d;
  for (std::int64_t key = 0; key < keys; ++key, slab += kValueSlab) {
    const float f = factor[folds.per_key ? key : 0];
    if (f == 1.0f) continue;
    for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
      hn::Store(f == 0.0f ? hn::Zero(d) : hn::Mul(hn::Load(d, slab + c), hn::Set(d, f)), d,
                slab + c);
    }
  }
}

// S~ times the factors of values; where one is 0, 0.
void scale_values(const float* factor, std::int64_t keys, float* slab) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
    const V f = hn::Load(d, factor + c);
    const auto kept = hn::Ne(f, hn::Zero(d));
    for (std::int64_t key = 0; key < keys; ++key) {
      float* s = slab + key * kValueSlab + c;
      hn::Store(hn::IfThenElseZero(kept, hn::Mul(hn::Load(d, s), f)), d, s);
    }
  }
}

void decay(const ErasingArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  if (a.folds != nullptr && a.folds->fold[row]) {
    scale_keys(*a.folds, a.folds->factor + row * a.folds->pitch, a.keys, slab);
  }
  if (a.value_decay != nullptr) {
    scale_values(a.value_decay + row * a.value_pitch + column, a.keys, slab);
  }
}

// From Lambda = 1 at a chunk's begin to S itself at its end, or into G~ from G at its end.
void leave(const ErasingArgs& a, float* slab) {
  if (a.folds == nullptr) return;
  scale_keys(*a.folds, a.folds->lambda + a.folds->rows * a.folds->pitch, a.keys, slab);
}

// y += x a.
HWY_INLINE void add(float a, const float* x, float* y) {
  const D d;
  const V factor = hn::Set(d, a);
  for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
    hn::Store(hn::MulAdd(factor, hn::Load(d, x + c), hn::Load(d, y + c)), d, y + c);
  }
}

// out = v - c * r with a number of c per row or per value; v null: 0.
HWY_INLINE void subtract(const ErasingArgs& a, std::int64_t t, std::int64_t column, const float* v,
                         const float* r, float* out) {
  const D d;
  for (std::int64_t j = 0; j < kValueSlab; j += kLanes) {
    const V c =
        a.c_per_value ? hn::Load(d, a.c + t * a.value_pitch + column + j) : hn::Set(d, a.c[t]);
    const V x = v == nullptr ? hn::Zero(d) : hn::Load(d, v + j);
    hn::Store(hn::NegMulAdd(c, hn::Load(d, r + j), x), d, out + j);
  }
}

HWY_INLINE void copy(const float* x, float* y) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kLanes) hn::Store(hn::Load(d, x + c), d, y + c);
}

// dc = -dv * r, and what was written.
HWY_INLINE void strengths(const ErasingArgs& a, std::int64_t t, std::int64_t column,
                          const float* dv) {
  const D d;
  const float* r = a.r + t * a.value_pitch + column;
  subtract(a, t, column, a.v + t * a.value_pitch + column, r,
           a.written + t * a.value_pitch + column);
  V sum = hn::Zero(d);
  for (std::int64_t j = 0; j < kValueSlab; j += kLanes) {
    const V x = hn::Mul(hn::Load(d, dv + j), hn::Load(d, r + j));
    if (a.c_per_value) hn::Store(hn::Neg(x), d, a.dc + t * a.value_pitch + column + j);
    sum = hn::Add(sum, x);
  }
  if (a.c_per_value) return;
  a.dc[t] = (column == 0 ? 0.0f : a.dc[t]) - hn::GetLane(hn::SumOfLanes(d, sum));
}

// A block: rows as they stand before its first one, and what it does to the state. With folds
// within, reads are multiplied by the folds since its begin and writes by those to its end.
struct Block {
  std::int64_t row;
  const float *q, *k, *e, *b, *factor;  // factor null: 1

  Block(const ErasingArgs& a, std::int64_t first)
      : row(first), q(a.q), k(a.k), e(a.e), b(a.b), factor(nullptr) {
    if (!a.folded[first]) return;
    q = a.block_q, k = a.block_k, e = a.block_e, b = a.block_b;
    factor = a.block_factor + first * a.key_pitch;
  }
};

template <int kRows>
HWY_INLINE void write(const ErasingArgs& a, const float* x, std::int64_t row, const float* y,
                      std::int64_t y_pitch, const float* factor, float* slab) {
  factor == nullptr ? write_block<kRows, false>(a, x, row, y, y_pitch, nullptr, slab)
                    : write_block<kRows, true>(a, x, row, y, y_pitch, factor, slab);
}

template <int kRows>
void forward(const ErasingArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  HWY_ALIGN Values r, written;
  const Block block(a, row);
  if (kRows == 1 && !a.before) decay(a, row, column, slab);
  read_block<kRows>(a, block.e, row, slab, r);
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t t = row + i;
    for (int j = 0; j < i; ++j) {
      add(a.ek[t * kRowBlock + j], written[j], r[i]);
      if (a.b != nullptr) add(a.eb[t * kRowBlock + j], r[j], r[i]);
    }
    const float* v = a.v + t * a.value_pitch + column;
    a.b == nullptr ? subtract(a, t, column, v, r[i], written[i]) : copy(v, written[i]);
    copy(r[i], a.r + t * a.value_pitch + column);
  }
  if (kRows == 1 && a.before) decay(a, row, column, slab);
  write<kRows>(a, block.k, row, written[0], kValueSlab, block.factor, slab);
  if (a.b != nullptr) write<kRows>(a, block.b, row, r[0], kValueSlab, nullptr, slab);
}

template <int kRows>
void backward(const ErasingArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  HWY_ALIGN Values dv, dr;
  const Block block(a, row);
  const std::int64_t query = a.rows * a.key_pitch, values = a.rows * a.value_pitch;
  // What reaches row i of the block's rows from i on, by the products of their q and e with x_i.
  const auto later = [&](int i, const float* qx, const float* ex, Values& y) HWY_ATTR {
    for (int j = i; j < kRows; ++j) {
      const std::int64_t t = row + j;
      for (std::int64_t n = 0; n < a.queries; ++n) {
        add(qx[(n * a.rows + t) * kRowBlock + i],
            a.output_grad + n * values + t * a.value_pitch + column, y[i]);
      }
      if (j > i) add(ex[t * kRowBlock + i], dr[j], y[i]);
    }
  };
  read_block<kRows>(a, block.k, row, slab, dv);
  if (a.b != nullptr) read_block<kRows>(a, block.b, row, slab, dr);
  for (int i = kRows - 1; i >= 0; --i) {
    const std::int64_t t = row + i;
    later(i, a.qk, a.ek, dv);
    if (a.b != nullptr) {
      later(i, a.qb, a.eb, dr);
    } else {
      subtract(a, t, column, nullptr, dv[i], dr[i]);
    }
    copy(dv[i], a.dv + t * a.value_pitch + column);
    copy(dr[i], a.dr + t * a.value_pitch + column);
    if (a.b == nullptr) strengths(a, t, column, dv[i]);
  }
  for (std::int64_t n = 0; n < a.queries; ++n) {
    write<kRows>(a, block.q + n * query, row,
                 a.output_grad + n * values + row * a.value_pitch + column, a.value_pitch,
                 n == 0 ? block.factor : nullptr, slab);
  }
  if (kRows == 1 && a.before) decay(a, row, column, slab);
  write<kRows>(a, block.e, row, dr[0], kValueSlab, nullptr, slab);
  if (kRows == 1 && !a.before) decay(a, row, column, slab);
}

// A fold before a row, of the vector of keys from `key` on; null: none.
HWY_INLINE const float* fold_of(const ErasingArgs& a, std::int64_t row, std::int64_t key) {
  if (a.folds == nullptr || !a.folds->fold[row]) return nullptr;
  return a.folds->factor + row * a.folds->pitch + (a.folds->per_key ? key : 0);
}

// The inner products of x with the rows of y that stand before it in the block, and with its own;
// with the folds between, that of x's row only if it is `after` that.
void products(const ErasingArgs& a, const float* x, const float* y, bool after, float* out) {
  const D d;
  std::int64_t begin = 0;
  for (std::int64_t t = 0; t < a.rows; ++t) {
    if (a.first[t]) begin = t;
    V sums[kRowBlock];
    OUZEL_UNROLL
    for (int i = 0; i < kRowBlock; ++i) sums[i] = hn::Zero(d);
    for (std::int64_t key = 0; key < a.keys; key += kLanes) {
      V row = hn::Load(d, x + t * a.key_pitch + key);
      for (std::int64_t i = t; i >= begin; --i) {
        if (i < t && (after || i + 1 < t)) {
          if (const float* f = fold_of(a, i + 1, key)) row = hn::Mul(row, hn::Load(d, f));
        }
        V& sum = sums[i - begin];
        sum = hn::MulAdd(row, hn::Load(d, y + i * a.key_pitch + key), sum);
      }
    }
    for (std::int64_t i = begin; i <= t; ++i) {
      out[t * kRowBlock + i - begin] = hn::GetLane(hn::SumOfLanes(d, sums[i - begin]));
    }
  }
}

// The rows of a block with folds within: see Block.
void fold_block(const ErasingArgs& a, std::int64_t begin) {
  const D d;
  const std::int64_t query = a.rows * a.key_pitch;
  for (std::int64_t key = 0; key < a.keys; key += kLanes) {
    const auto scaled = [&](V product, const float* from, float* to, std::int64_t t) HWY_ATTR {
      if (from == nullptr) return;
      const std::int64_t at = t * a.key_pitch + key;
      hn::Store(hn::Mul(product, hn::Load(d, from + at)), d, to + at);
    };
    const auto fold = [&](V product, std::int64_t t) HWY_ATTR {
      const float* f = fold_of(a, t, key);
      return f == nullptr ? product : hn::Mul(product, hn::Load(d, f));
    };
    V product = hn::Set(d, 1.0f);
    for (std::int64_t t = begin; t < begin + kRowBlock; ++t) {
      if (a.before) scaled(product, a.e, a.block_e, t);
      product = fold(product, t);
      if (!a.before) scaled(product, a.e, a.block_e, t);
      for (std::int64_t n = 0; a.qk != nullptr && n < a.queries; ++n) {
        scaled(product, a.q + n * query, a.block_q + n * query, t);
      }
    }
    hn::Store(product, d, a.block_factor + begin * a.key_pitch + key);
    product = hn::Set(d, 1.0f);
    for (std::int64_t t = begin + kRowBlock - 1; t >= begin; --t) {
      scaled(product, a.k, a.block_k, t);
      scaled(product, a.b, a.block_b, t);
      product = fold(product, t);
    }
  }
}

}  // namespace

void BlockProducts(const ErasingArgs& a) {
  const std::int64_t query = a.rows * a.key_pitch;
  for (std::int64_t t = 0; t < a.rows; ++t) {
    if (a.first[t] && a.folded[t]) fold_block(a, t);
  }
  products(a, a.e, a.k, !a.before, a.ek);
  if (a.b != nullptr) products(a, a.e, a.b, !a.before, a.eb);
  if (a.qk == nullptr) return;
  for (std::int64_t n = 0; n < a.queries; ++n) {
    products(a, a.q + n * query, a.k, true, a.qk + n * a.rows * kRowBlock);
    if (a.b != nullptr) products(a, a.q + n * query, a.b, true, a.qb + n * a.rows * kRowBlock);
  }
}

void BlockForward(const ErasingArgs& a) {
  for (std::int64_t i = 0; i < padded(a.values, kValueSlab) / kValueSlab; ++i) {
    float* slab = a.state + i * a.keys * kValueSlab;
    for (std::int64_t t = 0, end; t < a.rows; t = end) {
      for (end = t + 1; !a.first[end];) ++end;
      end - t == kRowBlock ? forward<kRowBlock>(a, t, i * kValueSlab, slab)
                           : forward<1>(a, t, i * kValueSlab, slab);
    }
    leave(a, slab);
  }
}

void BlockBackward(const ErasingArgs& a) {
  for (std::int64_t i = 0; i < padded(a.values, kValueSlab) / kValueSlab; ++i) {
    float* slab = a.state + i * a.keys * kValueSlab;
    leave(a, slab);
    for (std::int64_t t = a.rows, begin; t > 0; t = begin) {
      for (begin = t - 1; !a.first[begin];) --begin;
      t - begin == kRowBlock ? backward<kRowBlock>(a, begin, i * kValueSlab, slab)
                             : backward<1>(a, begin, i * kValueSlab, slab);
    }
  }
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
                          HWY_ATTR { return hn::Load(d4, slab + (key + i) * kValueSlab); };
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
