#include "src/ops/rows_scan.h"

#include <algorithm>
#include <utility>

#include "src/kernels/recurrence.h"
#include "src/kernels/recurrence_block.h"

namespace ouzel {
namespace {

constexpr std::int64_t kKeyMultiple = 16;  // a cache line

// Hands out a row of floats; stands in for Scratch.
struct Floats {
  template <class T>
  T* take(std::int64_t count) {
    return std::exchange(next, next + padded(count, kKeyMultiple));
  }
  float* next;
};
// Factors of decay of some rows: e^g and e^g - 1.
struct Factors {
  template <class Memory>
  Factors(Memory& memory, const RowsKind& kind, std::int64_t rows, std::int64_t columns)
      : key_pitch(kind.decay_per_key ? padded(kind.keys, kKeyMultiple) : 1),
        value_pitch(kind.value_decay ? padded(columns, kSlab) : 0) {
    key = memory.template take<float>(rows * key_pitch);
    key_minus_1 = memory.template take<float>(rows * key_pitch);
    value = memory.template take<float>(rows * value_pitch);
    value_minus_1 = memory.template take<float>(rows * value_pitch);
  }

  void fill(Isa isa, const RowsKind& kind, const LawRows& rows) const {
    const std::int64_t count = rows.tokens * kind.rows_per_token;
    if (kind.decay) {
      decay_factors(isa, count * key_pitch, rows.g, key, key_minus_1);
    } else {
      std::fill_n(key, count, 1.0f);
      std::fill_n(key_minus_1, count, 0.0f);
    }
    if (kind.value_decay) {
      decay_factors(isa, count * value_pitch, rows.gv, value, value_minus_1);
    }
  }

  std::int64_t key_pitch, value_pitch;
  float *key, *key_minus_1, *value, *value_minus_1;
};

// Row `i` of a chunk, columns from `column` on; the state and the output are the caller's.
RowArgs row_args(const RowsKind& kind, const LawRows& rows, const Factors& factors, std::int64_t i,
                 std::int64_t column) {
  RowArgs a;
  a.keys = kind.keys;
  a.decay = factors.key + i * factors.key_pitch;
  a.decay_minus_1 = factors.key_minus_1 + i * factors.key_pitch;
  a.decay_stride = kind.decay_per_key ? 1 : 0;
  if (kind.value_decay) {
    a.value_decay = factors.value + i * factors.value_pitch + column;
    a.value_decay_minus_1 = factors.value_minus_1 + i * factors.value_pitch + column;
  }
  a.k = rows.k + i * rows.key_pitch;
  a.v = rows.v + i * rows.value_pitch + column;
  a.erase_decayed = kind.erase_decayed;
  if (kind.erase != EraseKind::kNone) a.e = rows.e + i * rows.key_pitch;
  if (kind.erase == EraseKind::kGeneral) a.b = rows.b + i * rows.key_pitch;
  if (kind.erase == EraseKind::kCollinear) {
    a.strength_stride = kind.strength_per_value ? 1 : 0;
    a.c = kind.strength_per_value ? rows.c + i * rows.value_pitch + column : rows.c + i;
  }
  if (i % kind.rows_per_token == kind.rows_per_token - 1) {
    a.queries = kind.queries;
    a.q = rows.q + i / kind.rows_per_token * rows.key_pitch;
    a.q_stride = rows.tokens * rows.key_pitch;
    if (kind.bonus) a.u = rows.u;
  }
  return a;
}

struct Scan {
  template <class Memory>
  Scan(Memory& memory, const RowsKind& kind, std::int64_t columns)
      : kind(kind),
        columns(columns),
        key_pitch(padded(kind.keys, kKeyMultiple)),
        value_pitch(padded(columns, kSlab)),
        slabs(value_pitch / kSlab),
        factors(memory, kind, kChunk * kind.rows_per_token, columns) {
    const std::int64_t count = kChunk * kind.rows_per_token;
    const auto take = [&memory](bool wanted, std::int64_t size) -> float* {
      return wanted ? memory.template take<float>(size) : nullptr;
    };
    const bool erase = kind.erase != EraseKind::kNone;
    const bool collinear = kind.erase == EraseKind::kCollinear;
    rows.key_pitch = key_pitch;
    rows.value_pitch = value_pitch;
    rows.q = take(true, kind.queries * kChunk * key_pitch);
    rows.k = take(true, count * key_pitch);
    rows.v = take(true, count * value_pitch);
    rows.g = take(kind.decay, count * (kind.decay_per_key ? key_pitch : 1));
    rows.gv = take(kind.value_decay, count * value_pitch);
    rows.e = take(erase, count * key_pitch);
    rows.b = take(kind.erase == EraseKind::kGeneral, count * key_pitch);
    rows.c = take(collinear, count * (kind.strength_per_value ? value_pitch : 1));
    rows.u = take(kind.bonus, key_pitch);
    state = take(true, slabs * slab_state());
    low = take(!erase, slabs * slab_state());
    out = take(true, kind.queries * kSlab);
  }

  std::int64_t slab_state() const { return kind.keys * kSlab; }
  bool in_two_parts(std::int64_t position) const { return low != nullptr && position >= kLongSum; }

