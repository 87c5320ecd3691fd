// The rows of a law: the one form that every matrix-state law is packed into, a chunk of tokens of
// one head at a time, and what the engine computes from them.
//
//     P_t = diag(e^g_t) S_{t-1} diag(e^gv_t)                               decay
//     r_t = (erase_decayed ? P_t : S_{t-1})^T e_t                          what is erased
//     S_t = P_t + k_t (v_t - c_t * r_t)^T                                  collinear erase, or
//     S_t = P_t + b_t r_t^T + k_t v_t^T                                    general erase
//     o_t = S_t^T q_t,    or with a bonus    S_{t-1}^T q_t + (q_t . (u * k_t)) v_t
//
// c is a number, or one per value. The bonus goes without an erase.
//
// Scales, feature maps, norms, strengths on values and signs are applied while packing, so that the
// engine knows no law; the adjoint takes gradients of rows back to those of the inputs.
#pragma once

#include <cstdint>

#include "src/kernels/recurrence.h"
#include "src/kernels/strided_rows.h"
#include "src/ops/law.h"

namespace ouzel {

// What a law's rows hold: the same for all chunks of a call.
struct RowsKind {
  std::int64_t keys = 0, values = 0;  // K, V
  bool decay = false;                 // has g, a number a row
  bool decay_per_key = false;         // ... or K numbers
  bool value_decay = false;           // has gv
  EraseKind erase = EraseKind::kNone;
  bool erase_decayed = true;
  bool strength_per_value = false;  // c holds V numbers a row, not one
  bool bonus = false;               // reads before the write, with u
  // Rows of a token: all write (and erase), the last is read. Decays of the others are 0.
  std::int64_t rows_per_token = 1;
  // Queries of a token: query heads that read the same state.
  std::int64_t queries = 1;
};

// The pitches that the backward pass asks for, the largest of all. Not powers of two: such rows
// evict each other from the first-level cache.
inline constexpr std::int64_t rows_key_pitch(std::int64_t keys) { return padded(keys, 32) + 16; }
inline constexpr std::int64_t rows_value_pitch(std::int64_t values) {
  return padded(values, kSlab) + kSlab;
}

// Tokens of a chunk of the backward pass: states are kept at its begins.
inline std::int64_t backward_chunk(const RowsKind& kind) {
  return kChunk / kind.rows_per_token > 0 ? kChunk / kind.rows_per_token : 1;
}

// One chunk: at most 64 tokens. float32, filled up with zeros to pitches of whole vectors; null
// where the kind has none. Log decays are at most 0 and may be -inf, which drops the decayed term,
// even NaN.
struct LawRows {
  std::int64_t tokens = 0;       // rows: tokens * rows_per_token
  std::int64_t key_pitch = 0;    // K, up to a multiple of 16
  std::int64_t value_pitch = 0;  // the columns, up to a multiple of 32
  float* q = nullptr;            // [queries][tokens][key_pitch]
  float* k = nullptr;            // [rows][key_pitch]
  float* v = nullptr;            // [rows][value_pitch]
  float* g = nullptr;            // [rows] or [rows][key_pitch]
  float* gv = nullptr;           // [rows][value_pitch]
  float* e = nullptr;            // [rows][key_pitch]; pack may let it point to k
  float* b = nullptr;            // [rows][key_pitch], general erase
  float* c = nullptr;            // [rows] or [rows][value_pitch], collinear erase
  float* u = nullptr;            // [key_pitch], the same for all chunks
};

// Where a chunk's rows stand that the engine gathers itself: where they were packed, or as the
// caller has them. Those may have log decays above 0, for check_decays.
struct RowsView {
  StridedRows q, k, v, g, e, b;  // g: of decays per key
  float q_scale = 1;             // that q still lacks
  bool v_lacks_c = false;        // v must still be multiplied by c
};
inline RowsView view_of(const LawRows& rows) {
  const std::int64_t keys = rows.key_pitch, values = rows.value_pitch;
  return {.q = {rows.q, keys},
          .k = {rows.k, keys},
          .v = {rows.v, values},
          .g = {rows.g, keys},
          .e = {rows.e, keys},
          .b = {rows.b, keys}};
}

// Where rows come from: one state (sequence and value head) of one call. Tokens are counted in the
// order of the pass. Called by one thread at a time.
class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual std::int64_t tokens() const = 0;
  // Fills `rows` (its pointers and pitches are set) with tokens [first, first + rows.tokens);
  // values, gv and c per value of the columns [column, column + columns) only. Without q: all else.
  virtual void pack(std::int64_t first, std::int64_t column, std::int64_t columns,
                    LawRows& rows) = 0;
  // The same, but rows that need no change, of whole vectors, may stay where they are; those of
  // several queries are packed.
  virtual RowsView view(std::int64_t first, std::int64_t column, std::int64_t columns,
                        LawRows& rows) {
    pack(first, column, columns, rows);
    return view_of(rows);
  }
  // Throws Error(kInvalidArgument) if this log decay, the largest of a view, is no rounded 0.
  virtual void check_decays(float largest) const { (void)largest; }
  // Where row `first` of query r's output goes, columns from `column` on, and the stride between
  // tokens (may be negative).
  virtual float* output(std::int64_t r, std::int64_t first, std::int64_t column,
                        std::int64_t& stride) = 0;
  // Whether outputs go past the caches, because they are larger: rows and the columns of a task
  // must then be whole cache lines.
  virtual bool streams() const { return false; }
  // Columns of cache lines, a line a token, that pack will read of 64 tokens from `first` on: at
  // most `most` into `lines`, returns how many. They are fetched while the chunk before is
  // computed.
  virtual std::int64_t prefetch(std::int64_t first, std::int64_t column, std::int64_t columns,
                                PrefetchColumn* lines, std::int64_t most) const {
    (void)first, (void)column, (void)columns, (void)lines, (void)most;
    return 0;
  }
  // Where the state before token `first` is kept for the backward pass, from column `column` (a
  // multiple of 32) on, or null: slabs [columns / 32][keys up to a multiple of 32][32], zeros
  // beyond keys and columns. The forward pass fills it; the backward pass reads it.
  virtual float* kept(std::int64_t first, std::int64_t column) const {
    (void)first, (void)column;
    return nullptr;
  }
  // Called when the outputs of a chunk stand, for what a law adds to them (a skip).
  virtual void finish(std::int64_t first, std::int64_t tokens, std::int64_t column,
                      std::int64_t columns) {
    (void)first, (void)tokens, (void)column, (void)columns;
  }
};

// The adjoint: upstream gradients of outputs in, gradients of rows out. Chunks come last first.
class RowAdjoint {
 public:
  virtual ~RowAdjoint() = default;
  // Like RowSource::prefetch, the lines that its functions will read or write.
  virtual std::int64_t lines(std::int64_t first, PrefetchColumn* columns, std::int64_t room) const {
    (void)first, (void)columns, (void)room;
    return 0;
  }
  // The gradients of outputs, [queries][tokens][value_pitch], filled up with zeros.
  virtual void pack_output_grads(std::int64_t first, std::int64_t tokens, std::int64_t value_pitch,
                                 float* d_o) = 0;
  // Takes the gradients of a chunk's rows: `grads` has the shape of `rows`, g's in the logarithm,
  // 0 where a decay is -inf; u's are those of this chunk.
  virtual void unpack(std::int64_t first, const LawRows& rows, const LawRows& grads) = 0;
};

}  // namespace ouzel
