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

// The states of some heads' columns on their way through a sequence, a chunk at a time.
class Scan {
 public:
  template <class Memory>
  Scan(Memory& memory, const RowsKind& kind, std::int64_t columns, std::int64_t heads)
      : kind_(kind),
        columns_(columns),
        heads_(heads),
        key_pitch_(padded(kind.keys, kGroupKeys)),
        value_pitch_(padded(columns, kSlab)),
        slabs_(value_pitch_ / kSlab),
        half_(padded(kind.keys, 4) * kSlab),
        erase_(kind.erase != EraseKind::kNone),
        general_(kind.erase == EraseKind::kGeneral),
        row_factors_(memory, kind, kSlab) {
    const std::int64_t n = kind.rows_per_token, rows = kTokens * n, blocks = rows / kBlock;
    const auto take = [&memory](bool wanted, std::int64_t size) -> float* {
      return wanted ? memory.template take<float>(size) : nullptr;
    };
    const auto keyed = [&](bool wanted) { return take(wanted, rows * key_pitch_); };
    const bool per_key = kind.decay_per_key;
    rows_.key_pitch = key_pitch_;
    rows_.value_pitch = value_pitch_;
    rows_.q = take(true, kind.queries * kTokens * key_pitch_);
    rows_.k = keyed(true);
    rows_.v = take(true, rows * value_pitch_);
    rows_.g = take(kind.decay, rows * (per_key ? key_pitch_ : 1));
    rows_.gv = take(kind.value_decay, rows * value_pitch_);
    e_rows_ = keyed(erase_);
    rows_.b = keyed(general_);
    rows_.c = take(kind.erase == EraseKind::kCollinear,
                   rows * (kind.strength_per_value ? value_pitch_ : 1));
    rows_.u = take(kind.bonus, key_pitch_);

    q_spread_ = take(n > 1 || kind.queries > 1, kind.queries * rows * key_pitch_);
    key_rows_ = take(true, blocks * block_rows(erase_, general_) * key_pitch_);
    other_queries_ = take(kind.queries > 1, (kind.queries - 1) * rows * key_pitch_);
    decay_rows_ = keyed(per_key);
    missing_ = take(per_key, key_pitch_);
    leave_ = take(decay_of_keys(), blocks * key_pitch_);
    key_minus_1_ = take(decay_of_keys(), key_pitch_);
    leaves_ = memory.template take<bool>(blocks);
    by_rows_ = memory.template take<bool>(slabs_);
    const std::int64_t width = column_width();
    column_decay_ = take(width != 0, rows * width);
    column_log_ = take(width != 0, width);
    column_minus_1_ = take(width != 0, width);
    pairs_ = take(true, blocks * (general_ ? 2 : 1) * pairs_pitch(erase_, kind.queries));
    block_scratch_ = take(true, block_scratch(kind.queries));
    state_ = memory.template take<float*>(heads * slabs_ + kTogether);
    state_memory_ = take(true, (heads * slabs_ + kTogether) * slab_state());
    running_ = take(true, kTogether * half_);
    const std::int64_t written = kTogether * rows * kSlab;
    written_ = take(erase_ || kind.value_decay, written);
    erased_ = take(general_, written);
    column_leave_ = take(kind.value_decay, kTogether * blocks * kSlab);
    out_ = memory.template take<float*>(kTogether * kind.queries * rows);
    row_out_ = take(true, kind.queries * kSlab);
    lines_ = memory.template take<PrefetchColumn>(heads * kMostLines);
  }

  void begin(Isa isa, std::span<const ScanHead> heads, std::int64_t column, std::int64_t position);
  void end(std::int64_t head, const StateMemory<float>& final);
  // Tokens [first, first + tokens) of all heads.
  void run(std::span<const ScanHead> heads, std::int64_t first, std::int64_t tokens,
           std::int64_t column);

