// Kernels of the recurrence: what a pass over a sequence does with one chunk of at most 64 tokens.
//
//     state[i][j] += write_t[i] * value_t[j]        out_t[j] = factor_t * sum_i read_t[i] *
//     state[i][j]
//
// Rows are packed first: the arrays as they come are a head's rows many floats apart, and reading
// them in the inner loop costs a third of the speed. Packed layouts, in floats, padded with zeros:
//
//     keyed    [blocks of 8 keys][64 tokens][16]: the 8 that are read (q), then the 8 written (k)
//     slabbed  [slabs of 32 values][64 tokens][32]
//              (both with a cache line between the blocks: packing writes a row into all blocks,
//              and lines a multiple of 4 KiB apart would drive each other out of the first-level
//              cache)
//     state    [slabs of 32 values][keys, a multiple of 8][32]
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

inline constexpr std::int64_t kChunk = 64;
inline constexpr std::int64_t kKeyBlock = 8;
inline constexpr std::int64_t kKeyedPitch = 2 * kKeyBlock;
inline constexpr std::int64_t kSlab = 32;
inline constexpr std::int64_t kKeyedBlockPitch = kChunk * kKeyedPitch + 16;
inline constexpr std::int64_t kSlabPitch = kChunk * kSlab + 16;
// From this position on, sums whose log decay is above kSlowDecay go on in two parts: a plain float
// sum of equal numbers is off by 7e-6 after 1,024, by 8e-2 after 10 million; a faster decay forgets
// in time.
inline constexpr std::int64_t kLongSum = 2048;
inline constexpr double kSlowDecay = -1.0 / 2048;

inline constexpr std::int64_t padded(std::int64_t size, std::int64_t block) {
  return (size + block - 1) / block * block;
}

// Feature maps that act on each number alone; they are applied while packing.
enum class ElementMap { kIdentity, kElu1, kRelu };

// Copies map(rows) * factor, filled up with zeros to whole blocks.
struct PackArgs {
  const float* rows = nullptr;
  std::int64_t stride = 0;  // between rows; may be negative
  std::int64_t tokens = 0, size = 0;
  ElementMap map = ElementMap::kIdentity;
  const float* factor = nullptr;  // [tokens], or null: 1
  float* out = nullptr;
  std::int64_t token_pitch = 0;
};
// `out` is a slabbed array; token_pitch is not used.
void pack_slabs(Isa isa, const PackArgs& args);
// `out` is rows of token_pitch floats, a multiple of 32 that holds `size`.
void pack_dense(Isa isa, const PackArgs& args);

// Both halves of a keyed array in one go, or one of them (the other's rows are null); and, if z is
// not null, the normaliser: z += k_t, den_t = q_t . z of the rows as packed (see normalizer_scan).
struct PackKeyedArgs {
  const float* q = nullptr;
  const float* k = nullptr;
  std::int64_t q_stride = 0, k_stride = 0;
  std::int64_t tokens = 0, size = 0;
  ElementMap map = ElementMap::kIdentity;  // of both
  const float* k_factor = nullptr;         // [tokens], or null: 1
  float* out = nullptr;
  float* z = nullptr;  // [size, filled up to 16s]
  float* z_residue = nullptr;
  float* den = nullptr;  // [tokens]
};
void pack_keyed(Isa isa, const PackKeyedArgs& args);

// dx (+)= map'(x) * dy for rows of `size` numbers.
struct MapAdjointArgs {
  ElementMap map = ElementMap::kIdentity;
  std::int64_t tokens = 0, size = 0;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  const float* dy = nullptr;
  std::int64_t dy_stride = 0;
  float* dx = nullptr;
  std::int64_t dx_stride = 0;
  bool add = false;
};
void map_adjoint(Isa isa, const MapAdjointArgs& args);

enum class TileMode {
  kScan,   // write, then read, token by token
  kWrite,  // only write
  kRead,   // only read
};

