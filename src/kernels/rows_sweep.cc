// The backward sweeps of the engine in key lanes: a tile of 8 values x 32 keys of S~, then of G~,
// stays in registers while the rows of a chunk pass by. Gradients of rows of keys then need no
// reduction over lanes; only those of values do.
//
//     S:  [read e or q] fold [read e] write k, b [read q]      reads: dx_t += S~ a_t, a a gradient
//     G:  the same backwards, reads and writes exchanged, and  dg_t = row sums of G~ * P~
#include "src/kernels/rows_backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_sweep.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_MIN(HWY_LANES(float), 16);
// 16 of the 32 registers of AVX-512, 8 of the 16 of AVX2.
constexpr int kVectors = 2;
constexpr int kValues = HWY_TARGET == HWY_AVX3 ? 8 : 4;
constexpr std::int64_t kKeys = kVectors * kLanes;
using Tile = V[kValues][kVectors];

HWY_INLINE void load(D d, const float* from, std::int64_t pitch, Tile& s) {
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) s[i][j] = hn::Load(d, from + i * pitch + j * kLanes);
  }
}

HWY_INLINE void store(D d, const Tile& s, float* to, std::int64_t pitch) {
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) hn::Store(s[i][j], d, to + i * pitch + j * kLanes);
  }
}

// S += x a^T.
HWY_INLINE void write(D d, Tile& s, const float* x, const float* a) {
  V key[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) key[j] = hn::Load(d, x + j * kLanes);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const V value = hn::Set(d, a[i]);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) s[i][j] = hn::MulAdd(key[j], value, s[i][j]);
  }
}

// sums (+)= S a.
HWY_INLINE void read(D d, const Tile& s, const float* a, bool first, float* sums) {
  V sum[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) sum[j] = first ? hn::Zero(d) : hn::Load(d, sums + j * kLanes);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const V value = hn::Set(d, a[i]);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[j] = hn::MulAdd(s[i][j], value, sum[j]);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) hn::Store(sum[j], d, sums + j * kLanes);
}

// partial (+)= S^T x, not yet summed over lanes.
HWY_INLINE void read_values(D d, const Tile& s, const float* x, bool first, float* partial) {
  V key[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) key[j] = hn::Load(d, x + j * kLanes);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    V sum = first ? hn::Zero(d) : hn::Load(d, partial + i * kLanes);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) sum = hn::MulAdd(s[i][j], key[j], sum);
    hn::Store(sum, d, partial + i * kLanes);
  }
}

// S *= factor of a fold; where that is 0, 0.
HWY_INLINE void fold(D d, Tile& s, const float* factor) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V f = hn::Load(d, factor + j * kLanes);
    const auto kept = hn::Ne(f, hn::Zero(d));
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) s[i][j] = hn::IfThenElseZero(kept, hn::Mul(s[i][j], f));
  }
}

HWY_INLINE void drop(D d, Tile& s, const float* factor) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const auto kept = hn::Ne(hn::Load(d, factor + j * kLanes), hn::Zero(d));
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) s[i][j] = hn::IfThenElseZero(kept, s[i][j]);
  }
}

HWY_INLINE void decay_values(D d, Tile& s, const float* decay) {
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const V f = hn::Set(d, decay[i]);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[i][j] = decay[i] == 0.0f ? hn::Zero(d) : hn::Mul(s[i][j], f);
    }
  }
}

HWY_INLINE void drop_values(D d, Tile& s, const float* decay) {
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    if (decay[i] != 0.0f) continue;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) s[i][j] = hn::Zero(d);
  }
}

// Where a tile stands.
struct Place {
  std::int64_t group, key, value;  // first key within the group, first value of all
  bool first_keys, first_values;

  std::int64_t state(std::int64_t groups) const {
    return (value / kValueTile * groups + group) * kStateTile + value % kValueTile * kKeyGroup +
           key;
  }
};

// The fold before a row, or null.
struct TileFolds {
  const std::uint8_t* fold = nullptr;
  const float* factor = nullptr;
  const float* lambda = nullptr;  // at the end
  const float* total = nullptr;

  TileFolds(const Folds* f, const Place& p) {
    if (f == nullptr) return;
    const std::int64_t group = f->per_key ? p.group : 0;
    fold = f->fold + group * f->rows;
    factor = f->factor + group * f->rows * kKeyGroup + p.key;
    lambda = f->lambda + (group * (f->rows + 1) + f->rows) * kKeyGroup + p.key;
    total = f->total + group * kKeyGroup + p.key;
  }
  const float* before(std::int64_t t) const {
    return fold != nullptr && fold[t] ? factor + t * kKeyGroup : nullptr;
  }
};

enum class Erase { kNone, kCollinear, kGeneral };

