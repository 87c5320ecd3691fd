#include "src/ops/rows_scan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/kernels/recurrence.h"
#include "src/kernels/recurrence_block.h"
#include "src/kernels/traffic.h"

namespace ouzel {
namespace {

// Tokens that are packed at a time: their rows stay in the first-level cache beside the state, and
// rows that are fetched ahead, a power of two apart, do not drive each other out of the
// second-level one.
constexpr std::int64_t kTokens = 16;
// Slabs that go through a chunk together.
constexpr std::int64_t kTogether = 2;
constexpr std::int64_t kLine = 16;  // floats of a cache line

// Factors of decay of one row: e^g and e^g - 1.
struct RowFactors {
  template <class Memory>
  RowFactors(Memory& memory, const RowsKind& kind, std::int64_t columns)
      : key_count(kind.decay_per_key ? padded(kind.keys, kLine) : 1),
        value_count(kind.value_decay ? padded(columns, kSlab) : 0) {
    key = memory.template take<float>(key_count);
    key_minus_1 = memory.template take<float>(key_count);
    value = memory.template take<float>(value_count);
    value_minus_1 = memory.template take<float>(value_count);
  }

  std::int64_t key_count, value_count;
  float *key, *key_minus_1, *value, *value_minus_1;
};

// Row `i` of a chunk, columns [column, column + columns), through a state and to outputs that the
// caller fills in.
RowArgs row_args(Isa isa, const RowsKind& kind, const LawRows& rows, std::int64_t i,
                 std::int64_t column, std::int64_t columns, const RowFactors& factors) {
  RowArgs a;
  a.keys = kind.keys;
  a.columns = columns;
  if (kind.decay) {
    const float* g = rows.g + i * factors.key_count;
    decay_factors(isa, factors.key_count, g, factors.key);
    decay_minus_1(isa, factors.key_count, g, factors.key_minus_1);
  } else {
    *factors.key = 1;
    *factors.key_minus_1 = 0;
  }
  a.decay = factors.key;
  a.decay_minus_1 = factors.key_minus_1;
  a.decay_stride = kind.decay_per_key ? 1 : 0;
  if (kind.value_decay) {
    const float* gv = rows.gv + i * rows.value_pitch + column;
    decay_factors(isa, columns, gv, factors.value);
    decay_minus_1(isa, columns, gv, factors.value_minus_1);
    a.value_decay = factors.value;
    a.value_decay_minus_1 = factors.value_minus_1;
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

// The state of some columns on its way through a sequence, a chunk at a time.
class Scan {
 public:
  template <class Memory>
  Scan(Memory& memory, const RowsKind& kind, std::int64_t columns)
      : kind_(kind),
        columns_(columns),
        key_pitch_(padded(kind.keys, kLine)),
        value_pitch_(padded(columns, kSlab)),
        slabs_(value_pitch_ / kSlab),
        half_(padded(kind.keys, 2) * kSlab),
        erase_(kind.erase != EraseKind::kNone),
        row_factors_(memory, kind, kSlab) {
    const std::int64_t n = kind.rows_per_token, rows = kTokens * n, blocks = rows / kBlock;
    const auto take = [&memory](bool wanted, std::int64_t size) -> float* {
      return wanted ? memory.template take<float>(size) : nullptr;
    };
    const auto keyed = [&](bool wanted) { return take(wanted, rows * key_pitch_); };
    const bool general = kind.erase == EraseKind::kGeneral, per_key = kind.decay_per_key;
    rows_.key_pitch = key_pitch_;
    rows_.value_pitch = value_pitch_;
    rows_.q = take(true, kind.queries * kTokens * key_pitch_);
    rows_.k = keyed(true);
    rows_.v = take(true, rows * value_pitch_);
    rows_.g = take(kind.decay, rows * (per_key ? key_pitch_ : 1));
    rows_.gv = take(kind.value_decay, rows * value_pitch_);
    e_rows_ = keyed(erase_);
    rows_.b = keyed(general);
    rows_.c = take(kind.erase == EraseKind::kCollinear,
                   rows * (kind.strength_per_value ? value_pitch_ : 1));
    rows_.u = take(kind.bonus, key_pitch_);

    q_spread_ = take(n > 1 || kind.queries > 1, kind.queries * rows * key_pitch_);
    leave_ = take(kind.decay, blocks * (per_key ? key_pitch_ : 1));
    leave_minus_1_ = take(kind.decay && !erase_, blocks * (per_key ? key_pitch_ : 1));
    missing_ = take(per_key, 2 * key_pitch_);
    leaves_ = memory.template take<bool>(blocks);
    by_rows_ = memory.template take<bool>(slabs_);
    const std::int64_t width = column_width();
    column_decay_ = take(width != 0, rows * width);
    column_log_ = take(width != 0, width);
    value_leave_minus_1_ = take(kind.value_decay && !erase_, blocks * width);
    for (float** p : {&erase_factor_, &read_factor_, &write_factor_}) *p = take(one_a_row(), rows);
    pairs_ = take(true, blocks * (general ? 2 : 1) * pairs_pitch(erase_, kind.queries));
    block_scratch_ = take(true, block_scratch(kind.queries));
    state_ = memory.template take<float*>(slabs_ + kTogether);
    state_memory_ = take(true, (slabs_ + kTogether) * slab_state());
    out_ = memory.template take<float*>(kTogether * kind.queries * rows);
    row_out_ = take(true, kind.queries * kSlab);
  }

  void begin(Isa isa, const StateMemory<const float>& initial, std::int64_t position);
  void end(const StateMemory<float>& final) const;
  void run(RowSource& source, std::int64_t first, std::int64_t tokens, std::int64_t column);

 private:
  // Decays of rows that are the same for all keys and values.
  bool one_a_row() const { return kind_.decay && !kind_.decay_per_key && !kind_.value_decay; }
  // Numbers of a row of decays that are the same for all keys.
  std::int64_t column_width() const {
    return kind_.value_decay ? value_pitch_ : one_a_row() ? 1 : 0;
  }
  // A slab's state; without erase, what it has lost to rounding follows.
  std::int64_t slab_state() const { return erase_ ? half_ : 2 * half_; }
  std::int64_t rows() const { return rows_.tokens * kind_.rows_per_token; }
  // Queries need memory of their own where tokens have several rows, or where rows that fill up the
  // last block would be another query's.
  bool spreads() const {
    return kind_.rows_per_token > 1 || (kind_.queries > 1 && rows() % kBlock != 0);
  }
  std::int64_t query_stride() const { return blocks() * kBlock * key_pitch_; }
  std::int64_t blocks() const { return (rows() + kBlock - 1) / kBlock; }
  std::int64_t out_pitch() const { return kTokens * kind_.rows_per_token; }
  bool in_two_parts() const { return !erase_ && position_ >= kLongSum; }

  void keep(const RowSource& source, std::int64_t first, std::int64_t column) const;
  void pad() const;
  void spread_queries() const;
  bool prepare_columns() const;
  bool prepare_keys() const;
  void locate_outputs(RowSource& source, std::int64_t first, std::int64_t column,
                      float** out) const;
  bool run_slabs(RowSource& source, std::int64_t first, std::int64_t column, std::int64_t slab,
                 std::int64_t count, bool resets);
  void clear_padding(float* state, std::int64_t width) const;
  void run_rows(RowSource& source, std::int64_t first, std::int64_t column);
  // body(slab's state, offset in it, key, column, width) for each row of each slab.
  template <class Body>
  void for_each_row(Body body) const {
    for (std::int64_t slab = 0; slab < slabs_; ++slab) {
      const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
      for (std::int64_t i = 0; i < kind_.keys; ++i) {
        body(state_[slab] + i * kSlab, i, slab * kSlab, width);
      }
    }
  }

  const RowsKind& kind_;
  std::int64_t columns_, key_pitch_, value_pitch_, slabs_, half_;
  bool erase_;
  Isa isa_ = Isa::kPortable;
  std::int64_t position_ = 0;
  LawRows rows_;
  RowFactors row_factors_;
  // Of a chunk, for all slabs: see KeyRowsArgs and BlockArgs.
  float *e_rows_, *q_spread_;
  float *leave_, *leave_minus_1_, *missing_, *column_decay_, *column_log_;
  float *value_leave_minus_1_, *pairs_;
  float *erase_factor_, *read_factor_, *write_factor_;
  bool* leaves_;
  bool* by_rows_;  // [slabs]: the chunk must go through row by row
  static constexpr std::int64_t kMaxPrefetch = 128;
  PrefetchColumn prefetch_[kMaxPrefetch];
  std::int64_t prefetch_count_ = 0;
  float *block_scratch_, *row_out_;
  float** state_;  // [slabs], and some to spare
  float* state_memory_;
  float** out_;  // [kTogether][queries][out_pitch]
};

void Scan::begin(Isa isa, const StateMemory<const float>& initial, std::int64_t position) {
  isa_ = isa;
  position_ = position;
  for (std::int64_t slab = 0; slab < slabs_ + kTogether; ++slab) {
    state_[slab] = state_memory_ + slab * slab_state();
  }
  std::fill_n(state_memory_, (slabs_ + kTogether) * slab_state(), 0.0f);
  if (initial.s == nullptr) return;
  for_each_row([&](float* row, std::int64_t key, std::int64_t column, std::int64_t width) {
    const std::int64_t from = key * initial.row + column * initial.column;
    for (std::int64_t j = 0; j < width; ++j) row[j] = initial.s[from + j * initial.column];
    if (initial.residue == nullptr) return;
    for (std::int64_t j = 0; j < width; ++j) {
      const float residue = initial.residue[from + j * initial.column];
      in_two_parts() ? row[half_ + j] = residue : row[j] += residue;
    }
  });
}

void Scan::end(const StateMemory<float>& final) const {
  if (final.s == nullptr) return;
  for_each_row([&](const float* row, std::int64_t key, std::int64_t column, std::int64_t width) {
    const std::int64_t to = key * final.row + column * final.column;
    for (std::int64_t j = 0; j < width; ++j) final.s[to + j * final.column] = row[j];
    if (final.residue == nullptr) return;
    for (std::int64_t j = 0; j < width; ++j) {
      final.residue[to + j * final.column] = erase_ ? 0.0f : row[half_ + j];
    }
  });
}

// The state before a chunk, for the backward pass.
void Scan::keep(const RowSource& source, std::int64_t first, std::int64_t column) const {
  float* to = source.kept(first, column);
  if (to == nullptr) return;
  const std::int64_t keys = padded(kind_.keys, kSlab);
  for (std::int64_t slab = 0; slab < slabs_; ++slab, to += keys * kSlab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    const float* from = state_[slab];
    if (reinterpret_cast<std::uintptr_t>(to) % (kLine * sizeof(float)) == 0) {
      memory_traffic(isa_, {&from, 1}, {&to, 1}, kind_.keys * kSlab);  // past the caches
    } else {
      std::copy_n(from, kind_.keys * kSlab, to);
    }
    std::fill(to + kind_.keys * kSlab, to + keys * kSlab, 0.0f);
    for (std::int64_t i = 0; width < kSlab && i < kind_.keys; ++i) {
      std::fill(to + i * kSlab + width, to + (i + 1) * kSlab, 0.0f);
    }
  }
}

// Rows that change nothing fill the last block.
void Scan::pad() const {
  const auto zero = [&](float* x, std::int64_t width) {
    if (x != nullptr) std::fill(x + rows() * width, x + blocks() * kBlock * width, 0.0f);
  };
  if (rows() == blocks() * kBlock) return;
  for (float* x : {rows_.k, rows_.e, rows_.b}) zero(x, key_pitch_);
  for (float* x : {rows_.v, rows_.gv}) zero(x, value_pitch_);
  zero(rows_.g, kind_.decay_per_key ? key_pitch_ : 1);
  zero(rows_.c, kind_.strength_per_value ? value_pitch_ : 1);
}

// Zeros stand in for the queries of rows that are not read.
void Scan::spread_queries() const {
  const std::int64_t n = kind_.rows_per_token, count = blocks() * kBlock * key_pitch_;
  for (std::int64_t r = 0; r < kind_.queries; ++r) {
    std::fill_n(q_spread_ + r * count, count, 0.0f);
    for (std::int64_t t = 0; t < rows_.tokens; ++t) {
      std::copy_n(rows_.q + (r * rows_.tokens + t) * key_pitch_, key_pitch_,
                  q_spread_ + r * count + ((t + 1) * n - 1) * key_pitch_);
    }
  }
}

// Log decays of each block, summed: [blocks][width] of [rows][width].
void sum_blocks(const float* g, std::int64_t blocks, std::int64_t width, float* sums) {
  for (std::int64_t block = 0; block < blocks; ++block, g += kBlock * width) {
    for (std::int64_t i = 0; i < width; ++i) {
      *sums++ = (g[i] + g[width + i]) + (g[2 * width + i] + g[3 * width + i]);
    }
  }
}

// As for decays per key (recurrence_keys.cc): the last of `rows` rows makes up for what rounding
// did to the others, where all together are weak. `log`: the sums of their logarithms.
void settle(const float* log, std::int64_t rows, std::int64_t width, float* factor) {
  for (std::int64_t j = 0; j < width; ++j) {
    if (!(log[j] > -1)) continue;
    float product = 1;
    for (std::int64_t i = 0; i + 1 < rows; ++i) product *= factor[i * width + j];
    factor[(rows - 1) * width + j] = std::exp(log[j]) / product;
  }
}

// Decays that are the same for all keys, a number a row or one per value. Returns whether one is 0.
bool Scan::prepare_columns() const {
  const std::int64_t width = column_width(), count = blocks() * kBlock;
  if (width == 0) return false;
  const float* g = kind_.value_decay ? rows_.gv : rows_.g;
  if (kind_.value_decay && kind_.decay && !kind_.decay_per_key) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t j = 0; j < width; ++j) {
        column_decay_[i * width + j] = rows_.gv[i * width + j] + rows_.g[i];
      }
    }
    g = column_decay_;
  }
  if (in_two_parts()) {
    float* minus_1 = kind_.value_decay ? value_leave_minus_1_ : leave_minus_1_;
    sum_blocks(g, blocks(), width, minus_1);
    decay_minus_1(isa_, blocks() * width, minus_1, minus_1);
  }
  std::fill_n(column_log_, width, 0.0f);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t j = 0; j < width; ++j) column_log_[j] += g[i * width + j];
  }
  const bool resets = decay_factors(isa_, count * width, g, column_decay_);
  settle(column_log_, count, width, column_decay_);
  return resets;
}

