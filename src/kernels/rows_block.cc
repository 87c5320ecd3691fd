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
void read_block(const BlockArgs& a, const float* x, std::int64_t row, const float* slab,
                Values& y) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
    V sum[kRows][kVectors];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
    }
    for (std::int64_t group = 0; group < a.groups; ++group) {
      const float* keys = x + (group * a.rows + row) * kKeyGroup;
      const float* s = slab + group * kKeyGroup * kValueSlab + c;
      for (std::int64_t k = 0; k < kKeyGroup; ++k) {
        V state[kVectors];
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          state[j] = hn::Load(d, s + k * kValueSlab + j * kLanes);
        }
        OUZEL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const V key = hn::Set(d, keys[i * kKeyGroup + k]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(key, state[j], sum[i][j]);
        }
      }
    }
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) hn::Store(sum[i][j], d, y[i] + c + j * kLanes);
    }
  }
}

// S~ += sum of x_t y_t^T over kRows rows.
template <int kRows>
void write_block(const BlockArgs& a, const float* x, std::int64_t row, const float* y,
                 std::int64_t pitch, float* slab) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kColumns) {
    V value[kRows][kVectors];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) value[i][j] = hn::Load(d, y + i * pitch + c + j * kLanes);
    }
    for (std::int64_t group = 0; group < a.groups; ++group) {
      const float* keys = x + (group * a.rows + row) * kKeyGroup;
      float* s = slab + group * kKeyGroup * kValueSlab + c;
      for (std::int64_t k = 0; k < kKeyGroup; ++k) {
        V state[kVectors];
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          state[j] = hn::Load(d, s + k * kValueSlab + j * kLanes);
        }
        OUZEL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const V key = hn::Set(d, keys[i * kKeyGroup + k]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            state[j] = hn::MulAdd(key, value[i][j], state[j]);
          }
        }
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          hn::Store(state[j], d, s + k * kValueSlab + j * kLanes);
        }
      }
    }
  }
}

// S~ times the factors of keys (null: 1) and of values (null: 1); where one is 0, 0.
void scale_keys(const float* factor, std::int64_t group_pitch, std::int64_t groups, float* slab) {
  const D d;
  for (std::int64_t key = 0; key < groups * kKeyGroup; ++key) {
    const float f = factor[key / kKeyGroup * group_pitch + key % kKeyGroup];
    if (f == 1.0f) continue;
    for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
      float* s = slab + key * kValueSlab + c;
      hn::Store(f == 0.0f ? hn::Zero(d) : hn::Mul(hn::Load(d, s), hn::Set(d, f)), d, s);
    }
  }
}

void scale_values(const float* factor, std::int64_t groups, float* slab) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kLanes) {
    const V f = hn::Load(d, factor + c);
    const auto kept = hn::Ne(f, hn::Zero(d));
    for (std::int64_t key = 0; key < groups * kKeyGroup; ++key) {
      float* s = slab + key * kValueSlab + c;
      hn::Store(hn::IfThenElseZero(kept, hn::Mul(hn::Load(d, s), f)), d, s);
    }
  }
}

void decay(const BlockArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  if (a.folds != nullptr) {
    const Folds& f = *a.folds;
    for (std::int64_t group = 0; group < a.groups; ++group) {
      const std::int64_t of = f.per_key ? group : 0;
      if (!f.fold[of * f.rows + row]) continue;
      scale_keys(f.factor + (of * f.rows + row) * kKeyGroup, 0, 1,
                 slab + group * kKeyGroup * kValueSlab);
    }
  }
  if (a.value_decay != nullptr) {
    scale_values(a.value_decay + row * a.pitch + column, a.groups, slab);
  }
}