template <Erase kErase, bool kDecay>
void sweep_state(const SweepArgs& a, const Place& p) {
  const D d;
  const TileFolds folds(a.folds, p);
  Tile s;
  load(d, a.state + p.state(a.groups), kKeyGroup, s);
  const std::int64_t key = p.group * a.rows * kKeyGroup + p.key;
  const std::int64_t query = a.groups * a.rows * kKeyGroup;
  const auto read_queries = [&](std::int64_t x, std::int64_t v) HWY_ATTR {
    for (std::int64_t i = 0; i < a.queries; ++i) {
      read(d, s, a.output_grad + i * a.rows * a.pitch + v, p.first_values, a.dq + i * query + x);
    }
  };
  for (std::int64_t t = 0; t < a.rows; ++t) {
    const std::int64_t x = key + t * kKeyGroup, v = t * a.pitch + p.value;
    if (a.read_before) read_queries(x, v);
    if constexpr (kErase != Erase::kNone) {
      if (a.erase_before) read(d, s, a.read_grad + v, p.first_values, a.de + x);
    }
    if constexpr (kDecay) {
      if (const float* factor = folds.before(t)) fold(d, s, factor);
      if (a.value_decay != nullptr) decay_values(d, s, a.value_decay + v);
      store(d, s, a.history + t * kValues * kKeys, kKeys);
    }
    if constexpr (kErase != Erase::kNone) {
      if (!a.erase_before) read(d, s, a.read_grad + v, p.first_values, a.de + x);
    }
    write(d, s, a.k + x, a.write + v);
    if constexpr (kErase == Erase::kGeneral) write(d, s, a.b + x, a.read + v);
    if (!a.read_before) read_queries(x, v);
  }
}

template <Erase kErase, bool kDecay>
void sweep_grad(const SweepArgs& a, const Place& p) {
  const D d;
  const TileFolds folds(a.folds, p);
  Tile g;
  load(d, a.grad + p.state(a.groups), kKeyGroup, g);
  if (folds.lambda != nullptr) fold(d, g, folds.lambda);
  const std::int64_t key = p.group * a.rows * kKeyGroup + p.key;
  const std::int64_t query = a.groups * a.rows * kKeyGroup;
  const auto write_queries = [&](std::int64_t x, std::int64_t v) HWY_ATTR {
    for (std::int64_t i = 0; i < a.queries; ++i) {
      write(d, g, a.q + i * query + x, a.output_grad + i * a.rows * a.pitch + v);
    }
  };
  for (std::int64_t t = a.rows - 1; t >= 0; --t) {
    const std::int64_t x = key + t * kKeyGroup, v = t * a.pitch + p.value;
    if (!a.read_before) write_queries(x, v);
    read(d, g, a.write + v, p.first_values, a.dk + x);
    if constexpr (kErase == Erase::kGeneral) {
      read(d, g, a.read + v, p.first_values, a.db + x);
    }
    if constexpr (kErase == Erase::kNone) {
      read_values(d, g, a.k + x, p.first_keys, a.partial + t * kValueTile * kLanes);
    } else {
      if (!a.erase_before) write(d, g, a.e + x, a.read_grad + v);
    }
    if constexpr (kDecay) {
      const float* factor = folds.before(t);
      if (factor != nullptr) drop(d, g, factor);
      if (a.value_decay != nullptr) drop_values(d, g, a.value_decay + v);
      const float* before = a.history + t * kValues * kKeys;
      if (a.dg != nullptr) {
        V sum[kVectors];
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          sum[j] = p.first_values ? hn::Zero(d) : hn::Load(d, a.dg + x + j * kLanes);
        }
        OUZEL_UNROLL
        for (int i = 0; i < kValues; ++i) {
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            sum[j] = hn::MulAdd(g[i][j], hn::Load(d, before + i * kKeys + j * kLanes), sum[j]);
          }
        }
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) hn::Store(sum[j], d, a.dg + x + j * kLanes);
      }
      if (a.value_decay != nullptr) {
        float* partial = a.partial + (a.rows + t) * kValueTile * kLanes;
        OUZEL_UNROLL
        for (int i = 0; i < kValues; ++i) {
          V sum = p.first_keys ? hn::Zero(d) : hn::Load(d, partial + i * kLanes);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            sum = hn::MulAdd(g[i][j], hn::Load(d, before + i * kKeys + j * kLanes), sum);
          }
          hn::Store(sum, d, partial + i * kLanes);
        }
        decay_values(d, g, a.value_decay + v);
      }
      if (factor != nullptr) fold(d, g, factor);
    }
    if constexpr (kErase != Erase::kNone) {
      if (a.erase_before) write(d, g, a.e + x, a.read_grad + v);
    }
    if (a.read_before) write_queries(x, v);
  }
  if (a.grad_out != nullptr) store(d, g, a.grad_out + p.state(a.groups), kKeyGroup);
}

// Sums over lanes of [rows][8] vectors.
void sum_lanes(const SweepArgs& a, const float* partial, float* out) {
  const D d;
  for (std::int64_t t = 0; t < a.rows; ++t) {
    for (std::int64_t i = 0; i < kValueTile; ++i) {
      const V x = hn::Load(d, partial + (t * kValueTile + i) * kLanes);
      out[t * a.pitch + i] = hn::GetLane(hn::SumOfLanes(d, x));
    }
  }
}