// Rows of keys, with decays per key. Returns whether one is exactly 0.
bool Scan::prepare_keys() const {
  if (spreads()) spread_queries();
  if (kind_.decay_per_key && in_two_parts()) {
    sum_blocks(rows_.g, blocks(), key_pitch_, leave_minus_1_);
    decay_minus_1(isa_, blocks() * key_pitch_, leave_minus_1_, leave_minus_1_);
  }
  KeyRowsArgs a;
  a.blocks = blocks();
  a.key_pitch = key_pitch_;
  a.queries = kind_.queries;
  a.query_stride = query_stride();
  a.q = spreads() ? q_spread_ : rows_.q;
  a.k = rows_.k;
  a.e = rows_.e;
  a.b = rows_.b;
  a.u = rows_.u;
  a.erase_decayed = kind_.erase_decayed;
  a.fold = !in_two_parts();
  if (kind_.decay_per_key) a.g = rows_.g;
  a.e_folded = e_rows_;
  a.missing = missing_;
  if (one_a_row()) a.decay = column_decay_;
  a.erase_factor = erase_factor_;
  a.read_factor = read_factor_;
  a.write_factor = write_factor_;
  a.leave = leave_;
  a.leaves = leaves_;
  a.pairs = pairs_;
  return fold_key_rows(isa_, a);
}

