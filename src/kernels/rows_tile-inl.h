// A tile of a state in key lanes (rows_backward.h), values x keys in registers, and what
// a row does to it. Sums over values are sums of vectors; only those over keys go across lanes.

// Per-target include guard.
#if defined(OUZEL_KERNELS_ROWS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_ROWS_TILE_INL_H_
#undef OUZEL_KERNELS_ROWS_TILE_INL_H_
#else
#define OUZEL_KERNELS_ROWS_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "src/kernels/reset-inl.h"
#include "src/kernels/rows_backward.h"
#include "src/kernels/rows_lanes-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// A tile is 16 of the 32 registers of AVX-512, 12 of the 16 of AVX2. Values and vectors of keys of
// the shape that most sweeps take; its rows of 64 tokens stay in the first-level cache.
inline constexpr int kValues = HWY_TARGET == HWY_AVX3 ? 8 : 4;
inline constexpr int kVectors = HWY_TARGET == HWY_AVX2 ? 3 : 2;
// The shape with the fewer sums over lanes, where keys are that many.
inline constexpr int kWideValues = 4;
inline constexpr int kWideVectors = HWY_TARGET == HWY_AVX3 ? 4 : kVectors;

template <int kN, int kM>
using Tile = V[kN][kM];

template <int kN, int kM>
HWY_INLINE void load(D d, const float* from, std::int64_t pitch, Tile<kN, kM>& s) {
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) s[i][j] = hn::Load(d, from + i * pitch + j * kLanes);
  }
}

template <int kN, int kM>
HWY_INLINE void store(D d, const Tile<kN, kM>& s, float* to, std::int64_t pitch) {
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) hn::Store(s[i][j], d, to + i * pitch + j * kLanes);
  }
}

// S += x a^T.
template <int kN, int kM>
HWY_INLINE void write(D d, Tile<kN, kM>& s, const float* x, const float* a) {
  V key[kM];
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) key[j] = hn::Load(d, x + j * kLanes);
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    const V value = hn::Set(d, a[i]);
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) s[i][j] = hn::MulAdd(key[j], value, s[i][j]);
  }
}

// Where a tile stands: its first key and value.
struct Place {
  std::int64_t key, value;

  std::int64_t state(const ChunkArgs& a) const { return value * a.keys + key; }
};

template <class T>
HWY_INLINE T* at_or_null(T* x, std::int64_t at) {
  return x == nullptr ? nullptr : x + at;
}

// All tiles of a column (or line) of tiles add to the sums of rows: zeros at first. `gate_rows`: of
// gate_sums.
inline void zero_sums(const SweepArgs& a, std::int64_t gate_rows) {
  const auto zero = [](float* sums, std::int64_t count) {
    if (sums != nullptr) std::fill_n(sums, count, 0.0f);
  };
  zero(a.dq, a.queries * a.rows * a.key_pitch);
  for (float* sums : {a.dk, a.de, a.db, a.dg}) zero(sums, a.rows * a.key_pitch);
  for (float* sums : {a.dv, a.dgv}) zero(sums, a.rows * a.value_pitch);
  zero(a.gate_sums, gate_rows * a.key_pitch);
}

// The sums of a row += a * S over values, where a(i, j) is what vector j of value i is multiplied
// by. Of many values even and odd ones go apart: one chain of sums would be waited for.
template <int kN, int kM, class Factor>
HWY_INLINE void add_values(D d, const Tile<kN, kM>& s, float* sums, Factor a) {
  constexpr int kChains = kN > 4 ? 2 : 1;
  V sum[kChains][kM];
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) {
    sum[0][j] = hn::MulAdd(s[0][j], a(0, j), hn::Load(d, sums + j * kLanes));
    if constexpr (kChains == 2) sum[1][j] = hn::Mul(s[1][j], a(1, j));
  }
  OUZEL_UNROLL
  for (int i = kChains; i < kN; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) {
      sum[i % kChains][j] = hn::MulAdd(s[i][j], a(i, j), sum[i % kChains][j]);
    }
  }
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) {
    if constexpr (kChains == 2) sum[0][j] = hn::Add(sum[0][j], sum[1][j]);
    hn::Store(sum[0][j], d, sums + j * kLanes);
  }
}

// The sums of a row += S a.
template <int kN, int kM>
HWY_INLINE void read(D d, const Tile<kN, kM>& s, const float* a, float* sums) {
  add_values(d, s, sums, [&](int i, int) HWY_ATTR { return hn::Set(d, a[i]); });
}

// The sums of a row += the sums over values of S * other, a tile in memory.
template <int kN, int kM>
HWY_INLINE void read_products(D d, const Tile<kN, kM>& s, const float* other, std::int64_t pitch,
                              float* sums) {
  add_values(d, s, sums,
             [&](int i, int j) HWY_ATTR { return hn::Load(d, other + i * pitch + j * kLanes); });
}

// The sums of a row, a number for each value, += S^T x; `pitch`: between the rows of x for values.
template <int kN, int kM>
HWY_INLINE void read_keys(D d, const Tile<kN, kM>& s, const float* x, std::int64_t pitch,
                          float* sums) {
  V sum[kN];
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    sum[i] = hn::Mul(s[i][0], hn::Load(d, x + i * pitch));
    OUZEL_UNROLL
    for (int j = 1; j < kM; ++j) {
      sum[i] = hn::MulAdd(s[i][j], hn::Load(d, x + i * pitch + j * kLanes), sum[i]);
    }
  }
  OUZEL_UNROLL
  for (int i = 0; i < kN; i += 4) {
    add_lanes(d, sum + i, sums + i, sums + i);
  }
}