// body(place) for the tiles of all keys of 8 values.
template <class Body>
HWY_INLINE void for_tiles(std::int64_t groups, std::int64_t value, Body body) {
  for (std::int64_t key = 0; key < groups * kKeyGroup; key += kKeys) {
    for (std::int64_t i = 0; i < kValueTile; i += kValues) {
      body(Place{key / kKeyGroup, key % kKeyGroup, value + i, key == 0, value + i == 0});
    }
  }
}

template <Erase kErase, bool kDecay>
void sweep(const SweepArgs& a) {
  for (std::int64_t value = 0; value < a.value_tiles * kValueTile; value += kValueTile) {
    for_tiles(a.groups, value, [&](const Place& p) HWY_ATTR {
      SweepArgs tile = a;
      tile.partial = a.partial + p.value % kValueTile * kLanes;
      sweep_state<kErase, kDecay>(tile, p);
      sweep_grad<kErase, kDecay>(tile, p);
    });
    if (a.dv != nullptr) sum_lanes(a, a.partial, a.dv + value);
    if (a.dgv != nullptr) {
      sum_lanes(a, a.partial + a.rows * kValueTile * kLanes, a.dgv + value);
    }
  }
}

template <bool kDecay>
void sweep(const SweepArgs& a) {
  if (a.e == nullptr) {
    sweep<Erase::kNone, kDecay>(a);
  } else if (a.b == nullptr) {
    sweep<Erase::kCollinear, kDecay>(a);
  } else {
    sweep<Erase::kGeneral, kDecay>(a);
  }
}

void accumulate_tile(const AccumulateArgs& a, const Place& p) {
  const D d;
  const TileFolds folds(a.folds, p);
  Tile s;
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) s[i][j] = hn::Zero(d);
  }
  const std::int64_t key = p.group * a.rows * kKeyGroup + p.key;
  const auto write_row = [&](std::int64_t t) HWY_ATTR {
    for (std::int64_t i = 0; i < a.writes; ++i) {
      write(d, s, a.x + i * a.groups * a.rows * kKeyGroup + key + t * kKeyGroup,
            a.a + i * a.rows * a.pitch + t * a.pitch + p.value);
    }
  };
  for (std::int64_t n = 0; n < a.rows; ++n) {
    const std::int64_t t = a.reverse ? a.rows - 1 - n : n;
    if (!a.fold_first) write_row(t);
    if (const float* factor = folds.before(t)) fold(d, s, factor);
    if (a.value_decay != nullptr) decay_values(d, s, a.value_decay + t * a.pitch + p.value);
    if (a.fold_first) write_row(t);
  }
  if (folds.lambda != nullptr && !a.reverse) fold(d, s, folds.lambda);

  float* state = a.state + p.state(a.groups);
  float* low = a.low + p.state(a.groups);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = i * kKeyGroup + j * kLanes;
      V before = hn::Load(d, state + at), lost = hn::Load(d, low + at);
      if (folds.total != nullptr || a.value_total != nullptr) {
        V total = hn::Zero(d);
        if (folds.total != nullptr) total = hn::Load(d, folds.total + j * kLanes);
        if (a.value_total != nullptr)
          total = hn::Add(total, hn::Set(d, a.value_total[p.value + i]));
        // Below e^-80 nothing is left, not even of NaN.
        const auto kept = hn::Not(hn::Lt(total, hn::Set(d, -80.0f)));
        const V shrink = math::expm1(d, total);
        before = hn::IfThenElseZero(kept, before);
        lost = hn::IfThenElseZero(kept, hn::MulAdd(lost, shrink, lost));
        lost = hn::MulAdd(before, shrink, lost);
      }
      // Fast two-sum (Dekker): exact where S is the larger, which is where long sums are lost.
      const V change = hn::Add(s[i][j], lost);
      const V after = hn::Add(before, change);
      hn::Store(after, d, state + at);
      hn::Store(hn::Sub(change, hn::Sub(after, before)), d, low + at);
    }
  }
}

}  // namespace

void BackwardSweep(const SweepArgs& a) {
  if (a.folds != nullptr || a.value_decay != nullptr) {
    sweep<true>(a);
  } else {
    sweep<false>(a);
  }
}

void AccumulateRows(const AccumulateArgs& a) {
  for (std::int64_t value = 0; value < a.value_tiles * kValueTile; value += kValueTile) {
    for_tiles(a.groups, value, [&](const Place& p) HWY_ATTR { accumulate_tile(a, p); });
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(BackwardSweep);
HWY_EXPORT(AccumulateRows);
void backward_sweep(Isa isa, const SweepArgs& args) { OUZEL_DISPATCH(isa, BackwardSweep)(args); }
void accumulate_rows(Isa isa, const AccumulateArgs& args) {
  OUZEL_DISPATCH(isa, AccumulateRows)(args);
}
}  // namespace ouzel
#endif