void Scan::run(RowSource& source, std::int64_t first, std::int64_t tokens, std::int64_t column) {
  keep(source, first, column);
  rows_.tokens = tokens;
  rows_.e = e_rows_;
  source.pack(first, column, columns_, rows_);
  pad();
  prefetch_count_ = 0;
  if (first + 2 * tokens <= source.tokens()) {
    prefetch_count_ = source.prefetch(first + tokens, column, columns_, prefetch_, kMaxPrefetch);
  }
  const bool column_resets = prepare_columns();
  const bool key_resets = prepare_keys();
  // Slabs together take at most two thirds of the first-level cache.
  const std::int64_t together = kind_.keys <= 128 ? kTogether : 1;
  bool finite = true;
  for (std::int64_t slab = 0; slab < slabs_; slab += together) {
    finite = run_slabs(source, first, column, slab, std::min(slabs_ - slab, together),
                       column_resets || key_resets) &&
             finite;
  }
  if (!finite) run_rows(source, first, column);
  source.finish(first, tokens, column, columns_);
  position_ += tokens;
}

// Where the outputs of a slab's rows go, `out` [queries][out_pitch].
void Scan::locate_outputs(RowSource& source, std::int64_t first, std::int64_t column,
                          float** out) const {
  const std::int64_t n = kind_.rows_per_token;
  for (std::int64_t r = 0; r < kind_.queries; ++r) {
    std::int64_t stride = 0;
    float* o = source.output(r, first, column, stride);
    float** to = out + r * out_pitch();
    if (n > 1 || rows() % kBlock != 0) std::fill_n(to, blocks() * kBlock, nullptr);
    for (std::int64_t t = 0; t < rows_.tokens; ++t) to[(t + 1) * n - 1] = o + t * stride;
  }
}