 private:
  // Decays of rows that are the same for all keys and values.
  bool one_a_row() const { return kind_.decay && !kind_.decay_per_key && !kind_.value_decay; }
  // Decays that are folded into rows of keys.
  bool decay_of_keys() const { return kind_.decay_per_key || one_a_row(); }
  // Numbers of a row of decays that are the same for all keys.
  std::int64_t column_width() const {
    return kind_.value_decay ? value_pitch_ : one_a_row() ? 1 : 0;
  }
  // A slab's state, and what it has lost to rounding.
  std::int64_t slab_state() const { return 2 * half_; }
  std::int64_t rows() const { return rows_.tokens * kind_.rows_per_token; }
  // Queries need memory of their own where tokens have several rows, or where rows that fill up the
  // last block would be another query's.
  bool spreads() const {
    return kind_.rows_per_token > 1 || (kind_.queries > 1 && rows() % kBlock != 0);
  }
  std::int64_t blocks() const { return (rows() + kBlock - 1) / kBlock; }
  std::int64_t out_pitch() const { return kTokens * kind_.rows_per_token; }
  bool in_two_parts() const { return position_ >= kLongSum; }

  void keep(const RowSource& source, float* const* state, std::int64_t first,
            std::int64_t column) const;
  void begin_state(std::int64_t head, const StateMemory<const float>& initial);
  void run_head(RowSource& source, std::int64_t head, std::int64_t first, std::int64_t column);
  void pad() const;
  void spread_queries() const;
  bool prepare_columns() const;
  bool prepare_keys(RowSource& source) const;
  void locate_outputs(RowSource& source, std::int64_t first, std::int64_t column,
                      float** out) const;
  bool run_slabs(RowSource& source, std::int64_t first, std::int64_t column, float** state,
                 std::int64_t slab, std::int64_t count, bool resets);
  void clear_padding(float* state, std::int64_t width) const;
  void run_rows(RowSource& source, std::int64_t first, std::int64_t column, float** state);
  // body(slab's state, offset in it, key, column, width) for each row of each slab of a head.
  template <class Body>
  void for_each_row(std::int64_t head, Body body) const {
    for (std::int64_t slab = 0; slab < slabs_; ++slab) {
      const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
      for (std::int64_t i = 0; i < kind_.keys; ++i) {
        body(state_[head * slabs_ + slab] + i * kSlab, i, slab * kSlab, width);
      }
    }
  }

  const RowsKind& kind_;
  std::int64_t columns_, heads_, key_pitch_, value_pitch_, slabs_, half_;
  bool erase_, general_;
  Isa isa_ = Isa::kPortable;
  std::int64_t position_ = 0;
  LawRows rows_;
  RowsView view_;  // of the same rows
  RowFactors row_factors_;
  // Of a chunk, for all slabs: see KeyRowsArgs and BlockArgs.
  float *e_rows_, *q_spread_, *key_rows_, *other_queries_;
  float *decay_rows_, *missing_, *leave_, *key_minus_1_;
  float *column_decay_, *column_log_, *column_minus_1_, *pairs_;
  bool* leaves_;
  bool* by_rows_;  // [slabs]: the chunk must go through row by row
  float *block_scratch_, *row_out_;
  float** state_;  // [heads][slabs], and some to spare
  float* state_memory_;
  // Of sums in two parts, for the slabs that go together: see SumArgs.
  float *running_, *written_, *erased_, *column_leave_;
  float** out_;                                    // [kTogether][queries][out_pitch]
  static constexpr std::int64_t kMostLines = 128;  // of a token of a head
  PrefetchColumn* lines_;
  PrefetchAhead ahead_;
};

