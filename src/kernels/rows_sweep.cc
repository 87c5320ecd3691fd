// The backward sweeps of the engine in key lanes: a tile of 8 values x 32 keys of S~, then of G~,
// stays in registers while the rows of a chunk pass by. Gradients of rows of keys then need no
// reduction over lanes; only those of values do.
//
//     S:  [read e or q] fold [read e] write k, b [read q]      reads: dx_t += S~ a_t, a a gradient
//     G:  the same backwards, reads and writes exchanged, and  dg_t = row sums of G~ * P~
#include "src/kernels/rows_backward.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_sweep.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/reset-inl.h"
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

#define OUZEL_INLINE_LAMBDA __attribute__((always_inline))

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

// sums += S a.
HWY_INLINE void read(D d, const Tile& s, const float* a, float* sums) {
  V sum[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) sum[j] = hn::Load(d, sums + j * kLanes);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    const V value = hn::Set(d, a[i]);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[j] = hn::MulAdd(s[i][j], value, sum[j]);
  }
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) hn::Store(sum[j], d, sums + j * kLanes);
}

// S *= factor of a fold; where that is 0, 0.
HWY_INLINE void multiply_keys(D d, Tile& s, const float* factor) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V f = hn::Load(d, factor + j * kLanes);
    const auto kept = is_kept(d, f);
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) s[i][j] = hn::IfThenElseZero(kept, hn::Mul(s[i][j], f));
  }
}

HWY_INLINE void load_keys(D d, const float* from, V (&x)[kVectors]) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) x[j] = hn::Load(d, from + j * kLanes);
}
HWY_INLINE void store_keys(D d, const V (&x)[kVectors], float* to) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) hn::Store(x[j], d, to + j * kLanes);
}
// y += x a, of two rows of keys or a tile's row.
HWY_INLINE void add(const V (&x)[kVectors], V a, V (&y)[kVectors]) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) y[j] = hn::MulAdd(x[j], a, y[j]);
}

// Where a tile stands.
struct Place {
  std::int64_t group, key, value;  // first key within the group, first value of all

  std::int64_t keys() const { return group * kKeyGroup + key; }
  std::int64_t state(std::int64_t groups) const {
    return (value / kValueTile * groups + group) * kStateTile + value % kValueTile * kKeyGroup +
           key;
  }
};

// What decays a tile: at rows that `at` marks, by a fold's factors where there are, and by those of
// values.
struct TileDecay {
  const std::uint8_t* at;
  const std::uint8_t* fold = nullptr;
  const float* factor = nullptr;
  const float* lambda = nullptr;  // after the last row
  const float* total = nullptr;
  const float* values;
  std::int64_t pitch = 0, value_pitch;

  TileDecay(const ChunkArgs& a, const Place& p)
      : at(a.marks),
        values(a.value_decay == nullptr ? nullptr : a.value_decay + p.value),
        value_pitch(a.value_pitch) {
    if (a.folds == nullptr) return;
    const Folds& f = *a.folds;
    const std::int64_t group = f.per_key ? p.group : 0, key = group * kKeyGroup + p.key;
    pitch = f.pitch;
    at += group * a.rows;
    fold = f.fold + group * a.rows;
    factor = f.factor + key;
    lambda = f.lambda + a.rows * pitch + key;
    total = f.total + key;
  }
};

// The factors of one marked row.
struct RowDecay {
  const float* keys;    // null: 1
  const float* values;  // null: 1

  RowDecay(const TileDecay& decay, std::int64_t t)
      : keys(decay.fold != nullptr && decay.fold[t] ? decay.factor + t * decay.pitch : nullptr),
        values(decay.values == nullptr ? nullptr : decay.values + t * decay.value_pitch) {}
  HWY_INLINE void load(D d, V (&f)[kVectors]) const {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      f[j] = keys == nullptr ? hn::Set(d, 1.0f) : hn::Load(d, keys + j * kLanes);
    }
  }
  // Row i of a tile: zeros what a factor of 0 drops, so that products with it are 0 even of NaN.
  HWY_INLINE void drop(D d, const V (&f)[kVectors], int i, V (&s)[kVectors]) const {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[j] = hn::IfThenElseZero(is_kept(d, f[j]), s[j]);
      if (values != nullptr && values[i] == 0.0f) s[j] = hn::Zero(d);
    }
  }
  // What was dropped, times the factors.
  HWY_INLINE void multiply(D d, const V (&f)[kVectors], int i, V (&s)[kVectors]) const {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[j] = hn::Mul(s[j], f[j]);
      if (values != nullptr) s[j] = hn::Mul(s[j], hn::Set(d, values[i]));
    }
  }
};

