// Kernels of the engine's backward (src/ops/rows_backward.cc): rows with folded decays, sweeps of a
// state and of its gradient in key lanes, and blocks of rows in value lanes for laws that erase.
//
// Where all decays of a chunk are mild they are folded into its rows: with Lambda_t their running
// product from the chunk's begin, S = Lambda * S~ turns S_t = d_t S_(t-1) + k_t v_t^T into S~_t =
// S~_(t-1) + (k_t / Lambda_t) v_t^T: nothing multiplies the state. Gradients G = G~ / Lambda go the
// same way, and G_t * P_t = G~_t * P~_t.
//
// Elsewhere four rows go as a block: they read the state before it, times the decays since its
// begin, and write to the state after it, times those to its end, with one multiplication of the
// state between. All factors are at most 1, and what the rows of a block do to each other, its
// share of gates' gradients too, is a matter of rows: no difference is formed, gates of -20 lose no
// digits. Blocks multiply where a decay of 0 must drop NaN: such chunks go row by row.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "src/kernels/recurrence.h"

namespace ouzel {

// Keys are padded to multiples of this.
inline constexpr std::int64_t kKeyGroup = 32;
// A tile in key lanes, at most. States in key lanes are [values][keys].
inline constexpr std::int64_t kTileValues = 8;
inline constexpr std::int64_t kTileKeys = 64;
// States in value lanes are slabs, [values / 32][keys][32].
inline constexpr std::int64_t kValueSlab = 32;
// Rows of a block of the sweeps where gates' gradients are summed directly: P~ of a tile then fits
// the first-level cache.
inline constexpr std::int64_t kHistoryBlock = 16;
inline constexpr std::int64_t kHistoryTile = 256;  // floats of a tile
// Values of which block_sweep keeps the states before blocks at a time, of up to kTileKeys keys: of
// all, they would fill the second-level cache.
inline constexpr std::int64_t kKeptValues = 32;
// Rows over which gates' gradients are summed from those of rows.
inline constexpr std::int64_t kGateBlock = 32;
// Rows of a block.
inline constexpr std::int64_t kRowBlock = 4;
// The rows of a chunk go in blocks of four, the last ones (`four` false: all) one by one.
inline std::int64_t block_end(std::int64_t rows, bool four, std::int64_t begin) {
  return begin + (four && begin + kRowBlock <= rows ? kRowBlock : 1);
}
inline std::int64_t block_begin(std::int64_t rows, bool four, std::int64_t end) {
  return end - (four && end <= rows / kRowBlock * kRowBlock ? kRowBlock : 1);
}
// Of a chunk, with `four`: the number of those that begin before a row.
inline std::int64_t blocks_before(std::int64_t rows, std::int64_t row) {
  const std::int64_t whole = rows / kRowBlock;
  return row <= whole * kRowBlock ? row / kRowBlock : whole + row % kRowBlock;
}

// Rows of keys are [rows][key_pitch] and those of values [rows][value_pitch], filled up with zeros
// to whole groups and slabs. Pitches should not be powers of two: such rows evict each other from
// the first-level cache.

// Decays of a chunk: lambda and inverse where they are folded into rows, factor elsewhere.
struct Folds {
  bool per_key = false;
  std::int64_t rows = 0;
  std::int64_t keys = 0;     // of per_key
  std::int64_t width = 0;    // the keys filled up, or 64 equal numbers
  std::int64_t pitch = 0;    // key_pitch, or 64
  float* lambda = nullptr;   // [rows + 1][pitch]: before row t, and at last
  float* inverse = nullptr;  // [rows + 1][pitch]: 1 / lambda
  float* factor = nullptr;   // [rows][pitch]: the decays themselves
  float* total = nullptr;    // [pitch]: the sum of log decays
};
// g: [rows], or [rows][pitch]. The least of them.
float least_decay(Isa isa, const float* g, const Folds& folds);
void fold_decays(Isa isa, const float* g, const Folds& folds);
// Returns whether one is 0.
bool row_decays(Isa isa, const float* g, const Folds& folds);

// Rows of `keys` numbers times a factor of the folds (null: 1), that after the row's decay (`next`)
// or before it. With every > 1, fold_rows takes [rows / every] rows to the last of each so many,
// and zeros to the others; unfold_rows the other way. `out` may be `in` with every = 1.
struct FoldRowsArgs {
  std::int64_t rows = 0, keys = 0, pitch = 0;
  std::int64_t every = 1;
  const float* factor = nullptr;
  const Folds* folds = nullptr;
  bool next = true;
};
void fold_rows(Isa isa, const FoldRowsArgs& args, const float* in, float* out);
void unfold_rows(Isa isa, const FoldRowsArgs& args, const float* in, float* out);
// out[rows]: sums of `keys` numbers of rows.
void sum_keys(Isa isa, const FoldRowsArgs& args, const float* in, float* out);

// y = e^x, `count` numbers (a multiple of 16).
void exponentials(Isa isa, std::int64_t count, const float* x, float* y);

// Gradients of log decays from those of rows, where every decay of the chunk is mild: with R the
// row sums of G * S after the last row of a block of 32, row by row from there, R += q * dq - k *
// dk - b * db + e * de, each at its place, is R before the row, and dg at the row's decay. Exact in
// real numbers; in float it is off by 3e-6 at gates of -1, and has no digits at -20.
struct GateArgs {
  std::int64_t rows = 0, keys = 0, pitch = 0, queries = 1, every = 1;
  bool before = false;                                                 // as for the sweeps
  const float* sums = nullptr;                                         // [blocks][pitch]: R
  const float *q = nullptr, *k = nullptr, *e = nullptr, *b = nullptr;  // [rows][pitch], or null
  const float *dq = nullptr, *dk = nullptr, *de = nullptr, *db = nullptr;
  float* dg = nullptr;  // [rows][pitch]
};
void gate_grads(Isa isa, const GateArgs& args);

// What the bonus adds: o_t += (q_t . (u * k_t)) v_t, its gradients to dq, dk, dv and du, rows of
// `key_pitch` and `value_pitch`.
struct BonusArgs {
  std::int64_t rows = 0, key_pitch = 0, value_pitch = 0;
  const float *q = nullptr, *k = nullptr, *u = nullptr, *v = nullptr;
  const float* output_grad = nullptr;
  float *dq = nullptr, *dk = nullptr, *du = nullptr, *dv = nullptr;
};
void bonus_grads(Isa isa, const BonusArgs& args);

// What the passes over a chunk have in common. Rows of keys are folded.
struct ChunkArgs {
  std::int64_t rows = 0;
  std::int64_t keys = 0, values = 0;  // up to multiples of 32 and of 8
  std::int64_t key_pitch = 0, value_pitch = 0;
  std::int64_t queries = 1;
  const Folds* folds = nullptr;        // null: no decay of keys
  const float* value_decay = nullptr;  // e^gv, or null
  bool before = false;                 // q or, if there is an erase, e reads S_(t-1)