// `count` slabs together, at most kTogether. Returns false where the chunk must go through a slab
// row by row: where there are decays of 0, and numbers that are not finite. A block would multiply
// them.
bool Scan::run_slabs(RowSource& source, std::int64_t first, std::int64_t column, std::int64_t slab,
                     std::int64_t count, bool resets) {
  BlockSlab slabs[kTogether];
  for (std::int64_t i = 0; i < count; ++i) {
    BlockSlab& s = slabs[i];
    const std::int64_t from = (slab + i) * kSlab;
    s.state_in = state_[slab + i];
    s.state = resets ? state_[slabs_ + i] : state_[slab + i];
    if (in_two_parts()) {
      s.low_in = s.state_in + half_;
      s.low = s.state + half_;
    }
    s.v = rows_.v + from;
    s.c = kind_.strength_per_value ? rows_.c + from : rows_.c;
    if (kind_.value_decay) {
      s.value_decay = column_decay_ + from;
      if (in_two_parts()) s.value_leave_minus_1 = value_leave_minus_1_ + from;
    }
    float** out = out_ + i * kind_.queries * out_pitch();
    locate_outputs(source, first, column + from, out);
    s.out = out;
    s.width = std::min(columns_ - from, kSlab);
  }
  BlockArgs a;
  a.blocks = blocks();
  a.keys = padded(kind_.keys, 2);
  a.key_pitch = key_pitch_;
  a.value_pitch = value_pitch_;
  a.queries = kind_.queries;
  a.query_stride = query_stride();
  a.q = spreads() ? q_spread_ : rows_.q;
  a.k = rows_.k;
  a.e = kind_.decay_per_key ? e_rows_ : rows_.e;
  a.b = rows_.b;
  a.erase_decayed = kind_.erase_decayed;
  a.read_decayed = !kind_.bonus;
  a.pairs = pairs_;
  a.leave = leave_;
  a.leaves = leaves_;
  a.decay_per_key = kind_.decay_per_key;
  if (one_a_row()) {
    a.erase_factor = erase_factor_;
    a.read_factor = read_factor_;
    a.write_factor = write_factor_;
  }
  a.leave_minus_1 = leave_minus_1_;
  a.slabs = slabs;
  a.slab_count = count;
  a.strength_per_value = kind_.strength_per_value;
  a.out_pitch = out_pitch();
  a.stream = source.streams();
  const std::int64_t begin = slab * prefetch_count_ / slabs_;
  a.prefetch = prefetch_ + begin;
  a.prefetch_count = (slab + count) * prefetch_count_ / slabs_ - begin;
  a.prefetch_tokens = rows_.tokens;
  a.scratch = block_scratch_;
  recurrence_block(isa_, a);
  bool finite = true;
  for (std::int64_t i = 0; resets && i < count; ++i) {
    by_rows_[slab + i] = !all_finite(isa_, half_, slabs[i].state);
    if (by_rows_[slab + i]) {
      finite = false;
    } else {
      std::swap(state_[slab + i], state_[slabs_ + i]);
    }
  }
  return finite;
}

