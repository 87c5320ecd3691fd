// Rows of a law for the engine (rows.h): the inputs of one state of a call, packed chunk by chunk.
#pragma once

#include <cstdint>

#include "src/ops/law_call.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/rows.h"

namespace ouzel {

// Memory for the rows of `tokens` tokens.
template <class Memory>
LawRows take_rows(Memory& memory, const RowsKind& kind, std::int64_t tokens, std::int64_t columns) {
  const std::int64_t count = tokens * kind.rows_per_token;
  const auto take = [&memory](bool wanted, std::int64_t size) -> float* {
    return wanted ? memory.template take<float>(size) : nullptr;
  };
  LawRows rows;
  rows.tokens = tokens;
  rows.key_pitch = padded(kind.keys, 2 * kKeyBlock);
  rows.value_pitch = padded(columns, kSlab);
  rows.q = take(true, kind.queries * tokens * rows.key_pitch);
  rows.k = take(true, count * rows.key_pitch);
  rows.v = take(true, count * rows.value_pitch);
  rows.g = take(kind.decay, count * (kind.decay_per_key ? rows.key_pitch : 1));
  rows.gv = take(kind.value_decay, count * rows.value_pitch);
  rows.e = take(kind.erase != EraseKind::kNone, count * rows.key_pitch);
  rows.b = take(kind.erase == EraseKind::kGeneral, count * rows.key_pitch);
  rows.c = take(kind.erase == EraseKind::kCollinear,
                count * (kind.strength_per_value ? rows.value_pitch : 1));
  rows.u = take(kind.bonus, rows.key_pitch);
  return rows;
}

// One head of a tensor in one sequence, to and from packed rows [tokens * rows_per_token].
struct LawTensorRows {
  Isa isa;
  const LawTensor& x;
  const Segment& segment;
  std::int64_t head;
  bool reverse;
  std::int64_t rows_per_token;  // of the packed rows
  bool stream = false;          // rows are stored past the caches

  // `to` := factor x; rows that x has none for (a decay of every token but several rows) are zeros.
  void load(std::int64_t first, std::int64_t tokens, std::int64_t column, std::int64_t size,
            float factor, float* to, std::int64_t pitch) const;
  // Adds the lines of a row of each token from `first` on to `lines`, of which `count` are taken.
  void prefetch(std::int64_t first, std::int64_t column, std::int64_t size, PrefetchColumn* lines,
                std::int64_t& count, std::int64_t most) const;
  // x := (+=) factor `from`.
  void store(std::int64_t first, std::int64_t tokens, std::int64_t column, std::int64_t size,
             float factor, bool add, const float* from, std::int64_t pitch) const;
};

// x := factor x / sqrt(x . x + eps) for packed rows.
void normalize_rows(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, float eps,
                    float factor, float* x);
// The factors alone, for the adjoint.
void norm_factors(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, float eps,
                  const float* x, float* factors);

class LawSource : public RowSource {
 public:
  // `memory` hands out scratch, or counts it; absent `o`: rows only. Outputs of `columns` columns
  // pass through it where they are not float32 or a skip is added to them.
  template <class Memory>
  LawSource(Memory& memory, const LawCall& call, const LawTensor& o, std::int64_t columns)
      : call_(call), o_(o), pitch_(padded(columns, kSlab)) {
    const bool skip = call.in(LawRole::kSkip).present();
    if (o.present() && (o.is_narrow() || skip)) {
      stage_ = memory.template take<float>(call.kind().queries * kChunk * pitch_);
    }
    if (skip || call.in(LawRole::kStep).present() || call.in(LawRole::kWriteGate).present()) {
      other_ = memory.template take<float>(kChunk * call.kind().rows_per_token *
                                           rows_value_pitch(columns));
    }
  }

  // `kept`: where states are kept for the backward pass, or null.
  void bind(Isa isa, std::int64_t sequence, std::int64_t state, float* kept = nullptr);

  std::int64_t tokens() const override { return segment_.length; }
  void pack(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) override;
  RowsView view(std::int64_t first, std::int64_t column, std::int64_t columns,
                LawRows& rows) override;
  void check_decays(float largest) const override { check_decay(LawRole::kDecay, largest); }
  float* output(std::int64_t r, std::int64_t first, std::int64_t column,
                std::int64_t& stride) override;
  bool streams() const override { return streams_; }
  std::int64_t prefetch(std::int64_t first, std::int64_t column, std::int64_t columns,
                        PrefetchColumn* lines, std::int64_t most) const override;
  float* kept(std::int64_t first, std::int64_t column) const override;
  void finish(std::int64_t first, std::int64_t tokens, std::int64_t column,
              std::int64_t columns) override;

  // The decays of a chunk alone. Throws Error(kInvalidArgument) for one above 1e-6.
  void pack_decays(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) {
    pack_decays(first, column, columns, rows, nullptr);
  }

 protected:
  // The rows v before strengths and gates; `to` has `pitch`.
  virtual void load_values(std::int64_t first, std::int64_t tokens, std::int64_t column,
                           std::int64_t columns, float* to, std::int64_t pitch);

  const LawCall& call_;
  Isa isa_ = Isa::kPortable;
  Segment segment_;
  std::int64_t state_ = 0;

 private:
  // Rows of an input for the packed rows `to`, `size` numbers each from `column` on.
  void load(LawRole role, std::int64_t head, std::int64_t first, std::int64_t tokens,
            std::int64_t column, std::int64_t size, float factor, float* to, std::int64_t pitch);
  void load(LawRole role, std::int64_t first, std::int64_t tokens, std::int64_t column,
            std::int64_t size, float* to, std::int64_t pitch);
  // Whether rows of an input can stay where they are; `rows` is then set. `vector`: what their size
  // must be a multiple of.
  bool lends(LawRole role, std::int64_t head, std::int64_t first, std::int64_t column,
             std::int64_t size, std::int64_t vector, StridedRows& rows) const;
  bool lends(LawRole role, std::int64_t first, std::int64_t column, std::int64_t size,
             std::int64_t vector, StridedRows& rows) const {
    return lends(role, call_.head(call_.in(role), state_), first, column, size, vector, rows);
  }
  // Rows that `view` (if not null) can take from the caller are not packed.
  void pack_queries(std::int64_t first, LawRows& rows, RowsView* view);
  void pack_decays(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows,
                   RowsView* view);
  void pack_keys(std::int64_t first, LawRows& rows, RowsView* view);
  void pack_values(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows,
                   RowsView* view);
  void check_decay(LawRole role, float largest) const;

  const LawTensor& o_;
  std::int64_t pitch_;
  bool streams_ = false;
  float* kept_ = nullptr;    // of the state
  float* stage_ = nullptr;   // [queries][64][pitch]
  float* other_ = nullptr;   // a factor of the values
  std::int64_t column_ = 0;  // of the chunk that was packed last
};

}  // namespace ouzel