HWY_INLINE void decay_row(D d, Tile& s, const RowDecay& decay) {
  V f[kVectors];
  decay.load(d, f);
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    decay.drop(d, f, i, s[i]);
    decay.multiply(d, f, i, s[i]);
  }
}

// A tile's work: all that its loops over rows need beside pointers.
struct TileJob {
  Place place;
  TileDecay decay;
  std::int64_t terms;   // queries, or writes
  PrefetchColumn next;  // the lines it brings near

  template <class Args>
  TileJob(const Args& a, const Place& p, std::int64_t count, std::int64_t column)
      : place(p),
        decay(a, p),
        terms(count),
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

enum class Erase { kNone, kCollinear, kGeneral };

// kBefore: q or, if there is an erase, e reads S_(t-1), not S_t or P_t. kDirect: gradients of
// decays are summed directly.
template <Erase kErase_, bool kBefore, bool kDirect_>
struct Kind {
  static constexpr Erase kErase = kErase_;
  static constexpr bool kErases = kErase != Erase::kNone;
  static constexpr bool kReadBefore = kBefore && !kErases, kEraseBefore = kBefore && kErases;
  static constexpr bool kDirect = kDirect_;
};

// S through all rows. For direct sums the states at the begins of blocks are kept. All that a row
// does is done value by value, which hides the latency of the sums.
template <class Kind>
HWY_NOINLINE void sweep_state(const SweepArgs& a, const TileJob& job) {
  const D d;
  const Place& p = job.place;
  Tile s;
  load(d, a.state + p.state(a.groups), kKeyGroup, s);
  const std::int64_t rows = a.rows;
  const std::int64_t key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  const std::int64_t next_query = rows * key_pitch, next_output = rows * value_pitch;
  const std::int64_t keys = p.keys(), values = p.value;
  const float *k = a.k + keys, *w = a.write + values, *output_grad = a.output_grad + values;
  float *dq = a.dq + keys, *kept = nullptr, *de = nullptr;
  const float *dr = nullptr, *b = nullptr, *r = nullptr;
  if constexpr (Kind::kErases) de = a.de + keys, dr = a.read_grad + values;
  if constexpr (Kind::kErase == Erase::kGeneral) b = a.b + keys, r = a.read + values;
  if constexpr (Kind::kDirect) kept = a.states + p.state(a.groups);
  const auto row = [&](auto marked, std::int64_t t) HWY_ATTR OUZEL_INLINE_LAMBDA {
    const std::int64_t x = t * key_pitch, v = t * value_pitch;
    const RowDecay decay(job.decay, t);
    V f[kVectors];
    if constexpr (marked) decay.load(d, f);
    V key[kVectors], second[kVectors], q_sum[kVectors], e_sum[kVectors];
    load_keys(d, k + x, key);
    load_keys(d, dq + x, q_sum);
    if constexpr (Kind::kErases) load_keys(d, de + x, e_sum);
    if constexpr (Kind::kErase == Erase::kGeneral) load_keys(d, b + x, second);
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const V upstream = hn::Set(d, output_grad[v + i]);
      if constexpr (Kind::kReadBefore) add(s[i], upstream, q_sum);
      if constexpr (Kind::kEraseBefore) add(s[i], hn::Set(d, dr[v + i]), e_sum);
      if constexpr (marked) {
        decay.drop(d, f, i, s[i]);
        decay.multiply(d, f, i, s[i]);
      }
      if constexpr (Kind::kErases && !Kind::kEraseBefore) add(s[i], hn::Set(d, dr[v + i]), e_sum);
      add(key, hn::Set(d, w[v + i]), s[i]);
      if constexpr (Kind::kErase == Erase::kGeneral) add(second, hn::Set(d, r[v + i]), s[i]);
      if constexpr (!Kind::kReadBefore) add(s[i], upstream, q_sum);
    }
    store_keys(d, q_sum, dq + x);
    if constexpr (Kind::kErases) store_keys(d, e_sum, de + x);
  };
  const auto more_queries = [&](std::int64_t t) HWY_ATTR OUZEL_INLINE_LAMBDA {
    for (std::int64_t i = 1; HWY_UNLIKELY(i < job.terms); ++i) {
      read(d, s, output_grad + i * next_output + t * value_pitch,
           dq + i * next_query + t * key_pitch);
    }
  };
  const float* near = job.next.first;
  for (std::int64_t t = 0; t < rows; ++t, near += job.next.stride) {
    __builtin_prefetch(near, 0, 2);
    if (Kind::kDirect && t % kSweepBlock == 0) {
      store(d, s, kept, kKeyGroup);
      kept += a.groups * a.tiles * kStateTile;
    }
    if constexpr (Kind::kReadBefore) more_queries(t);
    if (HWY_UNLIKELY(job.decay.at[t])) {
      row(std::true_type(), t);
    } else {
      row(std::false_type(), t);
    }
    if constexpr (!Kind::kReadBefore) more_queries(t);
  }
}