// What tiles do beside their arithmetic, for the next chunk: the inner loop has room for loads and
// stores, and waiting for rows from memory would take a third of the time.
struct PrefetchColumn {  // of cache lines, a line a token, into the second-level cache
  const float* first = nullptr;
  std::int64_t stride = 0;
};
// Packing the next chunk of heads whose rows lie side by side, in the order of memory: token by
// token, 16 keys of q and k or 32 values at a time.
struct PackAhead {
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // the first head's
  DType dtype = DType::kF32;                            // or bfloat16, float16
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  ElementMap map = ElementMap::kIdentity;      // of q and k
  const float* k_factor = nullptr;             // [heads][64], or null: 1
  float *keyed = nullptr, *slabbed = nullptr;  // of the heads one after the other
  std::int64_t heads = 1;
  std::int64_t key_pieces = 0, value_pieces = 0;  // of a head's row
  std::int64_t tokens = 0;                        // 0: nothing to pack
  std::int64_t rows_left = 0;                     // from the first on; they are fetched ahead:
  std::int64_t rows_ahead = 1;
  // The normaliser, as in PackKeyedArgs: [heads][keys] and [heads][64].
  float *z = nullptr, *z_residue = nullptr, *den = nullptr;
  float* den_parts = nullptr;  // [heads][64][16]
  // How far it has come.
  std::int64_t key_token = 0, key_piece = 0, value_token = 0, value_piece = 0;
};
struct Meanwhile {
  PackAhead pack;
  const PrefetchColumn* prefetch = nullptr;
  std::int64_t prefetch_count = 0, prefetch_line = 0;  // columns left; lines that the first has had
};
// Packs what is left, and completes z and den.
void finish_pack_ahead(Isa isa, PackAhead& pack);

// One slab over a chunk. The state is multiplied by `enter` before each block of tokens, and by
// `leave` after the last; a factor of exactly 0 clears it, even of NaN.
struct TileBlock {
  std::int64_t tokens;
  float enter;
};
struct TileArgs {
  TileMode mode = TileMode::kScan;
  std::int64_t tokens = 0, key_blocks = 0;
  const TileBlock* blocks = nullptr;  // `tokens` together
  float leave = 1;
  const float* keyed = nullptr;
  const float* values = nullptr;  // [tokens][32]
  float* state = nullptr;         // [8 key_blocks][32]
  const float* factor = nullptr;  // [tokens]
  float* partial = nullptr;       // [tokens][32], scratch
  float* out = nullptr;           // rows of `width` numbers
  std::int64_t out_stride = 0, width = 0;
  float skip = 0;       // out += skip value
  bool stream = false;  // out past the caches: rows of whole lines; see finish_streams
  Meanwhile* meanwhile = nullptr;
};
void recurrence_tile(Isa isa, const TileArgs& args);
// Orders streamed rows before whatever the thread stores next: call it before others are told.
void finish_streams();

// The same for a slab whose sum hardly decays, from position kLongSum on: the sum over all tokens
// of a call is formed from zero and added to state + low, where low is what state lost to rounding.
// kLongChunk tokens at a time read each other through their scores.
inline constexpr std::int64_t kLongChunk = 16;
// scores [tokens][16]: q_i . k_j within each chunk of 16 tokens; once for all slabs.
void recurrence_scores(Isa isa, std::int64_t tokens, std::int64_t key_blocks, const float* keyed,
                       float* scores);
struct LongArgs {
  std::int64_t tokens = 0, key_blocks = 0;
  const float* keyed = nullptr;
  const float* values = nullptr;
  const float* scores = nullptr;
  float* state = nullptr;  // [8 key_blocks][32]
  float* low = nullptr;
  float* x = nullptr;             // [8 key_blocks][32], scratch
  float leave_minus_1 = 0;        // expm1 of the log decay over these tokens
  const float* factor = nullptr;  // [tokens]
  float* out = nullptr;           // null: only write
  std::int64_t out_stride = 0, width = 0;
  float skip = 0;
  bool stream = false;
  Meanwhile* meanwhile = nullptr;
};
void recurrence_long(Isa isa, const LongArgs& args);