void Scan::begin(Isa isa, std::span<const ScanHead> heads, std::int64_t column,
                 std::int64_t position) {
  isa_ = isa;
  position_ = position;
  for (std::int64_t slab = 0; slab < heads_ * slabs_ + kTogether; ++slab) {
    state_[slab] = state_memory_ + slab * slab_state();
  }
  std::fill_n(state_memory_, (heads_ * slabs_ + kTogether) * slab_state(), 0.0f);
  PrefetchColumn* end = lines_;
  for (std::int64_t head = 0; head < heads_; ++head) {
    const ScanHead& h = heads[static_cast<std::size_t>(head)];
    begin_state(head, h.initial.at_column(column));
    if (h.source->tokens() <= kTokens) continue;  // nothing to fetch ahead
    end += h.source->prefetch(0, column, columns_, end, kMostLines);
  }
  // In the order of memory, and once where heads share a row.
  std::sort(lines_, end, [](const auto& x, const auto& y) { return x.first < y.first; });
  end = std::unique(lines_, end, [](const auto& x, const auto& y) { return x.first == y.first; });
  ahead_ = {.columns = lines_, .end = end};
}

void Scan::begin_state(std::int64_t head, const StateMemory<const float>& initial) {
  if (initial.s == nullptr) return;
  for_each_row(head, [&](float* row, std::int64_t key, std::int64_t column, std::int64_t width) {
    const std::int64_t from = key * initial.row + column * initial.column;
    for (std::int64_t j = 0; j < width; ++j) row[j] = initial.s[from + j * initial.column];
    if (initial.residue == nullptr) return;
    for (std::int64_t j = 0; j < width; ++j) {
      const float residue = initial.residue[from + j * initial.column];
      in_two_parts() ? row[half_ + j] = residue : row[j] += residue;
    }
  });
}

void Scan::end(std::int64_t head, const StateMemory<float>& final) {
  if (final.s == nullptr) return;
  for_each_row(head,
               [&](const float* row, std::int64_t key, std::int64_t column, std::int64_t width) {
                 const std::int64_t to = key * final.row + column * final.column;
                 for (std::int64_t j = 0; j < width; ++j) final.s[to + j * final.column] = row[j];
                 if (final.residue == nullptr) return;
                 for (std::int64_t j = 0; j < width; ++j) {
                   final.residue[to + j * final.column] = row[half_ + j];
                 }
               });
}

// The state before a chunk, for the backward pass.
void Scan::keep(const RowSource& source, float* const* state, std::int64_t first,
                std::int64_t column) const {
  float* to = source.kept(first, column);
  if (to == nullptr) return;
  const std::int64_t keys = padded(kind_.keys, kSlab);
  for (std::int64_t slab = 0; slab < slabs_; ++slab, to += keys * kSlab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    const float* from = state[slab];
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
  std::fill_n(column_log_, width, 0.0f);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t j = 0; j < width; ++j) column_log_[j] += g[i * width + j];
  }
  if (in_two_parts()) {
    decay_minus_1(isa_, width, column_log_, column_minus_1_);
    if (one_a_row()) std::fill_n(key_minus_1_, key_pitch_, *column_minus_1_);
  }
  const bool resets = decay_factors(isa_, count * width, g, column_decay_);
  settle(column_log_, count, width, column_decay_);
  return resets;
}

// Rows of keys, with decays per key. Returns whether one is exactly 0.
bool Scan::prepare_keys(RowSource& source) const {
  KeyRowsArgs a;
  a.blocks = blocks();
  a.key_pitch = key_pitch_;
  a.queries = kind_.queries;
  a.query_stride = rows_.tokens * key_pitch_;
  a.q = view_.q;
  a.q_scale = view_.q_scale;
  if (spreads()) {
    spread_queries();
    a.query_stride = blocks() * kBlock * key_pitch_;
    a.q = {q_spread_, key_pitch_};
  }
  a.k = view_.k;
  if (erase_) a.e = view_.e;
  if (general_) a.b = view_.b;
  a.u = rows_.u;
  a.erase_decayed = kind_.erase_decayed;
  if (kind_.decay_per_key) a.g = view_.g;
  a.decay_rows = decay_rows_;
  a.missing = missing_;
  if (one_a_row()) a.decay = column_decay_;
  a.rows = key_rows_;
  a.other_queries = other_queries_;
  a.leave = leave_;
  if (in_two_parts()) a.total_minus_1 = key_minus_1_;
  a.leaves = leaves_;
  a.pairs = pairs_;
  const KeyRowsResult result = fold_key_rows(isa_, a);
  source.check_decays(result.largest_log);
  return result.resets;
}

