// One pass over a sequence: states of `rows` x `columns` of one or several heads, and chunks of at
// most 64 tokens that are packed and then run through them. Forward and the three passes of
// backward are made of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/kernels/recurrence.h"
#include "src/ops/chunk_decays.h"
#include "src/ops/head_map.h"
#include "src/ops/recurrence_shape.h"

namespace ouzel {

// Counts what a task will take of its scratch; stands in for Scratch in the constructors of
// buffers.
class ScratchCounter {
 public:
  template <class T>
  T* take(std::int64_t count) {
    bytes_ += Scratch::rounded(static_cast<std::size_t>(count) * sizeof(T));
    return nullptr;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

// Where element (row, column) of a state lies in the caller's memory: the transposed passes of
// backward exchange the two strides.
template <class T>
struct StateMemory {
  T* s = nullptr;  // null: zeros, or not wanted
  T* residue = nullptr;
  std::int64_t row = 0, column = 0;
  StateMemory at_column(std::int64_t c) const {
    return {s != nullptr ? s + c * column : nullptr,
            residue != nullptr ? residue + c * column : nullptr, row, column};
  }
};

// The normaliser that goes along with packed rows: z [features], its residue, and den [64]; of
// several heads one after the other.
struct Normalizer {
  float* z = nullptr;
  float* residue = nullptr;
  float* den = nullptr;
};

class StatePass {
 public:
  // `ahead`: packs chunks while the ones before are computed (pack_ahead).
  template <class Memory>
  StatePass(Memory& memory, std::int64_t rows, std::int64_t columns, std::int64_t heads = 1,
            bool ahead = false)
      : rows_(rows),
        columns_(columns),
        heads_(heads),
        key_blocks_(padded(rows, kKeyBlock) / kKeyBlock),
        slabs_(padded(columns, kSlab) / kSlab) {
    // A vector of AVX-512 fills two blocks.
    const std::int64_t keyed = apart(padded(heads * key_blocks_, 2) * kKeyedBlockPitch);
    const std::int64_t slabbed = apart(heads * slabs_ * kSlabPitch);
    keyed_ = memory.template take<float>(keyed);
    slabbed_ = memory.template take<float>(slabbed);
    if (ahead) {
      next_keyed_ = memory.template take<float>(keyed);
      next_slabbed_ = memory.template take<float>(slabbed);
      den_parts_ = memory.template take<float>(heads * kChunk * kKeyedPitch);
    }
    states_ = memory.template take<Head>(heads);
    state_memory_ = memory.template take<float>(2 * heads * head_state());
    partial_ = memory.template take<float>(kChunk * kSlab);
    scores_ = memory.template take<float>(kChunk * kLongChunk);
    x_ = memory.template take<float>(slab_state());
  }

  // The head that the other functions are about; the first, unless told.
  void select(std::int64_t head) { head_ = head; }
  // `fold`: its decay, or null: run is told. `position`: tokens that the initial state has seen.
  void begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial,
             std::int64_t position);
  // Whether the next run adds to the state in two parts.
  bool in_two_parts() const {
    return own().position >= kLongSum &&
           (own().fold == nullptr || own().fold->log_decay > kSlowDecay);
  }
  void rescale(float factor);
  // Assigns, or adds to, the caller's state.
  void end(const StateMemory<float>& final, bool add) const;

  // Rows that are read and rows that are written, with the same map; either may be absent.
  void pack(const MappedRows& read, const MappedRows& write, std::int64_t tokens,
            const float* write_factor, const Normalizer* normalizer = nullptr);
  void pack_values(const MappedRows& rows, std::int64_t tokens);
  // Rows (of `size` floats) that the next chunk will touch: run brings them into the second-level
  // cache meanwhile. What was asked for before the last pack or pack_ahead is forgotten.
  void prefetch(const float* rows, std::int64_t stride, std::int64_t size);
  // The chunk after this one, of all heads, whose rows lie side by side: the runs pack it beside
  // their arithmetic, and finish_ahead what is left of it and makes it the current one. Rows of one
  // type, and of whole pieces only (packs_ahead). `map`: of rows that are read and written.
  // `rows_left`: how many there are from the chunk's first on. `write_factor` [heads][64] or null.
  static bool packs_ahead(std::int64_t rows, std::int64_t columns) {
    return rows % kKeyedPitch == 0 && columns % kSlab == 0;
  }
  void pack_ahead(const AnyRows<const void>& read, const AnyRows<const void>& write,
                  const AnyRows<const void>& values, ElementMap map, std::int64_t rows_left,
                  const float* write_factor, const Normalizer* normalizer = nullptr);
  void finish_ahead();
  // Runs the packed chunk; out (rows of `columns`) is not used by TileMode::kWrite.
  // `stream`: past the caches; rows of whole cache lines only. `decays`: of this chunk, where begin
  // was given none.
  void run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
           std::int64_t out_stride, bool stream = false, const ChunkDecays* decays = nullptr);
  // What out gains of the values, of all heads from now on.
  void skip(float factor) { skip_ = factor; }
  // The state, [slabs][keys, a multiple of 8][32].
  const float* state() const { return state(0); }

