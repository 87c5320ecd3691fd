// One pass over a sequence: a state of `rows` x `columns`, and chunks of at most 64 tokens that are
// packed and then run through the state. Forward and the three passes of backward are made of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/kernels/recurrence.h"
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

// The normaliser that goes along with packed rows: z [features], its residue, and den [64].
struct Normalizer {
  float* z = nullptr;
  float* residue = nullptr;
  float* den = nullptr;
};

class StatePass {
 public:
  template <class Memory>
  StatePass(Memory& memory, std::int64_t rows, std::int64_t columns)
      : rows_(rows),
        columns_(columns),
        key_blocks_(padded(rows, kKeyBlock) / kKeyBlock),
        slabs_(padded(columns, kSlab) / kSlab) {
    // A vector of AVX-512 fills two blocks.
    for (float** p : {&keyed_, &next_keyed_}) {
      *p = memory.template take<float>(apart(padded(key_blocks_, 2) * kKeyedBlockPitch));
    }
    for (float** p : {&slabbed_, &next_slabbed_}) {
      *p = memory.template take<float>(apart(slabs_ * kSlabPitch));
    }
    state_ = memory.template take<float>(slabs_ * slab_state());
    low_ = memory.template take<float>(slabs_ * slab_state());
    partial_ = memory.template take<float>(kChunk * kSlab);
    scores_ = memory.template take<float>(kChunk * kLongChunk);
    den_parts_ = memory.template take<float>(kChunk * kKeyedPitch);
  }

  // `position`: tokens that the initial state has seen.
  void begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial,
             std::int64_t position);
  // Whether the next run adds to the state in two parts.
  bool in_two_parts() const { return position_ >= kLongSum && fold_->log_decay > kSlowDecay; }
  void rescale(float factor);
  // Assigns, or adds to, the caller's state.
  void end(const StateMemory<float>& final, bool add) const;

  // Rows that are read and rows that are written, with the same map; either may be absent.
  void pack(const MappedRows& read, const MappedRows& write, std::int64_t tokens,
            const float* write_factor, const Normalizer* normalizer = nullptr);
  void pack_values(const MappedRows& rows, std::int64_t tokens);
  // Rows (of `size` floats) that the next chunk will touch: run brings them into the second-level
  // cache meanwhile.
  void prefetch(const float* rows, std::int64_t stride, std::int64_t size);
  // Lets run pack the next chunk of 64 tokens beside its arithmetic, where the tiles are enough for
  // it; true if it will. The next run then takes what was packed. `rows_left`: how many rows there
  // are from the chunk's first on. With a normaliser, den is that of the next chunk after the run.
  bool pack_ahead(const MappedRows& read, const MappedRows& write, const MappedRows& values,
                  std::int64_t rows_left, const float* write_factor,
                  const Normalizer* normalizer = nullptr);
  // Runs the packed chunk; out (rows of `columns`) is not used by TileMode::kWrite.
  // `stream`: past the caches; rows of whole cache lines only.
  void run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
           std::int64_t out_stride, bool stream = false);

 private:
  void run_long(std::int64_t tokens, const float* factor, float* out, std::int64_t out_stride,
                bool stream);
  Meanwhile meanwhile() const;
  // What lies after so many floats is half of 4 KiB ahead of what lies before: the tiles read one
  // chunk while the other is packed, and a load that follows a store at the same place of another
  // 4 KiB waits for it.
  static std::int64_t apart(std::int64_t size) { return padded(size + 512, 1024) - 512; }
  void finish_meanwhile();
  std::int64_t slab_state() const { return key_blocks_ * kKeyBlock * kSlab; }

  std::int64_t rows_, columns_, key_blocks_, slabs_;
  Isa isa_ = Isa::kPortable;
  const Fold* fold_ = nullptr;
  // Columns of cache lines for run; what does not fit is not prefetched.
  static constexpr std::int64_t kMaxPrefetch = 64;
  PrefetchColumn prefetch_[kMaxPrefetch];
  std::int64_t prefetch_count_ = 0;
  PackAhead ahead_;
  std::int64_t position_ = 0;
  float *next_keyed_ = nullptr, *next_slabbed_ = nullptr;
  float *keyed_ = nullptr, *slabbed_ = nullptr, *state_ = nullptr, *low_ = nullptr;
  float *partial_ = nullptr, *scores_ = nullptr, *den_parts_ = nullptr;
};

// Whether columns of rows of an output of `count` numbers are written past the caches: see
// StatePass::run, and finish_streams before others are told.
bool is_streamed(std::int64_t count, const Rows<float>& rows, std::int64_t column,
                 std::int64_t columns);

// Zeros the rows of x that no segment covers, as tasks of a run: one per batch row.
std::int64_t gap_tasks(const RecurrenceShape& shape);
void zero_gaps(const RecurrenceShape& shape, std::int64_t batch_row, const Tensor& x);

// Groups of columns that one task computes: all of them where there are tasks enough, else slabs.
// Columns of a state never meet, so this changes nothing but the time.
struct ColumnGroups {
  std::int64_t columns = 0, width = 0;
  ColumnGroups(std::int64_t columns, std::int64_t tasks, bool may_split);
  std::int64_t count() const { return (columns + width - 1) / width; }
  std::int64_t begin(std::int64_t group) const { return group * width; }
  std::int64_t size(std::int64_t group) const {
    return columns - begin(group) < width ? columns - begin(group) : width;
  }
};

}  // namespace ouzel