  // The decays of a row's keys where they multiply the state; null: they do not.
  const float* key_decay(std::int64_t row) const {
    return folds == nullptr || folds->factor == nullptr ? nullptr
                                                        : folds->factor + row * folds->pitch;
  }
};

struct SweepArgs : ChunkArgs {
  const float* q = nullptr;  // [queries][rows]
  const float* k = nullptr;
  const float* e = nullptr;            // null: no erase
  const float* b = nullptr;            // null: collinear
  const float* output_grad = nullptr;  // [queries][rows]
  const float* write = nullptr;        // what is written with k: v, or v - c * r
  const float* read = nullptr;         // r
  const float* read_grad = nullptr;    // its gradient
  const float* state = nullptr;        // in key lanes: S at the begin of the chunk
  const float* state_end = nullptr;    // ... and at its end, for gate_sums
  const float* grad = nullptr;         // in key lanes: G at its end
  float* grad_out = nullptr;           // G at its begin; may be `grad`
  float* dq = nullptr;                 // like q: sums, to be unfolded
  float* dk = nullptr;
  float* de = nullptr;
  float* db = nullptr;
  float* dv = nullptr;  // without erase
  // Gradients of gates: direct sums dg, and with value_decay dgv; or, of mild decays, the sums that
  // gate_grads begins with.
  float* dg = nullptr;
  float* dgv = nullptr;
  float* gate_sums = nullptr;
  float* states = nullptr;   // [blocks of rows] states, scratch; null: without decays
  float* history = nullptr;  // [16][256], scratch
  // Lines that are brought into the second-level cache meanwhile, a column a tile.
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0;
};
// Sweeps S through the chunk, then G back through it, tile by tile.
void backward_sweep(Isa isa, const SweepArgs& args);

// The same in blocks of four, with rows as block_products multiplies them. The sums lack what
// block_grads adds; dg is left to it.
struct BlockSweepArgs : SweepArgs {
  const float* factor = nullptr;  // as ErasingArgs::block_factor
  // gate_sums: [rows][key_pitch], of G after a block times S before it in the place of its first
  // row. states: [blocks][kKeptValues][kTileKeys].
};
void block_sweep(Isa isa, const BlockSweepArgs& args);

// From the sums of block_sweep to gradients of rows and of decays, in place.
struct BlockGradArgs : ChunkArgs {
  // As packed, but that q has all rows.
  const float *q = nullptr, *k = nullptr, *e = nullptr, *b = nullptr;
  const float *output_grad = nullptr, *write = nullptr, *read = nullptr, *read_grad = nullptr;
  const float* qk = nullptr;  // of block_products
  const float* gate_sums = nullptr;
  float *dq = nullptr, *dk = nullptr, *de = nullptr, *db = nullptr;
  float* dv = nullptr;  // without erase
  float* dg = nullptr;
  // Scratch for inner products of what rows read and write: [queries][rows][4], and [rows][4].
  float *qw = nullptr, *qr = nullptr, *ew = nullptr, *er = nullptr;
};
void block_grads(Isa isa, const BlockGradArgs& args);

// S += S expm1(sum of log decays) + what the chunk's rows write, which is summed from zero; in two
// parts, S and what it lost to rounding, so that long sums stay exact. No erase.
struct AccumulateArgs : ChunkArgs {
  bool reverse = false;                // G: rows last to first
  const float* value_total = nullptr;  // [values]: sums of gv
  std::int64_t writes = 1;
  const float* x = nullptr;      // [writes][rows]
  const float* a = nullptr;      // [writes][rows]
  const float* state = nullptr;  // in key lanes: S before
  float* state_out = nullptr;    // and after; may be `state`
  float* low = nullptr;
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0;
};
void accumulate_rows(Isa isa, const AccumulateArgs& args);

// Blocks of four rows in value lanes: what the rows read of the state before the block, a
// substitution with their inner products, and one update. Forward it yields what is erased,
// backward the gradients of values and of what was erased. Rows may also go one by one, where
// values decay or a decay of 0 must drop NaN.
struct ErasingArgs : ChunkArgs {
  const float* q = nullptr;
  const float* k = nullptr;
  const float* e = nullptr;
  const float* b = nullptr;
  const float* v = nullptr;
  const float* c = nullptr;  // [rows], or [rows][value_pitch]; collinear
  bool c_per_value = false;
  bool four = true;  // blocks of four, as far as there are
  // Rows times the decays of their block since its begin, or to its end, like q and so on; and all
  // of those, in the place of its first.
  float *block_q = nullptr, *block_k = nullptr, *block_e = nullptr, *block_b = nullptr;
  float* block_factor = nullptr;  // [rows][key_pitch]
  float* state = nullptr;         // slabs: S or G
  float* low = nullptr;           // what it lost to rounding; null: the sum is plain
  float* r = nullptr;
  const float* output_grad = nullptr;
  float* written = nullptr;  // v - c * r, collinear
  float* dv = nullptr;
  float* dr = nullptr;
  float* dc = nullptr;                // like c
  bool erase_products_stand = false;  // ek and eb are known already
  // Inner products with the block's earlier rows, [rows][4]: e.k, e.b, and [queries] q.k, q.b.
  float *ek = nullptr, *eb = nullptr, *qk = nullptr, *qb = nullptr;
};
void block_products(Isa isa, const ErasingArgs& args);
void block_forward(Isa isa, const ErasingArgs& args);
void block_backward(Isa isa, const ErasingArgs& args);

// States in value lanes, in key lanes.
void transpose_slabs(Isa isa, std::int64_t keys, std::int64_t values, const float* slabs,
                     float* transposed);

}  // namespace ouzel