// P~ of the rows [begin, end), from the state that was kept at `begin`.
template <class Kind>
HWY_NOINLINE void sweep_history(const SweepArgs& a, const TileJob& job, std::int64_t begin,
                                std::int64_t end) {
  const D d;
  const Place& p = job.place;
  const std::int64_t state = begin / kSweepBlock * a.groups * a.tiles * kStateTile;
  Tile s;
  load(d, a.states + state + p.state(a.groups), kKeyGroup, s);
  const std::int64_t keys = p.keys(), values = p.value;
  const float *k = a.k + keys, *w = a.write + values, *b = nullptr, *r = nullptr;
  if constexpr (Kind::kErase == Erase::kGeneral) b = a.b + keys, r = a.read + values;
  const std::int64_t key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  float* history = a.history;
  for (std::int64_t t = begin; t < end; ++t, history += kValues * kKeys) {
    const std::int64_t x = t * key_pitch, v = t * value_pitch;
    if (HWY_UNLIKELY(job.decay.at[t])) decay_row(d, s, RowDecay(job.decay, t));
    store(d, s, history, kKeys);
    write(d, s, k + x, w + v);
    if constexpr (Kind::kErase == Erase::kGeneral) write(d, s, b + x, r + v);
  }
}

// G back through the rows [begin, end).
template <class Kind>
HWY_NOINLINE void sweep_grad(const SweepArgs& a, const TileJob& job, std::int64_t begin,
                             std::int64_t end) {
  const D d;
  const Place& p = job.place;
  Tile g;
  load(d, (end == a.rows ? a.grad : a.grad_out) + p.state(a.groups), kKeyGroup, g);
  if (end == a.rows && job.decay.lambda != nullptr) multiply_keys(d, g, job.decay.lambda);
  const std::int64_t rows = a.rows;
  const std::int64_t key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  const std::int64_t next_query = rows * key_pitch, next_output = rows * value_pitch;
  const std::int64_t keys = p.keys(), values = p.value;
  const float *q = a.q + keys, *output_grad = a.output_grad + values;
  const float *k = nullptr, *e = nullptr, *w = a.write + values, *r = nullptr, *dr = nullptr;
  float *dk = a.dk + keys, *db = nullptr, *dg = nullptr;
  float* partial = a.partial + p.value % kValueTile * kLanes - begin * kValueTile * kLanes;
  const float* history = nullptr;
  if constexpr (Kind::kDirect) history = a.history - begin * kValues * kKeys;
  if constexpr (Kind::kErases) {
    e = a.e + keys, dr = a.read_grad + values;
  } else {
    k = a.k + keys;
  }
  if constexpr (Kind::kErase == Erase::kGeneral) r = a.read + values, db = a.db + keys;
  if constexpr (Kind::kDirect) dg = a.dg + keys;
  const auto row = [&](auto marked, std::int64_t t) HWY_ATTR OUZEL_INLINE_LAMBDA {
    const std::int64_t x = t * key_pitch, v = t * value_pitch;
    const RowDecay decay(job.decay, t);
    V f[kVectors];
    if constexpr (marked) decay.load(d, f);
    // `other` is what is read with v or what r was read with.
    V query[kVectors], other[kVectors], k_sum[kVectors], b_sum[kVectors], g_sum[kVectors];
    load_keys(d, q + x, query);
    load_keys(d, (Kind::kErases ? e : k) + x, other);
    load_keys(d, dk + x, k_sum);
    if constexpr (Kind::kErase == Erase::kGeneral) load_keys(d, db + x, b_sum);
    if constexpr (Kind::kDirect) load_keys(d, dg + x, g_sum);
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const V upstream = hn::Set(d, output_grad[v + i]);
      if constexpr (!Kind::kReadBefore) add(query, upstream, g[i]);
      add(g[i], hn::Set(d, w[v + i]), k_sum);
      if constexpr (Kind::kErase == Erase::kGeneral) add(g[i], hn::Set(d, r[v + i]), b_sum);
      if constexpr (!Kind::kErases) {
        float* to = partial + (t * kValueTile + i) * kLanes;
        V sum = hn::Load(d, to);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) sum = hn::MulAdd(g[i][j], other[j], sum);
        hn::Store(sum, d, to);
      } else if constexpr (!Kind::kEraseBefore) {
        add(other, hn::Set(d, dr[v + i]), g[i]);
      }
      if constexpr (marked) decay.drop(d, f, i, g[i]);
      if constexpr (Kind::kDirect) {
        const float* before = history + (t * kValues + i) * kKeys;
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          g_sum[j] = hn::MulAdd(g[i][j], hn::Load(d, before + j * kLanes), g_sum[j]);
        }
        if (marked && decay.values != nullptr) {
          float* to = partial + ((kSweepBlock + t) * kValueTile + i) * kLanes;
          V sum = hn::Load(d, to);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            sum = hn::MulAdd(g[i][j], hn::Load(d, before + j * kLanes), sum);
          }
          hn::Store(sum, d, to);
        }
      }
      if constexpr (marked) decay.multiply(d, f, i, g[i]);
      if constexpr (Kind::kEraseBefore) add(other, hn::Set(d, dr[v + i]), g[i]);
      if constexpr (Kind::kReadBefore) add(query, upstream, g[i]);
    }
    store_keys(d, k_sum, dk + x);
    if constexpr (Kind::kErase == Erase::kGeneral) store_keys(d, b_sum, db + x);
    if constexpr (Kind::kDirect) store_keys(d, g_sum, dg + x);
  };
  const auto more_queries = [&](std::int64_t t) HWY_ATTR OUZEL_INLINE_LAMBDA {
    for (std::int64_t i = 1; HWY_UNLIKELY(i < job.terms); ++i) {
      write(d, g, q + i * next_query + t * key_pitch,
            output_grad + i * next_output + t * value_pitch);
    }
  };
  const float* near = job.next.first + begin * job.next.stride;
  for (std::int64_t t = end - 1; t >= begin; --t, near += job.next.stride) {
    __builtin_prefetch(near, 0, 2);
    if constexpr (!Kind::kReadBefore) more_queries(t);
    if (HWY_UNLIKELY(job.decay.at[t])) {
      row(std::true_type(), t);
    } else {
      row(std::false_type(), t);
    }
    if constexpr (Kind::kReadBefore) more_queries(t);
  }
  store(d, g, a.grad_out + p.state(a.groups), kKeyGroup);
}

