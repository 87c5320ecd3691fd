// The backward sweeps of the engine in key lanes by blocks of four rows, where decays are strong
// (rows_backward.h): of a block with decays F, writes k~ and reads q~
//
//     S:  dq += S do    de += S dr    then    S := F * S + k~ w^T + b~ r^T
//     G:  dk += G w     db += G r    dv += G^T k~     H = row sums of G * S
//         then    G := F * G + q~ do^T + e~ dr^T
//
// with S before the block and G after it.
#include "src/kernels/rows_backward.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_sweep_blocks.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/rows_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace {

enum class Erase { kNone, kCollinear, kGeneral };

// Where the state before a block is kept, of the kKeys keys of a column.
template <int kKeys>
float* state_of(const SweepArgs& a, const Place& p, std::int64_t block) {
  return a.states + (block * kKeptValues + p.value % kKeptValues) * kKeys;
}

// `key`: of the tile in its column.
template <Erase kErase, int kM, int kKeys>
HWY_NOINLINE void sweep_state(const BlockSweepArgs& a, const TileJob& job, std::int64_t key) {
  const D d;
  const Place p = job.place;
  Tile<kValues, kM> s;
  load(d, a.state + p.state(a), a.keys, s);
  const std::int64_t rows = a.rows, x = a.key_pitch, v = a.value_pitch;
  const float *k = a.k + p.key, *b = at_or_null(a.b, p.key), *factor = a.factor + p.key;
  const float *w = a.write + p.value, *upstream = a.output_grad + p.value;
  const float *r = at_or_null(a.read, p.value), *dr = at_or_null(a.read_grad, p.value);
  float *dq = a.dq + p.key, *de = at_or_null(a.de, p.key);
  const bool many = a.queries > 1;
  const float* near = job.next.first;
  float* kept = state_of<kKeys>(a, p, 0) + key;
  for (std::int64_t begin = 0, end; begin < rows; begin = end, kept += kKeptValues * kKeys) {
    end = block_end(rows, true, begin);
    store(d, s, kept, kKeys);
    for (std::int64_t t = begin; t < end; ++t, near += job.next.stride) {
      __builtin_prefetch(near, 0, 2);
      read(d, s, upstream + t * v, dq + t * x);
      for (std::int64_t n = 1; HWY_UNLIKELY(many) && n < a.queries; ++n) {
        read(d, s, upstream + (n * rows + t) * v, dq + (n * rows + t) * x);
      }
      if constexpr (kErase != Erase::kNone) read(d, s, dr + t * v, de + t * x);
    }
    multiply_keys(d, s, factor + begin * x);
    for (std::int64_t t = begin; t < end; ++t) {
      write(d, s, k + t * x, w + t * v);
      if constexpr (kErase == Erase::kGeneral) write(d, s, b + t * x, r + t * v);
    }
  }
}