void Scan::run(std::span<const ScanHead> heads, std::int64_t first, std::int64_t tokens,
               std::int64_t column) {
  rows_.tokens = tokens;
  ahead_.token = first + tokens;
  ahead_.next = ahead_.columns;
  const std::int64_t next = std::min(heads.front().source->tokens() - ahead_.token, kTokens);
  const std::int64_t lines = next * (ahead_.end - ahead_.columns);
  for (std::int64_t head = 0; head < heads_; ++head) {
    ahead_.lines += (head + 1) * lines / heads_ - head * lines / heads_;
    run_head(*heads[static_cast<std::size_t>(head)].source, head, first, column);
  }
  ahead_.lines = 0;
  position_ += tokens;
}

void Scan::run_head(RowSource& source, std::int64_t head, std::int64_t first, std::int64_t column) {
  float** state = state_ + head * slabs_;
  keep(source, state, first, column);
  rows_.e = e_rows_;
  // Rows that are not there fill the last block only where they are packed.
  if (rows() % kBlock == 0) {
    view_ = source.view(first, column, columns_, rows_);
  } else {
    source.pack(first, column, columns_, rows_);
    pad();
    view_ = view_of(rows_);
  }
  const bool column_resets = prepare_columns();
  const bool key_resets = prepare_keys(source);
  // Slabs together take at most two thirds of the first-level cache.
  const std::int64_t together = kind_.keys <= 128 ? kTogether : 1;
  const std::int64_t lines = ahead_.lines;
  bool finite = true;
  for (std::int64_t slab = 0; slab < slabs_; slab += together) {
    const std::int64_t count = std::min(slabs_ - slab, together);
    const std::int64_t left = lines - (slab + count) * lines / slabs_;
    ahead_.lines -= left;
    finite =
        run_slabs(source, first, column, state, slab, count, column_resets || key_resets) && finite;
    ahead_.lines += left;
  }
  if (!finite) run_rows(source, first, column, state);
  source.finish(first, rows_.tokens, column, columns_);
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
bool Scan::run_slabs(RowSource& source, std::int64_t first, std::int64_t column, float** state,
                     std::int64_t slab, std::int64_t count, bool resets) {
  BlockSlab slabs[kTogether];
  float** spare = state_ + heads_ * slabs_;
  for (std::int64_t i = 0; i < count; ++i) {
    BlockSlab& s = slabs[i];
    const std::int64_t from = (slab + i) * kSlab;
    s.state_in = state[slab + i];
    s.state = in_two_parts() ? running_ + i * half_ : resets ? spare[i] : state[slab + i];
    s.v = view_.v.first + from;
    s.c = kind_.strength_per_value ? rows_.c + from : rows_.c;
    if (kind_.value_decay) s.value_decay = column_decay_ + from;
    if (in_two_parts()) {
      const std::int64_t rows = i * out_pitch() * kSlab;
      if (written_ != nullptr) s.written = written_ + rows;
      if (erased_ != nullptr) s.erased = erased_ + rows;
      if (column_leave_ != nullptr) s.column_leave = column_leave_ + rows / kBlock;
    }
    float** out = out_ + i * kind_.queries * out_pitch();
    locate_outputs(source, first, column + from, out);
    s.out = out;
    s.width = std::min(columns_ - from, kSlab);
  }
  BlockArgs a;
  a.blocks = blocks();
  a.keys = padded(kind_.keys, 4);
  a.key_pitch = key_pitch_;
  a.v_stride = view_.v.stride;
  a.value_pitch = value_pitch_;
  a.queries = kind_.queries;
  a.rows = key_rows_;
  a.other_queries = other_queries_;
  a.erase = erase_;
  a.general = general_;
  a.erase_decayed = kind_.erase_decayed;
  a.read_decayed = !kind_.bonus;
  a.pairs = pairs_;
  a.decay = decay_of_keys();
  a.leave = leave_;
  a.leaves = leaves_;
  a.sums = in_two_parts();
  a.slabs = slabs;
  a.slab_count = count;
  a.strength_per_value = kind_.strength_per_value;
  a.v_lacks_c = view_.v_lacks_c;
  a.out_pitch = out_pitch();
  a.stream = source.streams();
  a.ahead = &ahead_;
  a.scratch = block_scratch_;
  recurrence_block(isa_, a);
  bool finite = true;
  for (std::int64_t i = 0; in_two_parts() && i < count; ++i) {
    SumArgs sum;
    sum.chunk = &a;
    sum.slab = slabs + i;
    sum.key_minus_1 = key_minus_1_;
    if (kind_.value_decay) sum.column_minus_1 = column_minus_1_ + (slab + i) * kSlab;
    sum.low_in = slabs[i].state_in + half_;
    sum.state = resets ? spare[i] : state[slab + i];
    sum.low = sum.state + half_;
    recurrence_sums(isa_, sum);
  }
  for (std::int64_t i = 0; resets && i < count; ++i) {
    by_rows_[slab + i] = !all_finite(isa_, half_, spare[i]);
    if (by_rows_[slab + i]) {
      finite = false;
    } else {
      std::swap(state[slab + i], spare[i]);
    }
  }
  return finite;
}

// What fills a slab up to whole blocks may hold NaN by now, and no reset reaches it.
void Scan::clear_padding(float* state, std::int64_t width) const {
  for (float* part = state; part < state + slab_state(); part += half_) {
    for (std::int64_t i = 0; i < kind_.keys; ++i) {
      std::fill(part + i * kSlab + width, part + (i + 1) * kSlab, 0.0f);
    }
    std::fill(part + kind_.keys * kSlab, part + half_, 0.0f);
  }
}

// Outputs that are finite stay as they are: they must not depend on what comes later.
void Scan::run_rows(RowSource& source, std::int64_t first, std::int64_t column, float** state) {
  rows_.e = e_rows_;
  source.pack(first, column, columns_, rows_);
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    if (!by_rows_[slab]) continue;
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    clear_padding(state[slab], width);
    locate_outputs(source, first, column + slab * kSlab, out_);
    for (std::int64_t i = 0; i < rows(); ++i) {
      RowArgs a = row_args(isa_, kind_, rows_, i, slab * kSlab, width, row_factors_);
      a.s = state[slab];
      if (in_two_parts()) a.residue = a.s + half_;
      a.key_stride = kSlab;
      a.o = row_out_;
      a.o_stride = kSlab;
      recurrence_row(isa_, a);
      for (std::int64_t r = 0; r < a.queries; ++r) {
        float* out = out_[r * out_pitch() + i];
        for (std::int64_t j = 0; j < width; ++j) {
          if (!std::isfinite(out[j])) out[j] = row_out_[r * kSlab + j];
        }
      }
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

std::size_t rows_scan_scratch(const RowsKind& kind, std::int64_t columns, std::int64_t heads) {
  ScratchCounter counter;
  Scan(counter, kind, columns, heads);
  return counter.bytes();
}

void rows_scan(Isa isa, const RowsKind& kind, std::span<const ScanHead> heads, std::int64_t column,
               std::int64_t columns, std::int64_t position, Scratch& scratch) {
  const auto count = static_cast<std::int64_t>(heads.size());
  Scan scan(scratch, kind, columns, count);
  scan.begin(isa, heads, column, position);
  const RowSource& source = *heads.front().source;
  const std::int64_t tokens = source.tokens();
  for (std::int64_t t = 0; t < tokens; t += kTokens) {
    check_cancelled();
    scan.run(heads, t, std::min(tokens - t, kTokens), column);
  }
  for (std::int64_t head = 0; head < count; ++head) {
    scan.end(head, heads[static_cast<std::size_t>(head)].final.at_column(column));
  }
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
    if (position >= kLongSum) a.residue = state.residue;
    a.key_stride = state.row;
    a.o = o;
    a.o_stride = o_stride;
    recurrence_row(isa, a);
  }
}

}  // namespace ouzel
