// A causal scan over plain rows of several heads, chunk by chunk and within a chunk head by head,
// while the next chunk of all of them is packed in the order of memory: a token's rows of heads
// side by side are one run. A head's result is bit for bit the same in any company.
#pragma once

#include <cstdint>

#include "src/ops/recurrence_pass.h"

namespace ouzel {

// What a head does not share with its neighbours.
struct ScannedHead {
  const Fold* fold = nullptr;  // null: see HeadsScanArgs::gates
  StateMemory<const float> initial;
  std::int64_t position = 0;  // tokens that `initial` has seen
  StateMemory<float> final;
  // The normaliser's: [features], or null.
  const float *z_initial = nullptr, *z_residue_initial = nullptr;
  float *z_final = nullptr, *z_residue_final = nullptr;
  float skip = 0;  // out += skip values
};

// The log decays of a head's tokens, where they are not constant.
class HeadGates {
 public:
  virtual ~HeadGates() = default;
  // Those of tokens [first, first + tokens), and what the rows that they write are multiplied with,
  // besides (`strength` holds 1 before the call).
  virtual void load(std::int64_t head, std::int64_t first, std::int64_t tokens, float* log_decay,
                    float* strength) = 0;
  // Where the state before token `first` is kept for the backward pass (rows.h), or null.
  virtual float* kept(std::int64_t head, std::int64_t first) = 0;
};

struct HeadsScanArgs {
  AnyRows<const void> read, write, values;  // of the first head; of one type
  AnyRows<void> out;
  ElementMap map = ElementMap::kIdentity;  // of read and write
  float read_scale = 1, write_scale = 1;
  const RecurrenceSpec* normalize = nullptr;  // whose denominators divide the outputs, or null
  HeadGates* gates = nullptr;
  bool stream = false;
  std::int64_t length = 0;
};

class HeadsScan {
 public:
  // States of `rows` x `columns`, see StatePass::packs_ahead. `out`: the type of the outputs.
  template <class Memory>
  HeadsScan(Memory& memory, const Context& context, std::int64_t rows, std::int64_t columns,
            std::int64_t heads, DType out, bool normalize, bool gated = false)
      : pass_(memory, rows, columns, heads, true),
        isa_(context.isa()),
        rows_(rows),
        columns_(columns),
        count_(heads),
        may_stage_(context.impl().small_second_level_cache()) {
    heads_ = memory.template take<ScannedHead>(heads);
    write_factors_ = memory.template take<float>(heads * kChunk);
    factors_ = memory.template take<float>(heads * kChunk);
    decays_ = memory.template take<ChunkDecays>(gated ? heads : 0);
    next_decays_ = memory.template take<ChunkDecays>(gated ? heads : 0);
    const bool staged = out != DType::kF32 || may_stage_;
    out_rows_ = memory.template take<float>(staged ? kChunk * out_pitch() : 0);
    if (!normalize) return;
    for (float** p : {&norm_.z, &norm_.residue}) *p = memory.template take<float>(heads * rows);
    norm_.den = memory.template take<float>(heads * kChunk);
  }

  // All of them are to be set before run.
  ScannedHead& head(std::int64_t h) { return heads_[h]; }
  void run(const HeadsScanArgs& args);

 private:
  void begin(const HeadsScanArgs& args);
  void pack(const HeadsScanArgs& args, std::int64_t t);
  void fold_gates(const HeadsScanArgs& args, std::int64_t t);
  void keep(float* to) const;
  // A cache line more than the rows: multiples of 4 KiB would share a few cache sets.
  std::int64_t out_pitch() const { return padded(count_ * columns_, kSlab) + 16; }
  void put_out(const HeadsScanArgs& args, std::int64_t t, std::int64_t tokens) const;
  void end();

  StatePass pass_;
  Isa isa_;
  std::int64_t rows_, columns_, count_;
  ScannedHead* heads_;
  bool plain_ = false;  // rows are written as they are
  // Outputs go through out_rows_ [64][out_pitch] where they are converted, or streamed: a head's
  // alone are lines far apart, which memory takes in at a third of its speed.
  bool may_stage_, staged_ = false;
  float* out_rows_ = nullptr;
  float *write_factors_, *factors_;  // [heads][64]
  ChunkDecays *decays_, *next_decays_;
  Normalizer norm_;
};

// factor = scale / (scale den + eps), or as the spec clamps it, of 64 tokens.
void divide(const RecurrenceSpec& spec, const float* den, float* factor);

// A call's scans, cut into tasks: several heads of one sequence, and some columns of their states.
// The number of threads has a say, for it changes no bit: as many heads together as leave every
// thread its share, and as stay in the second-level cache with their states and rows.
struct HeadsTask {
  std::int64_t n = 0, first = 0, heads = 0, column = 0, columns = 0;
};
class HeadsTasks {
 public:
  // `side_by_side`: so do the rows of all tensors lie, and heads may go together.
  HeadsTasks(const RecurrenceShape& shape, std::int64_t heads, std::int64_t rows,
             std::int64_t columns, bool side_by_side, bool may_split, const Context& context);
  std::int64_t count() const { return sequences_ * groups_ * columns_.count(); }
  HeadsTask operator[](std::int64_t task) const;
  std::int64_t most_heads() const { return (heads_ + groups_ - 1) / groups_; }
  std::int64_t width() const { return columns_.width; }

 private:
  std::int64_t sequences_, heads_, groups_;
  ColumnGroups columns_;
};

// Whether the rows of a [B, T, H, D] array's heads lie side by side.
inline bool is_side_by_side(const ConstTensor& x) {
  return x.extent[2] == 1 || x.stride[2] == x.extent[3];
}

}  // namespace ouzel
