// The backward sweeps of the engine in key lanes: a tile of S~, then of G~, stays in registers
// while the rows of a chunk pass by. Gradients of rows of keys then need no sums over lanes; only
// those of values do.
//
//     S:  [read e or q] fold [read e] write k, b [read q]      reads: dx_t += S~ a_t, a a gradient
//     G:  the same backwards, reads and writes exchanged, and  dg_t = row sums of G~ * P~
#include "src/kernels/rows_backward.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_sweep.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/rows_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace {

enum class Erase { kNone, kCollinear, kGeneral };

// kBefore: q or, if there is an erase, e reads S_(t-1), not S_t or P_t. kDirect: rows decay the
// tile, and gradients of decays are summed directly; else decays are folded into the rows.
template <Erase kErase_, bool kBefore, bool kDirect_>
struct Kind {
  static constexpr Erase kErase = kErase_;
  static constexpr bool kErases = kErase != Erase::kNone, kGeneral = kErase == Erase::kGeneral;
  static constexpr bool kReadBefore = kBefore && !kErases, kEraseBefore = kBefore && kErases;
  static constexpr bool kDirect = kDirect_;
  static constexpr std::int64_t kBlock = kDirect ? kHistoryBlock : kGateBlock;
};

// S through all rows. Where gradients of gates are wanted, the states between blocks are kept.
template <class Kind, int kN, int kM>
HWY_NOINLINE void sweep_state(const SweepArgs& a, const TileJob& job) {
  const D d;
  const Place p = job.place;
  Tile<kN, kM> s;
  load(d, a.state + p.state(a), a.keys, s);
  const std::int64_t rows = a.rows, key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  const float *k = a.k + p.key, *b = at_or_null(a.b, p.key);
  const float *w = a.write + p.value, *upstream = a.output_grad + p.value;
  const float *r = at_or_null(a.read, p.value), *dr = at_or_null(a.read_grad, p.value);
  float *dq = a.dq + p.key, *de = at_or_null(a.de, p.key);
  const bool many = a.queries > 1;
  const auto read_queries = [&](std::int64_t x, std::int64_t v) HWY_ATTR {
    read(d, s, upstream + v, dq + x);
    for (std::int64_t n = 1; HWY_UNLIKELY(many) && n < a.queries; ++n) {
      read(d, s, upstream + n * rows * value_pitch + v, dq + n * rows * key_pitch + x);
    }
  };
  float* kept = at_or_null(a.states, p.state(a));
  const float* near = job.next.first;
  const std::int64_t stride = job.next.stride;
  // x and v: where row t of keys and of values begins.
  for (std::int64_t t = 0, x = 0, v = 0; t < rows;) {
    const std::int64_t end = kept == nullptr ? rows : std::min(rows, t + Kind::kBlock);
    for (; t < end; ++t, x += key_pitch, v += value_pitch) {
      __builtin_prefetch(near, 0, 2);
      near += stride;
      if constexpr (Kind::kReadBefore) read_queries(x, v);
      if constexpr (Kind::kEraseBefore) read(d, s, dr + v, de + x);
      if constexpr (Kind::kDirect) decay_row(d, s, job.decay, t);
      if constexpr (Kind::kErases && !Kind::kEraseBefore) read(d, s, dr + v, de + x);
      write(d, s, k + x, w + v);
      if constexpr (Kind::kGeneral) write(d, s, b + x, r + v);
      if constexpr (!Kind::kReadBefore) read_queries(x, v);
    }
    if (t == rows) break;
    store(d, s, kept, a.keys);
    kept += a.keys * a.values;
  }
}

// P~ of the rows [begin, end), from the state that was kept before.
template <class Kind, int kN, int kM>
HWY_NOINLINE void sweep_history(const SweepArgs& a, const TileJob& job, std::int64_t begin,
                                std::int64_t end) {
  const D d;
  const Place p = job.place;
  const float* states =
      begin == 0 ? a.state : a.states + (begin / kHistoryBlock - 1) * a.keys * a.values;
  Tile<kN, kM> s;
  load(d, states + p.state(a), a.keys, s);
  float* history = a.history;
  for (std::int64_t t = begin; t < end; ++t, history += kHistoryTile) {
    const std::int64_t x = t * a.key_pitch + p.key, v = t * a.value_pitch + p.value;
    decay_row(d, s, job.decay, t);
    store(d, s, history, kM * kLanes);
    write(d, s, a.k + x, a.write + v);
    if constexpr (Kind::kGeneral) write(d, s, a.b + x, a.read + v);
  }
}