// From Lambda = 1 at a chunk's begin to S itself at its end, or into G~ from G at its end.
void leave(const BlockArgs& a, float* slab) {
  if (a.folds == nullptr) return;
  const Folds& f = *a.folds;
  const std::int64_t pitch = f.per_key ? (f.rows + 1) * kKeyGroup : 0;
  scale_keys(f.lambda + f.rows * kKeyGroup, pitch, a.groups, slab);
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
HWY_INLINE void subtract(const BlockArgs& a, std::int64_t t, std::int64_t column, const float* v,
                         const float* r, float* out) {
  const D d;
  for (std::int64_t j = 0; j < kValueSlab; j += kLanes) {
    const V c = a.c_per_value ? hn::Load(d, a.c + t * a.pitch + column + j) : hn::Set(d, a.c[t]);
    const V x = v == nullptr ? hn::Zero(d) : hn::Load(d, v + j);
    hn::Store(hn::NegMulAdd(c, hn::Load(d, r + j), x), d, out + j);
  }
}

HWY_INLINE void copy(const float* x, float* y) {
  const D d;
  for (std::int64_t c = 0; c < kValueSlab; c += kLanes) hn::Store(hn::Load(d, x + c), d, y + c);
}

// dc = -dv * r, and what was written.
HWY_INLINE void strengths(const BlockArgs& a, std::int64_t t, std::int64_t column,
                          const float* dv) {
  const D d;
  const float* r = a.r + t * a.pitch + column;
  subtract(a, t, column, a.v + t * a.pitch + column, r, a.written + t * a.pitch + column);
  V sum = hn::Zero(d);
  for (std::int64_t j = 0; j < kValueSlab; j += kLanes) {
    const V x = hn::Mul(hn::Load(d, dv + j), hn::Load(d, r + j));
    if (a.c_per_value) hn::Store(hn::Neg(x), d, a.dc + t * a.pitch + column + j);
    sum = hn::Add(sum, x);
  }
  if (a.c_per_value) return;
  a.dc[t] = (column == 0 ? 0.0f : a.dc[t]) - hn::GetLane(hn::SumOfLanes(d, sum));
}

template <int kRows>
void forward(const BlockArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  HWY_ALIGN Values r, written;
  if (!a.erase_before) decay(a, row, column, slab);
  read_block<kRows>(a, a.e, row, slab, r);
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t t = row + i;
    for (int j = 0; j < i; ++j) {
      add(a.ek[t * kRowBlock + j], written[j], r[i]);
      if (a.b != nullptr) add(a.eb[t * kRowBlock + j], r[j], r[i]);
    }
    const float* v = a.v + t * a.pitch + column;
    a.b == nullptr ? subtract(a, t, column, v, r[i], written[i]) : copy(v, written[i]);
    copy(r[i], a.r + t * a.pitch + column);
  }
  if (a.erase_before) decay(a, row, column, slab);
  write_block<kRows>(a, a.k, row, written[0], kValueSlab, slab);
  if (a.b != nullptr) write_block<kRows>(a, a.b, row, r[0], kValueSlab, slab);
}

template <int kRows>
void backward(const BlockArgs& a, std::int64_t row, std::int64_t column, float* slab) {
  HWY_ALIGN Values dv, dr;
  const std::int64_t query = a.groups * a.rows * kKeyGroup, values = a.rows * a.pitch;
  const auto write_queries = [&]() HWY_ATTR {
    for (std::int64_t n = 0; n < a.queries; ++n) {
      write_block<kRows>(a, a.q + n * query, row,
                         a.output_grad + n * values + row * a.pitch + column, a.pitch, slab);
    }
  };
  const auto write_erased = [&]() HWY_ATTR {
    write_block<kRows>(a, a.e, row, dr[0], kValueSlab, slab);
  };
  // What reaches row i of the block's rows from i on, by the products of their q and e with x_i.
  const auto later = [&](int i, const float* qx, const float* ex, Values& y) HWY_ATTR {
    for (int j = i; j < kRows; ++j) {
      const std::int64_t t = row + j;
      if (j > i || !a.read_before) {
        for (std::int64_t n = 0; n < a.queries; ++n) {
          add(qx[(n * a.rows + t) * kRowBlock + i],
              a.output_grad + n * values + t * a.pitch + column, y[i]);
        }
      }
      if (j > i) add(ex[t * kRowBlock + i], dr[j], y[i]);
    }
  };
  read_block<kRows>(a, a.k, row, slab, dv);
  if (a.b != nullptr) read_block<kRows>(a, a.b, row, slab, dr);
  for (int i = kRows - 1; i >= 0; --i) {
    const std::int64_t t = row + i;
    later(i, a.qk, a.ek, dv);
    if (a.b != nullptr) {
      later(i, a.qb, a.eb, dr);
    } else {
      subtract(a, t, column, nullptr, dv[i], dr[i]);
    }
    copy(dv[i], a.dv + t * a.pitch + column);
    copy(dr[i], a.dr + t * a.pitch + column);
    if (a.b == nullptr) strengths(a, t, column, dv[i]);
  }
  if (!a.read_before) write_queries();
  if (!a.erase_before) write_erased();
  decay(a, row, column, slab);
  if (a.read_before) write_queries();
  if (a.erase_before) write_erased();
}