// Outputs that only know of finite numbers stay as they are: they must not depend on what comes
// later.
// What fills a slab up to whole blocks may hold NaN by now, and no reset reaches it.
void Scan::clear_padding(float* state, std::int64_t width) const {
  for (float* part = state; part < state + slab_state(); part += half_) {
    for (std::int64_t i = 0; i < kind_.keys; ++i) {
      std::fill(part + i * kSlab + width, part + (i + 1) * kSlab, 0.0f);
    }
    std::fill(part + kind_.keys * kSlab, part + half_, 0.0f);
  }
}

void Scan::run_rows(RowSource& source, std::int64_t first, std::int64_t column) {
  rows_.e = e_rows_;
  source.pack(first, column, columns_, rows_);
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    if (!by_rows_[slab]) continue;
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    clear_padding(state_[slab], width);
    locate_outputs(source, first, column + slab * kSlab, out_);
    bool finite = all_finite(isa_, half_, state_[slab]);
    for (std::int64_t i = 0; i < rows(); ++i) {
      RowArgs a = row_args(isa_, kind_, rows_, i, slab * kSlab, width, row_factors_);
      a.s = state_[slab];
      if (in_two_parts()) a.residue = a.s + half_;
      a.key_stride = kSlab;
      a.o = row_out_;
      a.o_stride = kSlab;
      recurrence_row(isa_, a);
      for (std::int64_t r = 0; r < a.queries && !finite; ++r) {
        std::copy_n(row_out_ + r * kSlab, width, out_[r * out_pitch() + i]);
      }
      finite = finite && all_finite(isa_, half_, state_[slab]);
    }
  }
}