// Back through the blocks of rows [from, to).
template <Erase kErase, int kN, int kM>
HWY_NOINLINE void sweep_grad(const BlockSweepArgs& a, const TileJob& job, std::int64_t from,
                             std::int64_t to) {
  const D d;
  const Place p = job.place;
  constexpr std::int64_t kKeys = kM * kLanes;
  Tile<kN, kM> g;
  const std::int64_t rows = a.rows, x = a.key_pitch, v = a.value_pitch;
  load(d, (to == rows ? a.grad : a.grad_out) + p.state(a), a.keys, g);
  const float *q = a.q + p.key, *k = a.k + p.key, *e = at_or_null(a.e, p.key);
  const float* factor = a.factor + p.key;
  const float *w = a.write + p.value, *upstream = a.output_grad + p.value;
  const float *r = at_or_null(a.read, p.value), *dr = at_or_null(a.read_grad, p.value);
  float *dk = a.dk + p.key, *db = at_or_null(a.db, p.key), *sums = a.gate_sums + p.key;
  float* dv = at_or_null(a.dv, p.value);
  const bool many = a.queries > 1;
  const float* near = job.next.first + from * job.next.stride;
  const float* before = state_of<kKeys>(a, p, blocks_before(rows, to));
  for (std::int64_t end = to, begin; end > from; end = begin) {
    begin = block_begin(rows, true, end);
    before -= kKeptValues * kKeys;
    read_products(d, g, before, kKeys, sums + begin * x);
    for (std::int64_t t = begin; t < end; ++t, near += job.next.stride) {
      __builtin_prefetch(near, 0, 2);
      read(d, g, w + t * v, dk + t * x);
      if constexpr (kErase == Erase::kGeneral) read(d, g, r + t * v, db + t * x);
      if constexpr (kErase == Erase::kNone) read_keys(d, g, k + t * x, 0, dv + t * v);
    }
    multiply_keys(d, g, factor + begin * x);
    for (std::int64_t t = begin; t < end; ++t) {
      write(d, g, q + t * x, upstream + t * v);
      for (std::int64_t n = 1; HWY_UNLIKELY(many) && n < a.queries; ++n) {
        write(d, g, q + (n * rows + t) * x, upstream + (n * rows + t) * v);
      }
      if constexpr (kErase != Erase::kNone) write(d, g, e + t * x, dr + t * v);
    }
  }
  store(d, g, a.grad_out + p.state(a), a.keys);
}

template <Erase kErase, int kN, int kM>
void sweep(const BlockSweepArgs& a) {
  // Half of the columns are brought near by each of the sweeps.
  const std::int64_t tiles = tiles_of<kValues, kVectors>(a), grad_tiles = tiles_of<kN, kM>(a);
  const std::int64_t later = std::min(grad_tiles, a.prefetch_count / 2);
  const std::int64_t sooner = std::min(tiles, a.prefetch_count - later);
  Columns state_columns{tiles, sooner};
  const std::int64_t rows = kM > 2 ? kGateBlock : a.rows;
  Columns grad_columns{grad_tiles, later};
  const auto part = [&](auto vectors, std::int64_t keys, std::int64_t values,
                        std::int64_t end_value) HWY_ATTR {
    constexpr int kWide = decltype(vectors)::value, kNarrow = HWY_MIN(kWide, kVectors);
    constexpr int kKeys = kWide * kLanes;
    for (std::int64_t key = keys; key < keys + kKeys; key += kNarrow * kLanes) {
      for (std::int64_t value = values; value < end_value; value += kValues) {
        const std::int64_t column = state_columns.next();
        const TileJob job(a, {key, value}, column == Columns::kNone ? column : later + column);
        sweep_state<kErase, kNarrow, kKeys>(a, job, key - keys);
      }
    }
    const Columns columns = grad_columns;
    for (std::int64_t end = a.rows, begin; end > 0; end = begin) {
      begin = (end - 1) / rows * rows;
      grad_columns = columns;
      for (std::int64_t value = values; value < end_value; value += kN) {
        const TileJob job(a, {keys, value}, grad_columns.next());
        sweep_grad<kErase, kN, kWide>(a, job, begin, end);
      }
    }
  };
  for_columns<kM>(a, [&](auto vectors, std::int64_t keys) HWY_ATTR {
    for (std::int64_t value = 0; value < a.values; value += kKeptValues) {
      part(vectors, keys, value, std::min(value + kKeptValues, a.values));
    }
  });
}

}  // namespace

void BlockSweep(const BlockSweepArgs& a) {
  zero_sums(a, a.rows);
  if (a.b != nullptr) {
    sweep<Erase::kGeneral, kValues, kVectors>(a);
  } else if (a.e != nullptr) {
    sweep<Erase::kCollinear, kValues, kVectors>(a);
  } else if (a.keys % (kWideVectors * kLanes) == 0) {
    sweep<Erase::kNone, kWideValues, kWideVectors>(a);
  } else {
    sweep<Erase::kNone, kValues, kVectors>(a);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(BlockSweep);
void block_sweep(Isa isa, const BlockSweepArgs& args) { OUZEL_DISPATCH(isa, BlockSweep)(args); }
}  // namespace ouzel
#endif
