// One pass over a sequence: a state of `rows` x `columns`, and chunks of at most 64 tokens that are
// packed and then run through the state. Forward and the three passes of backward are made of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/kernels/recurrence.h"
#include "src/ops/feature_map.h"
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

class StatePass {
 public:
  template <class Memory>
  StatePass(Memory& memory, std::int64_t rows, std::int64_t columns)
      : rows_(rows),
        columns_(columns),
        key_blocks_(padded(rows, kKeyBlock) / kKeyBlock),
        slabs_(padded(columns, kSlab) / kSlab) {
    keyed_ = memory.template take<float>(key_blocks_ * kChunk * kKeyedPitch);
    slabbed_ = memory.template take<float>(slabs_ * kChunk * kSlab);
    state_ = memory.template take<float>(slabs_ * slab_state());
    partial_ = memory.template take<float>(kChunk * kSlab);
  }

  void begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial);
  // Assigns, or adds to, the caller's state.
  void end(const StateMemory<float>& final, bool add) const;

  void pack_read(const MappedRows& rows, std::int64_t tokens);
  void pack_write(const MappedRows& rows, std::int64_t tokens, const float* factor);
  void pack_values(const MappedRows& rows, std::int64_t tokens);
  // Runs the packed chunk; out (rows of `columns`) is not used by TileMode::kWrite.
  void run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
           std::int64_t out_stride);

  // The packed read and write rows, for the normaliser: blocks of 8, kChunk * kKeyedPitch apart.
  const float* read() const { return keyed_; }
  const float* written() const { return keyed_ + kKeyBlock; }
  std::int64_t key_blocks() const { return key_blocks_; }

 private:
  std::int64_t slab_state() const { return key_blocks_ * kKeyBlock * kSlab; }

  std::int64_t rows_, columns_, key_blocks_, slabs_;
  Isa isa_ = Isa::kPortable;
  const Fold* fold_ = nullptr;
  float *keyed_ = nullptr, *slabbed_ = nullptr, *state_ = nullptr, *partial_ = nullptr;
};

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
