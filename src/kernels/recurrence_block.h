// Kernels of the engine (src/ops/rows.h has its recurrence). Rows go through a slab of 32 columns
// of the state in blocks of four: all that a block reads of the state is read in one sweep over the
// slab, what its rows owe to each other is made up for with small matrices, and all that it writes
// is written in a second sweep. Rows of keys come in any pitch, filled up with zeros to a multiple
// of 16 numbers; rows of values likewise, to a multiple of 32; the last block to four rows.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "src/kernels/recurrence.h"
#include "src/kernels/strided_rows.h"

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

// Rows of keys of a block as the sweeps walk along them, one address for all, [keys / 16][rows of a
// block][16]: four each of q (the first query's), k, with an erase e, with a general one b.
inline constexpr std::int64_t kGroupKeys = 16;
inline constexpr std::int64_t block_rows(bool erase, bool general) {
  return kBlock * (2 + (erase ? 1 : 0) + (general ? 1 : 0));
}

// From a chunk's rows of keys to what all slabs need of them: the blocks above with the decays
// folded in, and the small matrices. A block's reads get the product of decays from where the state
// stands; writes the product up to the block's end, over the factor that the state then still
// lacks: a key's row of the state is only multiplied where that factor would fall below 2^-60, or
// at the chunk's end.
struct KeyRowsArgs {
  std::int64_t blocks = 0, key_pitch = 0;
  std::int64_t queries = 1, query_stride = 0;
  StridedRows q;
  float q_scale = 1;
  StridedRows k;
  StridedRows e;             // absent: no erase
  StridedRows b;             // absent: no erase, or one with k
  const float* u = nullptr;  // not null: q reads before the decay, and the diagonal is q . (u * k)
  bool erase_decayed = true;

  StridedRows g;                 // log decays per key, above 0 as 0, or absent
  float* decay_rows = nullptr;   // [rows][key_pitch], scratch for them
  float* missing = nullptr;      // [key_pitch], scratch: what the state lacks
  const float* decay = nullptr;  // [rows], decays one a row, or null

  float* rows = nullptr;           // [blocks][keys / 16][rows of a block][16]
  float* other_queries = nullptr;  // [queries - 1][blocks][keys / 16][4][16]
  float* leave = nullptr;          // [blocks][key_pitch]: what the state is multiplied by
  bool* leaves = nullptr;          // [blocks]: whether it is
  float* total_minus_1 = nullptr;  // [key_pitch]: of g, e^(its sum) - 1; null: not wanted
  float* pairs = nullptr;          // [blocks][writers][pairs_pitch]
};
struct KeyRowsResult {
  bool resets = false;    // some decay may be exactly 0
  float largest_log = 0;  // of g, if above 0
};
KeyRowsResult fold_key_rows(Isa isa, const KeyRowsArgs& args);

// 32 columns of a state, of the values and of the outputs.
struct BlockSlab {
  // [keys, filled up to a multiple of 4][32], before and after; may be the same.
  const float* state_in = nullptr;
  float* state = nullptr;

  const float* v = nullptr;            // [rows][v_stride]
  const float* c = nullptr;            // [rows], or [rows][value_pitch] per value
  const float* value_decay = nullptr;  // e^gv [rows][value_pitch], or null

  // For sums in two parts (see SumArgs): what the rows write with k and with b, unless it is v, and
  // what the columns are multiplied by. The state is then left as it was before the last block.
  float *written = nullptr, *erased = nullptr;  // [rows][32]
  float* column_leave = nullptr;                // [blocks][32], with value_decay

  // [queries][out_pitch]: where a row's output goes, `width` numbers, or null: it is not read.
  float* const* out = nullptr;
  std::int64_t width = 0;
};

// Cache lines of the next tokens, a line of each column a token, that are brought into the
// second-level cache meanwhile: token by token, since the processor fetches ahead by itself along
// columns that are neighbours in memory.
struct PrefetchAhead {
  const PrefetchColumn *columns = nullptr, *end = nullptr;  // first: at token 0
  const PrefetchColumn* next = nullptr;                     // and its token:
  std::int64_t token = 0;
  std::int64_t lines = 0;  // that are left to fetch
};

// A chunk through some slabs, two at a time where there are as many.
struct BlockArgs {
  std::int64_t blocks = 0;
  std::int64_t keys = 0, key_pitch = 0;  // keys: filled up to a multiple of 4
  std::int64_t v_stride = 0, value_pitch = 0;

  // Of fold_key_rows.
  std::int64_t queries = 1;
  const float* rows = nullptr;
  const float* other_queries = nullptr;
  bool erase = false, general = false;
  bool erase_decayed = true, read_decayed = true;
  const float* pairs = nullptr;
  bool decay = false;  // some leaves are set
  const float* leave = nullptr;
  const bool* leaves = nullptr;
  bool sums = false;  // the last block only reads

  const BlockSlab* slabs = nullptr;
  std::int64_t slab_count = 0;
  bool strength_per_value = false;
  bool v_lacks_c = false;  // v must be multiplied by c
  std::int64_t out_pitch = 0;
  bool stream = false;  // outputs past the caches: rows of whole lines; see finish_streams
  PrefetchAhead* ahead = nullptr;
  float* scratch = nullptr;  // block_scratch(queries)
};
inline constexpr std::int64_t block_scratch(std::int64_t queries) {
  return 2 * (1 + (3 + queries) * kBlock) * kSlab;
}
void recurrence_block(Isa isa, const BlockArgs& args);

// A slab of a state whose sum is in two parts, S and in `low` what S has lost to rounding, after a
// chunk: what its rows write is summed from zero and added once. Between the chunk's blocks rows
// read a state that is a plain sum: it begins anew from S at every chunk.
struct SumArgs {
  const BlockArgs* chunk = nullptr;
  const BlockSlab* slab = nullptr;  // of the chunk, with S before it
  // The differences to 1 of the chunk's decays, [keys], and with value_decay [32].
  const float *key_minus_1 = nullptr, *column_minus_1 = nullptr;
  const float* low_in = nullptr;
  float *state = nullptr, *low = nullptr;  // after; may be the same
};
void recurrence_sums(Isa isa, const SumArgs& args);

// One row through a state of keys x columns in anyone's memory. A factor of exactly 0 drops the
// decayed term, even NaN.
struct RowArgs {
  std::int64_t keys = 0, columns = 0;
  float* s = nullptr;
  float* residue = nullptr;  // not null: the sum is in two parts
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