// The normaliser's sum, a vector of 8 `blocks` numbers: z += k_t, den_t = q_t . z. Written from
// zero over the chunk and added to z in two parts, so that long sums stay exact.
struct NormalizerArgs {
  TileMode mode = TileMode::kScan;
  std::int64_t tokens = 0, blocks = 0;
  const float* q = nullptr;  // [tokens][pitch]
  const float* k = nullptr;
  std::int64_t pitch = 0;
  float* z = nullptr;
  float* z_residue = nullptr;
  float* den = nullptr;     // [tokens]
  float* z_rows = nullptr;  // [tokens][pitch]: z_t, or null
};
void normalizer_scan(Isa isa, const NormalizerArgs& args);

// The adjoint of the normaliser in k: sum += a_t x_t, y_t += b_t sum, in the order of the rows; in
// two parts as above.
struct VectorScanArgs {
  TileMode mode = TileMode::kScan;
  std::int64_t tokens = 0, blocks = 0;
  const float* x = nullptr;  // [tokens][pitch]
  float* y = nullptr;        // [tokens][pitch]
  std::int64_t pitch = 0;
  const float* a = nullptr;
  const float* b = nullptr;
  float* sum = nullptr;
  float* sum_residue = nullptr;
};
void vector_scan(Isa isa, const VectorScanArgs& args);

// y_t = x_t . w_t, then x_t += c_t z_t in two calls: rows of `size` numbers, a multiple of 8.
void row_dots(Isa isa, std::int64_t tokens, std::int64_t size, const float* x, std::int64_t x_pitch,
              const float* w, std::int64_t w_pitch, float* y);
void row_add(Isa isa, std::int64_t tokens, std::int64_t size, const float* c, const float* z,
             std::int64_t z_pitch, float* x, std::int64_t x_pitch);

// out = a b, `count` numbers (a multiple of 8); out may be a or b.
void multiply(Isa isa, std::int64_t count, const float* a, const float* b, float* out);

// c[m][n] = (add ? c : bias or 0) + sum_k a[m a_row + k a_column] b[k][n]: the small products of
// learned feature maps and of the parallel form. n counts 32s: rows of b, c and bias are padded.
struct SmallProductArgs {
  std::int64_t rows = 0, columns = 0, depth = 0;
  const float* a = nullptr;
  std::int64_t a_row = 0, a_column = 1;
  const float* b = nullptr;
  std::int64_t b_row = 0;
  const float* bias = nullptr;
  float* c = nullptr;
  std::int64_t c_row = 0;
  bool add = false;
};
void small_product(Isa isa, const SmallProductArgs& args);

// y = W x + bias, rows of W `w_row` floats apart: the learned map of a single token.
void matrix_vector(Isa isa, std::int64_t rows, std::int64_t columns, const float* w,
                   std::int64_t w_row, const float* x, const float* bias, float* y);

// One token of one state: one pass over S in the caller's memory.
struct StepArgs {
  std::int64_t keys = 0, values = 0;
  float* s = nullptr;
  float* s_residue = nullptr;  // null: S alone
  std::int64_t key_stride = 0;
  // S becomes e^g S + k v^T: near 1 as S + S expm1(g), since 2,000 products with a rounded e^g
  // would be off by 6e-5; a decay of exactly 0 drops S, even NaN.
  float decay = 1, decay_minus_1 = 0;
  const float* k = nullptr;
  const float* v = nullptr;
  std::int64_t queries = 0;
  const float* q = nullptr;
  std::int64_t q_stride = 0;
  const float* factor = nullptr;  // [queries]
  float* o = nullptr;
  std::int64_t o_stride = 0;
};
void recurrence_step(Isa isa, const StepArgs& args);

}  // namespace ouzel
