// Kernels of the engine's backward (src/ops/rows_backward.cc): rows with folded decays, sweeps of a
// state and of its gradient in key lanes, and blocks of rows in value lanes for laws that erase.
//
// Folding: with Lambda_t the running product of decays, S = Lambda * S~ turns S_t = d_t S_(t-1) +
// k_t v_t^T into S~_t = S~_(t-1) + (k_t / Lambda_t) v_t^T: nothing multiplies the state. Gradients
// G = G~ / Lambda go the same way, and G_t * P_t = G~_t * P~_t. Before Lambda falls below 2^-60 in
// one of a group of keys, S~ is multiplied by it (by 0 where a decay is 0, even over NaN) and
// Lambda begins anew at 1: a fold. Chunks begin with Lambda = 1.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "src/kernels/recurrence.h"

namespace ouzel {

// Folded rows stand in groups of keys, [groups][rows][32].
inline constexpr std::int64_t kKeyGroup = 32;
// States in key lanes are tiles, [values / 8][groups][8][32].
inline constexpr std::int64_t kValueTile = 8;
inline constexpr std::int64_t kStateTile = kValueTile * kKeyGroup;
// States in value lanes are slabs, [values / 32][32 groups][32].
inline constexpr std::int64_t kValueSlab = 32;
// Rows of a block of the sweeps: P~ of a tile of values and keys then fits the first-level cache.
inline constexpr std::int64_t kSweepBlock = 16;
// Rows of a block in value lanes.
inline constexpr std::int64_t kRowBlock = 4;

// Decays of a chunk.
struct Folds {
  bool per_key = false;
  std::int64_t groups = 0, rows = 0;  // groups: 1 unless per key
  float* lambda = nullptr;            // [groups][rows + 1][32]: before row t, and at last
  float* inverse = nullptr;           // [groups][rows + 1][32]: 1 / lambda
  float* factor = nullptr;            // [groups][rows][32]: what a fold multiplies by
  std::uint8_t* fold = nullptr;       // [groups][rows]: whether S~ is folded before the row
  float* total = nullptr;             // [groups][32]: the sum of log decays
};
// g: [rows], or [rows][pitch]. Returns the least of them.
float fold_decays(Isa isa, const float* g, std::int64_t pitch, const Folds& folds);

// A chunk's rows between [rows][pitch] and groups, times a factor of the folds (null: 1) that
// `next` takes after the row's decay and not before. With every > 1 the last of each so many
// rows stand in [rows / every][pitch]; the others are 0.
struct GroupArgs {
  std::int64_t rows = 0, groups = 0, pitch = 0;
  std::int64_t every = 1;
  const float* factor = nullptr;
  bool per_key = false;
  bool next = true;
};
void group_rows(Isa isa, const GroupArgs& args, const float* in, float* out);
void ungroup_rows(Isa isa, const GroupArgs& args, const float* in, float* out);
// out[rows]: sums of rows of `pitch`.
void sum_keys(Isa isa, std::int64_t rows, std::int64_t pitch, const float* in, float* out);

// Rows of values, [rows][pitch], as [tiles][rows][8]: rows a power of two apart would evict each
// other from the first-level cache.
void group_values(Isa isa, std::int64_t rows, std::int64_t tiles, std::int64_t pitch,
                  const float* in, float* out);

// y = e^x, `count` numbers (a multiple of 16).
void exponentials(Isa isa, std::int64_t count, const float* x, float* y);

// Gradients of log decays from those of rows, where every decay of the chunk is mild: with R the
// row sums of G * S after its last row, row by row from there, R += q * dq - k * dk - b * db + e *
// de, each at its place, is R before the row, and dg at the row's decay. Exact in real numbers; in
// float it is off by 3e-6 at gates of -1, and has no digits at -20.
struct GateArgs {
  std::int64_t rows = 0, groups = 0, value_tiles = 0, pitch = 0, queries = 1, every = 1;
  bool before = false;           // as for the sweeps
  const float* state = nullptr;  // tiles: S and G after the last row
  const float* grad = nullptr;
  const float *q = nullptr, *k = nullptr, *e = nullptr, *b = nullptr;  // [rows][pitch], or null
  const float *dq = nullptr, *dk = nullptr, *de = nullptr, *db = nullptr;
  float* sums = nullptr;  // [32 groups]: R
  float* dg = nullptr;    // [rows][pitch]
};
void gate_sums(Isa isa, const GateArgs& args);
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

// Rows of keys are folded and grouped, [groups][rows][32]; so are those of values,
// [tiles][rows][8].
struct SweepArgs {
  std::int64_t rows = 0, groups = 0, value_tiles = 0, pitch = 0;
  std::int64_t queries = 1;
  const Folds* folds = nullptr;  // null: no decay of keys
  // Rows where a tile decays, in groups like those of the folds (one if there are none).
  const std::uint8_t* marks = nullptr;
  const float* value_decay = nullptr;  // e^gv, or null
  bool before = false;                 // q or, if there is an erase, e reads S_(t-1)
  const float* q = nullptr;            // [queries][groups][rows][32]
  const float* k = nullptr;
  const float* e = nullptr;            // null: no erase
  const float* b = nullptr;            // null: collinear
  const float* output_grad = nullptr;  // [queries][tiles][rows][8]
  const float* write = nullptr;        // what is written with k: v, or v - c * r
  const float* read = nullptr;         // r
  const float* read_grad = nullptr;    // its gradient
  const float* state = nullptr;        // tiles: S at the begin of the chunk
  const float* grad = nullptr;         // tiles: G at its end
  float* grad_out = nullptr;           // G at its begin; may be `grad`
  float* dq = nullptr;                 // like q: sums, to be unfolded
  float* dk = nullptr;
  float* de = nullptr;
  float* db = nullptr;
  float* dg = nullptr;       // null: not wanted
  float* dv = nullptr;       // [rows][pitch], without erase
  float* dgv = nullptr;      // [rows][pitch], with value_decay
  float* states = nullptr;   // [blocks of rows] states, scratch; null: dg and dgv are not wanted
  float* history = nullptr;  // [16][8][32], scratch
  float* partial = nullptr;  // [2][16][8][16], scratch
  // Lines that are brought into the second-level cache meanwhile, a column a tile.
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0;
};
// Sweeps S through the chunk, then G back through it, tile by tile.
void backward_sweep(Isa isa, const SweepArgs& args);

// S += S expm1(sum of log decays) + what the chunk's rows write, which is summed from zero; in two
// parts, S and what it lost to rounding, so that long sums stay exact. No erase.
struct AccumulateArgs {
  std::int64_t rows = 0, groups = 0, value_tiles = 0;
  bool reverse = false;     // G: rows last to first
  bool decay_first = true;  // a row's decay comes before its write
  const Folds* folds = nullptr;
  // Rows where a tile decays, in groups like those of the folds (one if there are none).
  const std::uint8_t* marks = nullptr;
  const float* value_decay = nullptr;  // [tiles][rows][8]
  const float* value_total = nullptr;  // [values]: sums of gv
  std::int64_t writes = 1;
  const float* x = nullptr;  // [writes][groups][rows][32]
  const float* a = nullptr;  // [writes][tiles][rows][8]
  float* state = nullptr;    // tiles
  float* low = nullptr;
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0;
};
void accumulate_rows(Isa isa, const AccumulateArgs& args);

// Blocks of rows in value lanes. Within a block of 4 nothing is folded but at its first row, so
// that a block is: what its rows read of the state before it, a substitution with their inner
// products, and one update. Forward it yields what is erased, backward the gradients of values and
// of what was erased.
struct BlockArgs {
  std::int64_t rows = 0, groups = 0, slabs = 0, pitch = 0;
  std::int64_t queries = 1;
  const Folds* folds = nullptr;
  const float* value_decay = nullptr;
  bool read_before = false, erase_before = false;
  const float* q = nullptr;
  const float* k = nullptr;
  const float* e = nullptr;
  const float* b = nullptr;
  const float* v = nullptr;
  const float* c = nullptr;  // [rows], or [rows][pitch]; collinear
  bool c_per_value = false;
  const std::uint8_t* first = nullptr;  // [rows + 1]: whether a block begins at the row
  float* state = nullptr;               // slabs: S or G
  float* r = nullptr;                   // [rows][pitch]
  const float* output_grad = nullptr;
  float* written = nullptr;  // v - c * r, collinear
  float* dv = nullptr;
  float* dr = nullptr;
  float* dc = nullptr;  // like c
  // Inner products with the block's earlier rows, [rows][4]: e.k, e.b, and [queries] q.k, q.b.
  float *ek = nullptr, *eb = nullptr, *qk = nullptr, *qb = nullptr;
};
void block_products(Isa isa, const BlockArgs& args);
void block_forward(Isa isa, const BlockArgs& args);
void block_backward(Isa isa, const BlockArgs& args);

// Slabs as tiles.
void tiles_from_slabs(Isa isa, std::int64_t groups, std::int64_t value_tiles, const float* slabs,
                      float* tiles);

}  // namespace ouzel