// Sums over lanes of 8 vectors, which are zeroed for the next sums.
HWY_INLINE void sum_lanes(D d, float* x, float* out) {
  const auto take = [&](std::int64_t i) HWY_ATTR {
    const V sum = hn::Load(d, x + i * kLanes);
    hn::Store(hn::Zero(d), d, x + i * kLanes);
    return sum;
  };
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  // Four vectors become one, a sum of each in every block of four lanes.
  const auto pair = [&](std::int64_t i) HWY_ATTR {
    const V a = take(i), b = take(i + 1);
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const hn::Repartition<double, D> d64;
  const auto four = [&](std::int64_t i) HWY_ATTR {
    const auto a = hn::BitCast(d64, pair(i)), b = hn::BitCast(d64, pair(i + 2));
    return hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, a, b)),
                   hn::BitCast(d, hn::InterleaveUpper(d64, a, b)));
  };
  const V low = four(0), high = four(4);
  const V sum = hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
  if constexpr (kLanes == 8) {
    hn::StoreU(sum, d, out);
  } else {
    // Blocks 0 and 1 are of the first four vectors, 2 and 3 of the others.
    const hn::Half<D> half;
    const auto a = hn::LowerHalf(half, sum), b = hn::UpperHalf(half, sum);
    hn::StoreU(hn::Add(hn::ConcatLowerLower(half, b, a), hn::ConcatUpperUpper(half, b, a)), half,
               out);
  }