// The inner products of x with the rows of y that stand before it in the block, and with its own.
void products(const BlockArgs& a, const float* x, const float* y, float* out) {
  const D d;
  std::int64_t begin = 0;
  for (std::int64_t t = 0; t < a.rows; ++t) {
    if (a.first[t]) begin = t;
    for (std::int64_t i = begin; i <= t; ++i) {
      V sum = hn::Zero(d);
      for (std::int64_t group = 0; group < a.groups; ++group) {
        const float* p = x + (group * a.rows + t) * kKeyGroup;
        const float* q = y + (group * a.rows + i) * kKeyGroup;
        for (std::int64_t k = 0; k < kKeyGroup; k += kLanes) {
          sum = hn::MulAdd(hn::Load(d, p + k), hn::Load(d, q + k), sum);
        }
      }
      out[t * kRowBlock + i - begin] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }
}

}  // namespace

void BlockProducts(const BlockArgs& a) {
  const std::int64_t query = a.groups * a.rows * kKeyGroup;
  products(a, a.e, a.k, a.ek);
  if (a.b != nullptr) products(a, a.e, a.b, a.eb);
  if (a.qk == nullptr) return;
  for (std::int64_t n = 0; n < a.queries; ++n) {
    products(a, a.q + n * query, a.k, a.qk + n * a.rows * kRowBlock);
    if (a.b != nullptr) products(a, a.q + n * query, a.b, a.qb + n * a.rows * kRowBlock);
  }
}

void BlockForward(const BlockArgs& a) {
  for (std::int64_t i = 0; i < a.slabs; ++i) {
    float* slab = a.state + i * a.groups * kKeyGroup * kValueSlab;
    for (std::int64_t t = 0, end; t < a.rows; t = end) {
      for (end = t + 1; !a.first[end];) ++end;
      end - t == kRowBlock ? forward<kRowBlock>(a, t, i * kValueSlab, slab)
                           : forward<1>(a, t, i * kValueSlab, slab);
    }
    leave(a, slab);
  }
}

void BlockBackward(const BlockArgs& a) {
  for (std::int64_t i = 0; i < a.slabs; ++i) {
    float* slab = a.state + i * a.groups * kKeyGroup * kValueSlab;
    leave(a, slab);
    for (std::int64_t t = a.rows, begin; t > 0; t = begin) {
      for (begin = t - 1; !a.first[begin];) --begin;
      t - begin == kRowBlock ? backward<kRowBlock>(a, begin, i * kValueSlab, slab)
                             : backward<1>(a, begin, i * kValueSlab, slab);
    }
  }
}

void TilesFromSlabs(std::int64_t groups, std::int64_t value_tiles, const float* slabs,
                    float* tiles) {
  for (std::int64_t tile = 0; tile < value_tiles; ++tile) {
    for (std::int64_t group = 0; group < groups; ++group, tiles += kStateTile) {
      const float* slab =
          slabs + ((tile * kValueTile / kValueSlab * groups + group) * kKeyGroup) * kValueSlab +
          tile * kValueTile % kValueSlab;
      for (std::int64_t i = 0; i < kValueTile; ++i) {
        for (std::int64_t k = 0; k < kKeyGroup; ++k) {
          tiles[i * kKeyGroup + k] = slab[k * kValueSlab + i];
        }
      }
    }
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
HWY_EXPORT(TilesFromSlabs);
void block_products(Isa isa, const BlockArgs& args) { OUZEL_DISPATCH(isa, BlockProducts)(args); }
void block_forward(Isa isa, const BlockArgs& args) { OUZEL_DISPATCH(isa, BlockForward)(args); }
void block_backward(Isa isa, const BlockArgs& args) { OUZEL_DISPATCH(isa, BlockBackward)(args); }
void tiles_from_slabs(Isa isa, std::int64_t groups, std::int64_t value_tiles, const float* slabs,
                      float* tiles) {
  OUZEL_DISPATCH(isa, TilesFromSlabs)(groups, value_tiles, slabs, tiles);
}
}  // namespace ouzel
#endif