// Hands out a row of floats; stands in for Scratch.
struct Floats {
  template <class T>
  T* take(std::int64_t count) {
    return std::exchange(next, next + padded(count, kLine));
  }
  float* next;
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
  scan.begin(isa, initial.at_column(column), position);
  const std::int64_t tokens = source.tokens();
  for (std::int64_t t = 0; t < tokens; t += kTokens) {
    check_cancelled();
    scan.run(source, t, std::min(tokens - t, kTokens), column);
  }
  scan.end(final.at_column(column));
  if (source.streams()) finish_streams();
}

std::int64_t rows_step_floats(const RowsKind& kind) {
  ScratchCounter counter;
  RowFactors(counter, kind, kind.values);
  return static_cast<std::int64_t>(counter.bytes() / sizeof(float));
}

void rows_step(Isa isa, const RowsKind& kind, const LawRows& rows, const StateMemory<float>& state,
               std::int64_t position, float* o, std::int64_t o_stride, float* scratch) {
  Floats memory{scratch};
  const RowFactors factors(memory, kind, kind.values);
  for (std::int64_t i = 0; i < kind.rows_per_token; ++i) {
    RowArgs a = row_args(isa, kind, rows, i, 0, kind.values, factors);
    a.s = state.s;
    if (kind.erase == EraseKind::kNone && position >= kLongSum) a.residue = state.residue;
    a.key_stride = state.row;
    a.o = o;
    a.o_stride = o_stride;
    recurrence_row(isa, a);
  }
}

}  // namespace ouzel