#else
  for (std::int64_t i = 0; i < kValueTile; ++i) {
    out[i] = hn::GetLane(hn::SumOfLanes(d, take(i)));
  }
#endif
}
void sum_rows(std::int64_t rows, float* partial, float* out, std::int64_t pitch) {
  for (std::int64_t t = 0; t < rows; ++t) {
    sum_lanes(D(), partial + t * kValueTile * kLanes, out + t * pitch);
  }
}

// body(place) for the tiles of a group of keys, or of 8 values.
template <class Body>
HWY_INLINE void for_values(const SweepArgs& a, std::int64_t group, Body body) {
  for (std::int64_t key = 0; key < kKeyGroup; key += kKeys) {
    for (std::int64_t value = 0; value < a.tiles * kValueTile; value += kValues) {
      body(Place{group, key, value});
    }
  }
}
template <class Body>
HWY_INLINE void for_keys(std::int64_t groups, std::int64_t value, Body body) {
  for (std::int64_t key = 0; key < groups * kKeyGroup; key += kKeys) {
    for (std::int64_t i = 0; i < kValueTile; i += kValues) {
      body(Place{key / kKeyGroup, key % kKeyGroup, value + i});
    }
  }
}

template <class Kind>
void sweep(const SweepArgs& a) {
  const std::int64_t size = a.rows * a.key_pitch;
  for (float* sums : {a.dk, a.de, a.db, Kind::kDirect ? a.dg : nullptr}) {
    if (sums != nullptr) std::fill_n(sums, size, 0.0f);
  }
  std::fill_n(a.dq, a.queries * size, 0.0f);
  std::fill_n(a.partial, 2 * kSweepBlock * kValueTile * kLanes, 0.0f);
  // The pass over G has the more arithmetic to hide waiting behind.
  const std::int64_t tiles = a.tiles * kValueTile / kValues * (a.groups * kKeyGroup / kKeys);
  const std::int64_t later = std::min(tiles, a.prefetch_count);
  Columns columns{tiles, std::min(tiles, a.prefetch_count - later)};
  // A group's rows of keys stay in the first-level cache.
  for (std::int64_t group = 0; group < a.groups; ++group) {
    for_values(a, group, [&](const Place& p) HWY_ATTR {
      const std::int64_t column = columns.next();
      sweep_state<Kind>(
          a, TileJob(a, p, a.queries, column == Columns::kNone ? column : later + column));
    });
  }
  for (std::int64_t end = a.rows, begin; end > 0; end = begin) {
    begin = (end - 1) / kSweepBlock * kSweepBlock;
    columns = {tiles, later};
    for (std::int64_t value = 0; value < a.tiles * kValueTile; value += kValueTile) {
      for_keys(a.groups, value, [&](const Place& p) HWY_ATTR {
        const TileJob job(a, p, a.queries, columns.next());
        if constexpr (Kind::kDirect) sweep_history<Kind>(a, job, begin, end);
        sweep_grad<Kind>(a, job, begin, end);
      });
      const std::int64_t at = begin * a.value_pitch + value;
      if (a.dv != nullptr) sum_rows(end - begin, a.partial, a.dv + at, a.value_pitch);
      if (a.dgv != nullptr) {
        float* partial = a.partial + kSweepBlock * kValueTile * kLanes;
        sum_rows(end - begin, partial, a.dgv + at, a.value_pitch);
      }
    }
  }
}

template <Erase kErase, bool kBefore>
void sweep(const SweepArgs& a) {
  a.states != nullptr ? sweep<Kind<kErase, kBefore, true>>(a)
                      : sweep<Kind<kErase, kBefore, false>>(a);
}

