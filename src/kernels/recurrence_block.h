// Kernels of the engine (src/ops/rows.h has its recurrence). Rows go through a slab of 32 columns
// of the state in blocks of four: all that a block reads of the state is read in one sweep over the
// slab, what its rows owe to each other is made up for with small matrices, and all that it writes
// is written in a second sweep. Rows of keys are [rows][key_pitch], a multiple of 16, filled up
// with zeros; rows of values [rows][value_pitch], a multiple of 32; the last block likewise.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "src/kernels/recurrence.h"

namespace ouzel {

inline constexpr std::int64_t kBlock = 4;

// e^g and e^g - 1 of `count` numbers; the result may be g. Whether some e^g is exactly 0.
bool decay_factors(Isa isa, std::int64_t count, const float* g, float* factor);
void decay_minus_1(Isa isa, std::int64_t count, const float* g, float* factor_minus_1);
bool all_finite(Isa isa, std::int64_t count, const float* x);

// The small matrices of a block, [writers: k, b][pairs_pitch]: for a row i that reads and a row j
// that writes, the sum over keys of read_i write_j and of the decays between the two: first those
// with i > j, row by row, then the diagonal, which the erase does not read.
inline constexpr int pair_of(int i, int j) { return i == j ? 6 + i : i * (i - 1) / 2 + j; }
// Where the pairs of query r begin; those of the erase are the first.
inline constexpr std::int64_t query_pairs(bool erase, std::int64_t r) {
  return erase ? (r == 0 ? 6 : 4 + 12 * r) : 12 * r;
}
inline constexpr std::int64_t pairs_pitch(bool erase, std::int64_t queries) {
  return (erase ? 4 : 0) + 12 * queries;
}

// What a chunk's rows of keys hold for all slabs: the small matrices and, with a decay per key,
// rows with the decays folded in. A block's reads get the product of decays from where the state
// stands; writes the product up to the block's end, over the factor that the state then still
// lacks: only where that would fall below 2^-60, or at the chunk's end, is the state itself
// multiplied.
struct KeyRowsArgs {
  std::int64_t blocks = 0, key_pitch = 0;
  std::int64_t queries = 1, query_stride = 0;
  float* q = nullptr;
  float* k = nullptr;
  const float* e = nullptr;  // null: no erase; may be k
  float* b = nullptr;        // null: no erase, or one with k
  const float* u = nullptr;  // not null: q reads before the decay, and the diagonal is q . (u * k)
  bool erase_decayed = true;

  bool fold = true;  // false: multiply the state at every block's end
  // Log decays [rows][key_pitch], or null: not per key. They become decays, and are folded into q,
  // k and b in place, and into e_folded, which may be e if that is not k.
  float* g = nullptr;
  float* e_folded = nullptr;
  float* missing = nullptr;  // [2][key_pitch], scratch: what the state lacks, sums of g
  // Decays [rows], or null: not one a row. The factors [rows] are then left to what is read for the
  // erase and for queries, and to what is written.
  const float* decay = nullptr;
  float *erase_factor = nullptr, *read_factor = nullptr, *write_factor = nullptr;

  float* leave = nullptr;  // [blocks] or [blocks][key_pitch]: what the state is multiplied by
  bool* leaves = nullptr;  // [blocks]: whether it is

  float* pairs = nullptr;  // [blocks][writers][pairs_pitch]
};
// Returns whether some decay may be exactly 0.
bool fold_key_rows(Isa isa, const KeyRowsArgs& args);

// 32 columns of a state, of the values and of the outputs.
struct BlockSlab {
  // [keys, filled up to an even number][32], before and after; may be the same.
  const float* state_in = nullptr;
  float* state = nullptr;
  // Not null: the sum is in two parts (without erase).
  const float* low_in = nullptr;
  float* low = nullptr;

  const float* v = nullptr;
  const float* c = nullptr;                    // [rows], or [rows][value_pitch] per value
  const float* value_decay = nullptr;          // e^gv [rows][value_pitch], or null
  const float* value_leave_minus_1 = nullptr;  // [blocks][value_pitch], of sums in two parts

  // [queries][out_pitch]: where a row's output goes, `width` numbers, or null: it is not read.
  float* const* out = nullptr;
  std::int64_t width = 0;
};

// A chunk through some slabs, two at a time where there are as many.
struct BlockArgs {
  std::int64_t blocks = 0;
  std::int64_t keys = 0, key_pitch = 0, value_pitch = 0;

  // Of fold_key_rows.
  std::int64_t queries = 1, query_stride = 0;
  const float* q = nullptr;
  const float* k = nullptr;
  const float* e = nullptr;
  const float* b = nullptr;
  bool erase_decayed = true, read_decayed = true;
  const float* pairs = nullptr;
  bool decay_per_key = false;
  const float *erase_factor = nullptr, *read_factor = nullptr, *write_factor = nullptr;
  const float* leave = nullptr;
  const bool* leaves = nullptr;
  const float* leave_minus_1 = nullptr;  // of sums in two parts, as leave

  const BlockSlab* slabs = nullptr;
  std::int64_t slab_count = 0;
  bool strength_per_value = false;
  std::int64_t out_pitch = 0;
  bool stream = false;  // outputs past the caches: rows of whole lines; see finish_streams
  // Columns of cache lines of the next tokens, a line a token, that are brought into the
  // second-level cache meanwhile.
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0, prefetch_tokens = 0;
  float* scratch = nullptr;  // block_scratch(queries)
};
inline constexpr std::int64_t block_scratch(std::int64_t queries) {
  return 2 * (1 + (4 + 2 * queries) * kBlock) * kSlab;
}
void recurrence_block(Isa isa, const BlockArgs& args);

// One row through a state of keys x columns in anyone's memory. A factor of exactly 0 drops the
// decayed term, even NaN.
struct RowArgs {
  std::int64_t keys = 0, columns = 0;
  float* s = nullptr;
  float* residue = nullptr;  // not null: the sum is in two parts (without erase)
  std::int64_t key_stride = 0;

  // e^g and e^g - 1 of each key, or of all where decay_stride is 0.
  const float* decay = nullptr;
  const float* decay_minus_1 = nullptr;
  std::int64_t decay_stride = 0;
  const float* value_decay = nullptr;  // e^gv [columns], or null
  const float* value_decay_minus_1 = nullptr;

  const float* k = nullptr;
  const float* v = nullptr;
  const float* e = nullptr;  // null: no erase
  bool erase_decayed = true;
  const float* b = nullptr;  // null: the erase is collinear, with strength c
  const float* c = nullptr;
  std::int64_t strength_stride = 0;  // 1: c holds a number a column

  std::int64_t queries = 0;  // 0: the row is not read
  const float* q = nullptr;
  std::int64_t q_stride = 0;
  const float* u = nullptr;  // not null: reads before the decay, and (q . (u * k)) v is added
  float* o = nullptr;
  std::int64_t o_stride = 0;
};
void recurrence_row(Isa isa, const RowArgs& args);

}  // namespace ouzel