  void begin(const StateMemory<const float>& initial, std::int64_t position) const {
    std::fill_n(state, slabs * slab_state(), 0.0f);
    if (low != nullptr) std::fill_n(low, slabs * slab_state(), 0.0f);
    if (initial.s == nullptr) return;
    for_each_run([&](std::int64_t i, std::int64_t j, std::int64_t width, std::int64_t at) {
      const std::int64_t from = i * initial.row + j * initial.column;
      for (std::int64_t c = 0; c < width; ++c) {
        const std::int64_t element = from + c * initial.column;
        state[at + c] = initial.s[element];
        if (initial.residue == nullptr) continue;
        if (in_two_parts(position)) {
          low[at + c] = initial.residue[element];
        } else {
          state[at + c] += initial.residue[element];
        }
      }
    });
  }

  void end(const StateMemory<float>& final) const {
    if (final.s == nullptr) return;
    for_each_run([&](std::int64_t i, std::int64_t j, std::int64_t width, std::int64_t at) {
      const std::int64_t to = i * final.row + j * final.column;
      for (std::int64_t c = 0; c < width; ++c) final.s[to + c * final.column] = state[at + c];
      if (final.residue == nullptr) return;
      for (std::int64_t c = 0; c < width; ++c) {
        final.residue[to + c * final.column] = low != nullptr ? low[at + c] : 0.0f;
      }
    });
  }

  // The packed chunk through every slab.
  void run(Isa isa, RowSource& source, std::int64_t first, std::int64_t column,
           std::int64_t position) const {
    factors.fill(isa, kind, rows);
    for (std::int64_t slab = 0; slab < slabs; ++slab) {
      for (std::int64_t i = 0; i < rows.tokens * kind.rows_per_token; ++i) {
        RowArgs a = row_args(kind, rows, factors, i, slab * kSlab);
        a.s = state + slab * slab_state();
        if (in_two_parts(position)) a.residue = low + slab * slab_state();
        a.key_stride = kSlab;
        a.columns = std::min(columns - slab * kSlab, kSlab);
        a.o = out;
        a.o_stride = kSlab;
        recurrence_row(isa, a);
        for (std::int64_t r = 0; r < a.queries; ++r) {
          std::int64_t stride = 0;
          float* o =
              source.output(r, first + i / kind.rows_per_token, column + slab * kSlab, stride);
          std::copy_n(out + r * kSlab, a.columns, o);
        }
      }
    }
  }

  // body(key, first column, width, offset in the slabs) for each row of each slab.
  template <class Body>
  void for_each_run(Body body) const {
    for (std::int64_t slab = 0; slab < slabs; ++slab) {
      const std::int64_t width = std::min(columns - slab * kSlab, kSlab);
      for (std::int64_t i = 0; i < kind.keys; ++i) {
        body(i, slab * kSlab, width, slab * slab_state() + i * kSlab);
      }
    }
  }

  const RowsKind& kind;
  std::int64_t columns, key_pitch, value_pitch, slabs;
  Factors factors;
  LawRows rows;
  float *state, *low, *out;
};

}  // namespace

std::size_t rows_scan_scratch(const RowsKind& kind, std::int64_t columns) {
  ScratchCounter counter;
  Scan(counter, kind, columns);
  return counter.bytes();
}

void rows_scan(Isa isa, const RowsKind& kind, RowSource& source, std::int64_t column,
               std::int64_t columns, const StateMemory<const float>& initial, std::int64_t position,
               const StateMemory<float>& final, Scratch& scratch) {
  Scan scan(scratch, kind, columns);
  scan.begin(initial.at_column(column), position);
  const std::int64_t tokens = source.tokens();
  for (std::int64_t t = 0; t < tokens; t += kChunk) {
    scan.rows.tokens = std::min(tokens - t, kChunk);
    source.pack(t, column, columns, scan.rows);
    scan.run(isa, source, t, column, position + t);
    source.finish(t, scan.rows.tokens, column, columns);
  }
  scan.end(final.at_column(column));
}

std::int64_t rows_step_floats(const RowsKind& kind) {
  ScratchCounter counter;
  Factors(counter, kind, kind.rows_per_token, kind.values);
  return static_cast<std::int64_t>(counter.bytes() / sizeof(float));
}

void rows_step(Isa isa, const RowsKind& kind, const LawRows& rows, const StateMemory<float>& state,
               std::int64_t position, float* o, std::int64_t o_stride, float* scratch) {
  Floats memory{scratch};
  const Factors factors(memory, kind, kind.rows_per_token, kind.values);
  factors.fill(isa, kind, rows);
  for (std::int64_t i = 0; i < kind.rows_per_token; ++i) {
    RowArgs a = row_args(kind, rows, factors, i, 0);
    a.columns = kind.values;
    a.s = state.s;
    if (kind.erase == EraseKind::kNone && position >= kLongSum) a.residue = state.residue;
    a.key_stride = state.row;
    a.o = o;
    a.o_stride = o_stride;
    recurrence_row(isa, a);
  }
}

}  // namespace ouzel