template <Erase kErase>
void sweep(const SweepArgs& a) {
  a.before ? sweep<kErase, true>(a) : sweep<kErase, false>(a);
}

// Rows in order, or backwards; a row's decay comes before its write, or after.
template <bool kReverse, bool kDecayFirst>
HWY_INLINE void accumulate(D d, const AccumulateArgs& a, const TileJob& job, Tile& s) {
  const Place& p = job.place;
  const TileDecay& decay = job.decay;
  const std::int64_t rows = a.rows;
  const std::int64_t key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  const std::int64_t next_x = rows * key_pitch, next_a = rows * value_pitch;
  const float *keys = a.x + p.keys(), *values = a.a + p.value;
  const float* near = job.next.first;
  for (std::int64_t n = 0; n < rows; ++n, near += job.next.stride) {
    __builtin_prefetch(near, 0, 2);
    const std::int64_t t = kReverse ? rows - 1 - n : n;
    if (kDecayFirst && HWY_UNLIKELY(decay.at[t])) decay_row(d, s, RowDecay(decay, t));
    write(d, s, keys + t * key_pitch, values + t * value_pitch);
    for (std::int64_t i = 1; HWY_UNLIKELY(i < job.terms); ++i) {
      write(d, s, keys + i * next_x + t * key_pitch, values + i * next_a + t * value_pitch);
    }
    if (!kDecayFirst && HWY_UNLIKELY(decay.at[t])) decay_row(d, s, RowDecay(decay, t));
  }
}

HWY_NOINLINE void accumulate_tile(const AccumulateArgs& a, const TileJob& job) {
  const D d;
  const Place& p = job.place;
  const TileDecay& decay = job.decay;
  Tile s;
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) s[i][j] = hn::Zero(d);
  }
  if (!a.reverse) {
    accumulate<false, true>(d, a, job, s);
    if (decay.lambda != nullptr) multiply_keys(d, s, decay.lambda);
  } else if (a.before) {
    accumulate<true, true>(d, a, job, s);
  } else {
    accumulate<true, false>(d, a, job, s);
  }

  const float* state = a.state + p.state(a.groups);
  float* state_out = a.state_out + p.state(a.groups);
  float* low = a.low + p.state(a.groups);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    V total = decay.total == nullptr ? hn::Zero(d) : hn::Load(d, decay.total + j * kLanes);
    V shrink = math::expm1(d, total);
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const std::int64_t at = i * kKeyGroup + j * kLanes;
      if (a.value_total != nullptr) {
        total = hn::Set(d, a.value_total[p.value + i]);
        if (decay.total != nullptr) total = hn::Add(total, hn::Load(d, decay.total + j * kLanes));
        shrink = math::expm1(d, total);
      }
      // Below e^-80 nothing is left, not even of NaN.
      const auto kept = hn::Not(hn::Lt(total, hn::Set(d, -80.0f)));
      const V before = hn::IfThenElseZero(kept, hn::Load(d, state + at));
      V lost = hn::Load(d, low + at);
      lost = hn::IfThenElseZero(kept, hn::MulAdd(lost, shrink, lost));
      // Fast two-sum (Dekker): exact where S is the larger, which is where long sums are lost.
      const V change = hn::Add(s[i][j], hn::MulAdd(before, shrink, lost));
      const V after = hn::Add(before, change);
      hn::Store(after, d, state_out + at);
      hn::Store(hn::Sub(change, hn::Sub(after, before)), d, low + at);
    }
  }
}

}  // namespace

void BackwardSweep(const SweepArgs& a) {
  if (a.e == nullptr) {
    sweep<Erase::kNone>(a);
  } else if (a.b == nullptr) {
    sweep<Erase::kCollinear>(a);
  } else {
    sweep<Erase::kGeneral>(a);
  }
}

void AccumulateRows(const AccumulateArgs& a) {
  const std::int64_t tiles = a.tiles * kValueTile / kValues * (a.groups * kKeyGroup / kKeys);
  Columns columns{tiles, std::min(tiles, a.prefetch_count)};
  for (std::int64_t value = 0; value < a.tiles * kValueTile; value += kValueTile) {
    for_keys(a.groups, value, [&](const Place& p) HWY_ATTR {
      accumulate_tile(a, TileJob(a, p, a.writes, columns.next()));
    });
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