 private:
  struct Head {
    const Fold* fold;
    std::int64_t position;
  };
  void run_long(std::int64_t tokens, const float* factor, float* out, std::int64_t out_stride,
                bool stream, const ChunkDecays* decays);
  void run_long_block(std::int64_t first, std::int64_t tokens, double log_decay,
                      const float* factor, float* out, std::int64_t out_stride, bool stream);
  // What lies after so many floats is half of 4 KiB ahead of what lies before: the tiles read one
  // chunk while the other is packed, and a load that follows a store at the same place of another
  // 4 KiB waits for it.
  static std::int64_t apart(std::int64_t size) { return padded(size + 512, 1024) - 512; }
  std::int64_t slab_state() const { return key_blocks_ * kKeyBlock * kSlab; }
  std::int64_t head_state() const { return slabs_ * slab_state(); }
  Head& own() { return states_[head_]; }
  const Head& own() const { return states_[head_]; }
  // A state, and what it has lost to rounding.
  float* state(std::int64_t slab) const {
    return state_memory_ + 2 * head_ * head_state() + slab * slab_state();
  }
  float* low(std::int64_t slab) const { return state(slabs_ + slab); }
  float* keyed() const { return keyed_ + head_ * key_blocks_ * kKeyedBlockPitch; }
  float* values(std::int64_t slab) const { return slabbed_ + (head_ * slabs_ + slab) * kSlabPitch; }

  std::int64_t rows_, columns_, heads_, key_blocks_, slabs_;
  Isa isa_ = Isa::kPortable;
  std::int64_t head_ = 0;
  Head* states_ = nullptr;
  // Columns of cache lines for run; what does not fit is not prefetched.
  static constexpr std::int64_t kMaxPrefetch = 64;
  PrefetchColumn prefetch_[kMaxPrefetch];
  Meanwhile meanwhile_;
  float skip_ = 0;
  float *next_keyed_ = nullptr, *next_slabbed_ = nullptr, *den_parts_ = nullptr;
  float *keyed_ = nullptr, *slabbed_ = nullptr, *state_memory_ = nullptr;
  float *partial_ = nullptr, *scores_ = nullptr, *x_ = nullptr;
};

// Whether columns of rows of an output of `count` numbers are written past the caches: see
// StatePass::run, and finish_streams before others are told.
bool is_streamed(std::int64_t count, const AnyRows<void>& rows, std::int64_t columns);

// Room for a chunk of rows of 16 bits as float32.
inline std::int64_t wide_floats(std::int64_t size) { return kChunk * padded(size, kSlab); }
// Rows of which tokens [t, t + tokens), a chunk at most, are float32: where they are, or in
// `memory`.
Rows<const float> wide_rows(Isa isa, const AnyRows<const void>& rows, std::int64_t t,
                            std::int64_t tokens, std::int64_t size, float* memory);
// A chunk of rows of float32, `pitch` apart, rounded to where they belong.
void put_wide_rows(Isa isa, const float* from, std::int64_t pitch, std::int64_t tokens,
                   std::int64_t size, const AnyRows<void>& to);

// Zeros the rows of x that no segment covers, as tasks of a run: one per batch row.
std::int64_t gap_tasks(const RecurrenceShape& shape);
void zero_gaps(const RecurrenceShape& shape, std::int64_t batch_row, const Tensor& x);

// Groups of columns that one task computes: all of them where there are tasks enough, else whole
// slabs, as few groups as give every thread its share: each packs the keys again. Columns of a
// state never meet, so this changes nothing but the time.
struct ColumnGroups {
  std::int64_t columns = 0, width = 0;
  ColumnGroups(std::int64_t columns, std::int64_t tasks, bool may_split, std::int64_t threads);
  std::int64_t count() const { return (columns + width - 1) / width; }
  std::int64_t begin(std::int64_t group) const { return group * width; }
  std::int64_t size(std::int64_t group) const {
    return columns - begin(group) < width ? columns - begin(group) : width;
  }
};

}  // namespace ouzel