// G back through the rows [begin, end).
template <class Kind, int kN, int kM>
HWY_NOINLINE void sweep_grad(const SweepArgs& a, const TileJob& job, std::int64_t begin,
                             std::int64_t end) {
  const D d;
  const Place p = job.place;
  const TileDecay& decay = job.decay;
  Tile<kN, kM> g;
  load(d, (end == a.rows ? a.grad : a.grad_out) + p.state(a), a.keys, g);
  const std::int64_t rows = a.rows, key_pitch = a.key_pitch, value_pitch = a.value_pitch;
  const float *q = a.q + p.key, *k = a.k + p.key, *e = at_or_null(a.e, p.key);
  const float *w = a.write + p.value, *upstream = a.output_grad + p.value;
  const float *r = at_or_null(a.read, p.value), *dr = at_or_null(a.read_grad, p.value);
  float *dk = a.dk + p.key, *db = at_or_null(a.db, p.key), *dg = at_or_null(a.dg, p.key);
  float* sums = at_or_null(a.gate_sums, p.key);
  float *dv = at_or_null(a.dv, p.value), *dgv = at_or_null(a.dgv, p.value);
  const bool many = a.queries > 1, sums_gates = !Kind::kDirect && a.gate_sums != nullptr;
  const auto write_queries = [&](std::int64_t x, std::int64_t v) HWY_ATTR {
    write(d, g, q + x, upstream + v);
    for (std::int64_t n = 1; HWY_UNLIKELY(many) && n < a.queries; ++n) {
      write(d, g, q + n * rows * key_pitch + x, upstream + n * rows * value_pitch + v);
    }
  };
  if (end == rows) {
    if (sums_gates) {
      read_products(d, g, a.state_end + p.state(a), a.keys,
                    sums + (rows - 1) / kGateBlock * key_pitch);
    }
    if (decay.lambda != nullptr) multiply_keys(d, g, decay.lambda);
  }
  const std::int64_t stride = job.next.stride;
  const float* near = job.next.first + begin * stride;
  const float* before = at_or_null(a.history, (end - begin) * kHistoryTile);
  std::int64_t x = end * key_pitch, v = end * value_pitch;
  for (std::int64_t t = end; t > begin;) {
    std::int64_t stop = begin;
    if (sums_gates) {
      const std::int64_t block = (t - 1) / kGateBlock;
      stop = std::max(begin, block * kGateBlock);
      if (t < rows) {
        const float* s = a.states + block * a.keys * a.values + p.state(a);
        read_products(d, g, s, a.keys, sums + block * key_pitch);
      }
    }
    while (t > stop) {
      --t, x -= key_pitch, v -= value_pitch;
      __builtin_prefetch(near, 0, 2);
      near += stride;
      if constexpr (!Kind::kReadBefore) write_queries(x, v);
      read(d, g, w + v, dk + x);
      if constexpr (Kind::kGeneral) read(d, g, r + v, db + x);
      if constexpr (!Kind::kErases) read_keys(d, g, k + x, 0, dv + v);
      if constexpr (Kind::kErases && !Kind::kEraseBefore) write(d, g, e + x, dr + v);
      if constexpr (Kind::kDirect) {
        before -= kHistoryTile;
        // What a factor of 0 drops adds nothing, even of NaN.
        const float *keys = decay.keys_at(t), *values = decay.values_at(t);
        if (keys != nullptr) drop_keys(d, g, keys);
        if (values != nullptr) drop_values(d, g, values);
        read_products(d, g, before, kM * kLanes, dg + x);
        if (values != nullptr) read_keys(d, g, before, kM * kLanes, dgv + v);
        decay_row(d, g, decay, t);
      }
      if constexpr (Kind::kEraseBefore) write(d, g, e + x, dr + v);
      if constexpr (Kind::kReadBefore) write_queries(x, v);
    }
  }
  store(d, g, a.grad_out + p.state(a), a.keys);
}

// The rows that a tile of G goes back through at a time: those of a wide one, and what is summed
// for them, would leave the first-level cache.
template <class Kind, int kM>
constexpr std::int64_t grad_rows(const SweepArgs& a) {
  return Kind::kDirect ? kHistoryBlock : kM > 2 ? kGateBlock : a.rows;
}

template <class Kind, int kN, int kM>
void sweep(const SweepArgs& a) {
  // Half of the columns are brought near by each of the sweeps.
  const std::int64_t tiles = tiles_of<kValues, kVectors>(a);
  const std::int64_t later = std::min(tiles, a.prefetch_count / 2);
  Columns columns{tiles, std::min(tiles, a.prefetch_count - later)};
  for_tiles<kValues, kVectors>(a, [&](auto vectors, const Place& p) HWY_ATTR {
    const std::int64_t column = columns.next();
    sweep_state<Kind, kValues, decltype(vectors)::value>(
        a, TileJob(a, p, column == Columns::kNone ? column : later + column));
  });
  const std::int64_t block = grad_rows<Kind, kM>(a);
  for (std::int64_t end = a.rows, begin; end > 0; end = begin) {
    begin = (end - 1) / block * block;
    columns = {tiles_of<kN, kM>(a), later};
    for_tiles<kN, kM>(a, [&](auto vectors, const Place& p) HWY_ATTR {
      constexpr int kTile = decltype(vectors)::value;
      const TileJob job(a, p, columns.next());
      if constexpr (Kind::kDirect) sweep_history<Kind, kN, kTile>(a, job, begin, end);
      sweep_grad<Kind, kN, kTile>(a, job, begin, end);
    });
  }
}

template <class Kind>
void sweep(const SweepArgs& a) {
  if constexpr (!Kind::kErases) {
    if (a.keys % (kWideVectors * kLanes) == 0) return sweep<Kind, kWideValues, kWideVectors>(a);
  }
  sweep<Kind, kValues, kVectors>(a);
}

template <Erase kErase, bool kBefore>
void sweep(const SweepArgs& a) {
  a.dg != nullptr ? sweep<Kind<kErase, kBefore, true>>(a) : sweep<Kind<kErase, kBefore, false>>(a);
}

template <Erase kErase>
void sweep(const SweepArgs& a) {
  a.before ? sweep<kErase, true>(a) : sweep<kErase, false>(a);
}

}  // namespace

void BackwardSweep(const SweepArgs& a) {
  zero_sums(a, (a.rows + kGateBlock - 1) / kGateBlock);
  if (a.e == nullptr) {
    sweep<Erase::kNone>(a);
  } else if (a.b == nullptr) {
    sweep<Erase::kCollinear>(a);
  } else {
    sweep<Erase::kGeneral>(a);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(BackwardSweep);
void backward_sweep(Isa isa, const SweepArgs& args) { OUZEL_DISPATCH(isa, BackwardSweep)(args); }
}  // namespace ouzel
#endif