// S *= a factor per key; where that is 0, 0.
template <int kN, int kM>
HWY_INLINE void multiply_keys(D d, Tile<kN, kM>& s, const float* factor) {
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) {
    const V f = hn::Load(d, factor + j * kLanes);
    const auto kept = is_kept(d, f);
    OUZEL_UNROLL
    for (int i = 0; i < kN; ++i) s[i][j] = hn::IfThenElseZero(kept, hn::Mul(s[i][j], f));
  }
}

// S *= a factor per value; where that is 0, 0.
template <int kN, int kM>
HWY_INLINE void multiply_values(D d, Tile<kN, kM>& s, const float* factor) {
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    const V f = hn::Set(d, factor[i]);
    const auto kept = is_kept(d, f);
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) s[i][j] = hn::IfThenElseZero(kept, hn::Mul(s[i][j], f));
  }
}

// Zeros where the factors of a tile's keys, or of its values, are 0.
template <int kN, int kM>
HWY_INLINE void drop_keys(D d, Tile<kN, kM>& s, const float* factor) {
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) {
    const auto kept = is_kept(d, hn::Load(d, factor + j * kLanes));
    OUZEL_UNROLL
    for (int i = 0; i < kN; ++i) s[i][j] = hn::IfThenElseZero(kept, s[i][j]);
  }
}
template <int kN, int kM>
HWY_INLINE void drop_values(D d, Tile<kN, kM>& s, const float* factor) {
  OUZEL_UNROLL
  for (int i = 0; i < kN; ++i) {
    if (factor[i] != 0.0f) continue;
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) s[i][j] = hn::Zero(d);
  }
}

// What decays a tile row by row, and what folded decays leave to its chunk's end.
struct TileDecay {
  const float* factor = nullptr;
  const float* lambda = nullptr;  // after the last row; null: nothing is folded
  const float* total = nullptr;
  const float* values;
  std::int64_t pitch = 0, value_pitch;

  TileDecay(const ChunkArgs& a, const Place& p)
      : values(at_or_null(a.value_decay, p.value)), value_pitch(a.value_pitch) {
    if (a.folds == nullptr) return;
    const Folds& f = *a.folds;
    const std::int64_t key = f.per_key ? p.key : 0;
    pitch = f.pitch;
    factor = at_or_null(f.factor, key);
    lambda = at_or_null(f.lambda, a.rows * pitch + key);
    total = f.total + key;
  }
  bool of_rows() const { return factor != nullptr || values != nullptr; }
  // Of a row; null: 1.
  const float* keys_at(std::int64_t t) const { return at_or_null(factor, t * pitch); }
  const float* values_at(std::int64_t t) const { return at_or_null(values, t * value_pitch); }
};

template <int kN, int kM>
HWY_INLINE void decay_row(D d, Tile<kN, kM>& s, const TileDecay& decay, std::int64_t t) {
  if (const float* f = decay.keys_at(t)) multiply_keys(d, s, f);
  if (const float* f = decay.values_at(t)) multiply_values(d, s, f);
}

// A tile's work: all that its loops over rows need beside pointers.
struct TileJob {
  Place place;
  TileDecay decay;
  PrefetchColumn next;  // the lines it brings near

  template <class Args>
  TileJob(const Args& a, const Place& p, std::int64_t column)
      : place(p),
        decay(a, p),
        next(column < a.prefetch_count ? a.prefetch[column] : PrefetchColumn{a.state, 0}) {}
};

// Column by column for the tiles of a pass, evenly spread over them.
struct Columns {
  std::int64_t tiles, columns, tile = 0;

  // The next tile's, or one beyond all.
  std::int64_t next() {
    const std::int64_t from = tile * columns / tiles;
    return ++tile * columns / tiles > from ? from : kNone;
  }
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
};

template <int kM>
using Vectors = std::integral_constant<int, kM>;

// Keys are whole pairs of vectors: how many pairs go before threes.
template <int kM>
std::int64_t pairs_before(std::int64_t keys) {
  const std::int64_t rest = kM == 3 ? keys / kLanes % 3 : 0;
  return rest == 0 ? 0 : 3 - rest;
}

// body(Vectors, key) for the columns of tiles; where those are of three vectors, of some two.
template <int kM, class Body>
HWY_INLINE void for_columns(const ChunkArgs& a, Body body) {
  std::int64_t key = 0;
  if constexpr (kM == 3) {
    const std::int64_t wide = pairs_before<kM>(a.keys) * 2 * kLanes;
    for (; key < wide; key += 2 * kLanes) body(Vectors<2>(), key);
  }
  for (; key < a.keys; key += kM * kLanes) body(Vectors<kM>(), key);
}

// body(Vectors, place) for all tiles, those of the same keys after each other: rows of keys are the
// longer.
template <int kN, int kM, class Body>
HWY_INLINE void for_tiles(const ChunkArgs& a, Body body) {
  for_columns<kM>(a, [&](auto vectors, std::int64_t key) HWY_ATTR {
    for (std::int64_t value = 0; value < a.values; value += kN) body(vectors, Place{key, value});
  });
}
template <int kN, int kM>
std::int64_t tiles_of(const ChunkArgs& a) {
  const std::int64_t pairs = pairs_before<kM>(a.keys), vectors = a.keys / kLanes - 2 * pairs;
  return a.values / kN * (pairs + vectors / kM);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
