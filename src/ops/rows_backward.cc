// Backward of the engine. Forward through the chunks once for the states at their begins (and what
// is erased), then chunk by chunk from the last one: the states within are recomputed, and the
// gradient G of the state is swept back through them. With P_t the decayed state, r_t what is
// erased and X_t the state that the erase reads (P_t or S_(t-1)):
//
//     G_t = q_t do_t^T + (what the next row passes on)       dq_t = S_t do_t
//     dk_t = G_t w_t    dv_t = G_t^T k_t                     w = v - c * r collinear, else v
//     dr_t = -c_t * dv_t collinear, G_t^T b_t general        dc_t = -dv_t * r_t    db_t = G_t r_t
//     de_t = X_t dr_t   dX_t += e_t dr_t^T                   dg_t, dgv_t = sums of dP_t * P_t
//     passed on: e^g_t dP_t e^gv_t (+ dX_t)
//
// Gradients of log decays are running sums of q * dq - k * dk where all gates of a chunk are mild.
// Those differences have no digits left at strong gates: blocks of four rows sum what crosses each
// gate (rows_block_grads.cc), or single rows sum dP * P directly.
#include "src/ops/rows_backward.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>

#include "src/kernels/recurrence_block.h"
#include "src/kernels/rows_backward.h"
#include "src/ops/rows_backward_buffers.h"

namespace ouzel {
namespace {

// Where all log decays of a chunk are at least this, they are folded into its rows and gradients of
// them are summed from those of rows: off by 2e-6. Not in the first chunk, whose states begin at
// nothing: gradients that are nearly 0 would be noise.
constexpr float kMildGate = -0.5f;

class RowsBackward {
 public:
  // `position`: tokens that the initial state has seen.
  RowsBackward(Isa isa, const RowsKind& kind, RowSource& source, RowAdjoint& adjoint,
               std::int64_t position, Scratch& scratch)
      : isa_(isa),
        kind_(kind),
        source_(source),
        adjoint_(adjoint),
        position_(position),
        tokens_(source.tokens()),
        erases_(kind.erase != EraseKind::kNone),
        source_keeps_(source.kept(0, 0) != nullptr),
        spreads_(kind.rows_per_token > 1),
        b_(scratch, kind, tokens_, source_keeps_) {}

  void run(const StateMemory<const float>& initial, const StateMemory<const float>& final_grad,
           const StateMemory<float>& initial_grad);

 private:
  // Where element (key, value) of a state stands.
  std::int64_t in_key_lanes(std::int64_t key, std::int64_t value) const {
    return value * b_.keys + key;
  }
  std::int64_t in_slabs(std::int64_t key, std::int64_t value) const {
    return (value / kValueSlab * b_.keys + key) * kValueSlab + value % kValueSlab;
  }
  const float* folded(const float* packed, const float* copy) const {
    return folds_.lambda != nullptr ? copy : packed;
  }
  // Of the chunk at hand; empty where there is none.
  std::span<const float> of_rows(const float* x, std::int64_t width,
                                 std::int64_t copies = 1) const {
    return {x, static_cast<std::size_t>(x != nullptr ? copies * rows_ * width : 0)};
  }
  std::span<const float> of_slabs(const float* x) const {
    return {x, static_cast<std::size_t>(b_.state_size)};
  }
  // Nothing is written beyond the columns of tiles.
  std::span<const float> of_lanes(const float* x) const {
    return {x, static_cast<std::size_t>(b_.keys * padded(kind_.values, kTileValues))};
  }
  // Those of all rows.
  const float* queries() const { return spreads_ ? b_.q : folded(b_.packed.q, b_.q); }
  FoldRowsArgs fold_args() const;
  ChunkArgs chunk_args() const;
  SweepArgs sweep_args() const;
  GateArgs gate_args() const;
  ErasingArgs block_args(std::int64_t first);
  AccumulateArgs accumulate_args() const;
  void pack(std::int64_t first, std::int64_t tokens, bool queries);
  void drop_reset_reads();
  void cut_blocks(ErasingArgs& args, std::initializer_list<std::span<const float>> factors);
  std::int64_t lines_of(std::int64_t first, bool adjoint);
  void pack_queries(std::int64_t first, std::int64_t tokens);
  bool sums_slowly(std::int64_t end) const;
  BlockSweepArgs block_sweep_args(const SweepArgs& sweep) const;
  BlockGradArgs block_grad_args(const SweepArgs& sweep) const;
  void erase_forward(std::int64_t first, float* state, float* low);
  void write_forward(std::int64_t first, const float* begin, float* end);
  float* first_pass();
  void backward(std::int64_t first, std::int64_t tokens, const float* begin, float* end);
  void unpack(std::int64_t first, const SweepArgs& sweep);

  Isa isa_;
  const RowsKind& kind_;
  RowSource& source_;
  RowAdjoint& adjoint_;
  std::int64_t position_, tokens_;
  bool erases_;
  bool source_keeps_;  // the states at the begins of chunks
  bool spreads_;       // queries over the rows of their tokens
  RowsBuffers b_;
  // Of the chunk at hand: rows, their decays, and whether one of those is 0.
  std::int64_t rows_ = 0;
  Folds folds_;
  bool resets_ = false;
  const float* e_ = nullptr;  // folded, or without what resets keep from being read
  static constexpr std::int64_t kMaxPrefetch = 128;
  PrefetchColumn prefetch_[kMaxPrefetch];
  bool four_ = true;  // whether its rows go in blocks of four
  bool from_final_grad_ = false;
  bool two_parts_ = false;  // whether grad_low holds what the gradient lost to rounding
};

FoldRowsArgs RowsBackward::fold_args() const {
  FoldRowsArgs args;
  args.rows = rows_;
  args.keys = b_.keys;
  args.pitch = b_.key_pitch;
  args.folds = &folds_;
  return args;
}

ChunkArgs RowsBackward::chunk_args() const {
  ChunkArgs args;
  args.rows = rows_;
  args.keys = b_.keys;
  args.values = padded(kind_.values, kTileValues);
  args.key_pitch = b_.key_pitch;
  args.value_pitch = b_.value_pitch;
  args.queries = kind_.queries;
  args.folds = kind_.decay ? &folds_ : nullptr;
  args.value_decay = b_.value_decay;
  args.before = erases_ ? !kind_.erase_decayed : kind_.bonus;
  return args;
}

// Rows of a chunk as the passes want them, but for q and what comes with it.
void RowsBackward::pack(std::int64_t first, std::int64_t tokens, bool queries) {
  rows_ = tokens * kind_.rows_per_token;
  b_.packed.tokens = b_.grads.tokens = tokens;
  float* q = std::exchange(b_.packed.q, queries ? b_.packed.q : nullptr);
  source_.pack(first, 0, kind_.values, b_.packed);
  b_.packed.q = q;
  folds_ = b_.folds;
  folds_.rows = rows_;
  four_ = !kind_.value_decay;
  resets_ = false;
  e_ = b_.packed.e;
  const bool mild = first > 0 && !kind_.value_decay && kind_.decay &&
                    least_decay(isa_, b_.packed.g, folds_) >= kMildGate;
  (mild ? folds_.factor : folds_.lambda) = nullptr;
  if (kind_.value_decay) {
    exponentials(isa_, rows_ * b_.value_pitch, b_.packed.gv, b_.value_decay);
    std::fill_n(b_.value_total, kind_.values, 0.0f);
    for (std::int64_t t = 0; t < rows_; ++t) {
      const float* gv = b_.packed.gv + t * b_.value_pitch;
      float* decay = b_.value_decay + t * b_.value_pitch;
      for (std::int64_t j = 0; j < kind_.values; ++j) {
        // A reset begins the sum anew, which may be NaN.
        b_.value_total[j] = gv[j] + (decay[j] == 0.0f ? 0 : b_.value_total[j]);
      }
      std::fill(decay + kind_.values, decay + b_.value_pitch, 0.0f);
    }
    // What fills up the values is 0, but for NaN: it decays to nothing.
    std::fill(b_.value_total + kind_.values, b_.value_total + b_.value_pitch,
              -std::numeric_limits<float>::infinity());
  }
  if (mild) {
    fold_decays(isa_, b_.packed.g, folds_);
    FoldRowsArgs args = fold_args();
    args.factor = folds_.inverse;
    fold_rows(isa_, args, b_.packed.k, b_.k);
    if (b_.b != nullptr) fold_rows(isa_, args, b_.packed.b, b_.b);
    args.factor = folds_.lambda;
    args.next = kind_.erase_decayed;
    if (erases_) fold_rows(isa_, args, b_.packed.e, b_.e);
    e_ = b_.e;
  } else if (kind_.decay) {
    resets_ = row_decays(isa_, b_.packed.g, folds_);
  }
}

// An erase does not read what a decay of 0 has dropped, even with NaN.
void RowsBackward::drop_reset_reads() {
  for (std::int64_t t = 0; t < rows_; ++t) {
    const float* factor = folds_.factor + t * folds_.pitch;
    const float* from = b_.packed.e + t * b_.key_pitch;
    float* to = b_.e + t * b_.key_pitch;
    for (std::int64_t i = 0; i < b_.keys; ++i) {
      to[i] = factor[folds_.per_key ? i : 0] == 0.0f ? 0 : from[i];
    }
  }
  e_ = b_.e;
}

// The products of blocks of four rows, or of single ones where a block would hide a decay of 0: it
// multiplies all there is, even NaN. `others`: what it multiplies beside rows of keys, decays and
// strengths, whose products are finite only if they are.
void RowsBackward::cut_blocks(ErasingArgs& args,
                              std::initializer_list<std::span<const float>> others) {
  args.four = four_;
  block_products(isa_, args);
  if (!resets_ || !four_) return;
  const auto finite = [&](std::span<const float> x) {
    return all_finite(isa_, static_cast<std::int64_t>(x.size()), x.data());
  };
  four_ = finite(of_rows(args.ek, kRowBlock)) && finite(of_rows(args.eb, kRowBlock)) &&
          finite(of_rows(args.qk, kRowBlock, kind_.queries)) &&
          finite(of_rows(args.qb, kRowBlock, kind_.queries)) &&
          finite(of_rows(args.c, kind_.strength_per_value ? b_.value_pitch : 1)) &&
          finite(of_rows(folds_.factor, folds_.pitch)) &&
          std::all_of(others.begin(), others.end(), finite);
  if (four_) return;
  if (erases_ && kind_.erase_decayed) drop_reset_reads();
  args.e = e_;
  args.four = false;
  args.erase_products_stand = false;
  block_products(isa_, args);
}

// Sets prefetch_ to what packing the whole chunk at `first` will touch.
std::int64_t RowsBackward::lines_of(std::int64_t first, bool adjoint) {
  if (first < 0 || first + backward_chunk(kind_) > tokens_) return 0;
  std::int64_t count = source_.prefetch(first, 0, kind_.values, prefetch_, kMaxPrefetch);
  if (adjoint) count += adjoint_.lines(first, prefetch_ + count, kMaxPrefetch - count);
  return count;
}

void RowsBackward::pack_queries(std::int64_t first, std::int64_t tokens) {
  const std::int64_t every = kind_.rows_per_token;
  if (queries() == b_.q) {
    FoldRowsArgs args = fold_args();
    args.every = every;
    args.factor = folds_.lambda;
    args.next = !kind_.bonus;
    for (std::int64_t i = 0; i < kind_.queries; ++i) {
      fold_rows(isa_, args, b_.packed.q + i * tokens * b_.key_pitch,
                b_.q + i * rows_ * b_.key_pitch);
    }
  }
  float* packed = every > 1 ? b_.token_grad : b_.output_grad;
  adjoint_.pack_output_grads(first, tokens, b_.value_pitch, packed);
  if (every == 1) return;
  std::fill_n(b_.output_grad, kind_.queries * rows_ * b_.value_pitch, 0.0f);
  for (std::int64_t t = 0; t < kind_.queries * tokens; ++t) {
    std::copy_n(packed + t * b_.value_pitch, b_.value_pitch,
                b_.output_grad + ((t + 1) * every - 1) * b_.value_pitch);
  }
}

GateArgs RowsBackward::gate_args() const {
  GateArgs args;
  args.rows = rows_;
  args.keys = b_.keys;
  args.pitch = b_.key_pitch;
  args.queries = kind_.queries;
  args.every = kind_.rows_per_token;
  args.before = erases_ ? !kind_.erase_decayed : kind_.bonus;
  args.q = b_.packed.q;
  args.k = b_.packed.k;
  args.e = b_.packed.e;
  args.b = b_.packed.b;
  args.dq = b_.grads.q;
  args.dk = b_.grads.k;
  args.de = b_.grads.e;
  args.db = b_.grads.b;
  args.sums = b_.gate_sums;
  args.dg = b_.dg;
  return args;
}

AccumulateArgs RowsBackward::accumulate_args() const {
  AccumulateArgs args;
  static_cast<ChunkArgs&>(args) = chunk_args();
  args.value_total = b_.value_total;
  return args;
}

ErasingArgs RowsBackward::block_args(std::int64_t first) {
  ErasingArgs args;
  static_cast<ChunkArgs&>(args) = chunk_args();
  args.q = queries();
  args.k = folded(b_.packed.k, b_.k);
  args.e = e_;
  args.b = folded(b_.packed.b, b_.b);
  args.v = b_.packed.v;
  args.c = b_.packed.c;
  args.c_per_value = kind_.strength_per_value;
  args.block_q = b_.block_q;
  args.block_k = b_.block_k;
  args.block_e = b_.block_e;
  args.block_b = b_.block_b;
  args.block_factor = b_.block_factor;
  args.r = b_.erased + first * kind_.rows_per_token * b_.value_pitch;
  args.ek = b_.ek;
  args.eb = b_.eb;
  return args;
}

SweepArgs RowsBackward::sweep_args() const {
  SweepArgs args;
  static_cast<ChunkArgs&>(args) = chunk_args();
  args.q = queries();
  args.k = folded(b_.packed.k, b_.k);
  args.e = e_;
  args.b = folded(b_.packed.b, b_.b);
  args.output_grad = b_.output_grad;
  args.write = kind_.erase == EraseKind::kCollinear ? b_.written : b_.packed.v;
  args.read_grad = b_.dr;
  args.grad = b_.grad;
  args.dq = b_.dq != nullptr ? b_.dq : b_.grads.q;
  args.dk = b_.grads.k;
  args.de = b_.grads.e;
  args.db = b_.grads.b;
  args.dv = erases_ ? nullptr : b_.grads.v;
  if (folds_.lambda != nullptr) {
    args.gate_sums = b_.gate_sums;
  } else {
    args.dg = b_.dg;
    args.dgv = b_.grads.gv;
  }
  args.states = b_.states;
  args.history = b_.history;
  return args;
}

BlockSweepArgs RowsBackward::block_sweep_args(const SweepArgs& sweep) const {
  BlockSweepArgs args;
  static_cast<SweepArgs&>(args) = sweep;
  args.q = b_.block_q;
  args.k = b_.block_k;
  args.e = b_.block_e;
  args.b = b_.block_b;
  args.factor = b_.block_factor;
  args.gate_sums = b_.gate_sums;
  return args;
}

BlockGradArgs RowsBackward::block_grad_args(const SweepArgs& sweep) const {
  BlockGradArgs args;
  static_cast<ChunkArgs&>(args) = chunk_args();
  args.q = sweep.q;
  args.k = sweep.k;
  args.e = sweep.e;
  args.b = sweep.b;
  args.output_grad = sweep.output_grad;
  args.write = sweep.write;
  args.read = sweep.read;
  args.read_grad = sweep.read_grad;
  args.qk = b_.qk;
  args.gate_sums = b_.gate_sums;
  args.dq = sweep.dq;
  args.dk = sweep.dk;
  args.de = sweep.de;
  args.db = sweep.db;
  args.dv = sweep.dv;
  args.dg = sweep.dg;
  args.qw = b_.qw;
  args.qr = b_.qr;
  args.ew = b_.ew;
  args.er = b_.er;
  return args;
}

// A state, slabs, through the chunk that is packed: what is erased. `low`: see ErasingArgs.
void RowsBackward::erase_forward(std::int64_t first, float* state, float* low) {
  ErasingArgs args = block_args(first);
  args.state = state;
  args.low = low;
  cut_blocks(args, {of_slabs(state), of_rows(b_.packed.v, b_.value_pitch)});
  block_forward(isa_, args);
}

// A state in key lanes through the chunk that is packed.
void RowsBackward::write_forward(std::int64_t first, const float* begin, float* end) {
  AccumulateArgs args = accumulate_args();
  args.x = folded(b_.packed.k, b_.k);
  args.a = b_.packed.v;
  args.state = begin;
  args.state_out = end;
  args.low = b_.low;
  args.prefetch = prefetch_;
  args.prefetch_count = lines_of(first + b_.packed.tokens, false);
  accumulate_rows(isa_, args);
}

// Through all chunks for the states at their begins, and what is erased. Returns the last state.
float* RowsBackward::first_pass() {
  const std::int64_t chunk = backward_chunk(kind_);
  float* states = b_.kept;
  for (std::int64_t t = 0; t < tokens_; t += chunk, states += b_.state_size) {
    check_cancelled();
    pack(t, std::min(chunk, tokens_ - t), false);
    float* end = states + b_.state_size;
    if (erases_) {
      std::copy_n(states, b_.state_size, end);
      erase_forward(t, end, position_ + t >= kLongSum ? b_.low : nullptr);
    } else {
      write_forward(t, states, end);
    }
  }
  return states;
}

// Whether a gradient that has come from so far that a plain sum would be off, or will go so far
// from that of a final state, is to be summed in two parts over the chunk that ends at `end`: where
// a channel hardly decays.
bool RowsBackward::sums_slowly(std::int64_t end) const {
  if ((from_final_grad_ ? tokens_ : tokens_ - end) < kLongSum) return false;
  if (!kind_.decay) return true;
  const float* total = folds_.total;
  const std::int64_t size = kind_.decay_per_key ? kind_.keys : 1;
  const float slow = static_cast<float>(kSlowDecay) * static_cast<float>(b_.packed.tokens);
  return *std::max_element(total, total + size) > slow;
}

// Back through a chunk: `begin` and `end` are its states. Where the source keeps those, `begin` is
// slabs and there is no `end`: it is in transposed_end, but for the last chunk.
void RowsBackward::backward(std::int64_t first, std::int64_t tokens, const float* begin,
                            float* end) {
  pack(first, tokens, true);
  SweepArgs sweep = sweep_args();
  if (erases_ || source_keeps_) {
    transpose_slabs(isa_, b_.keys, sweep.values, begin, b_.transposed);
    sweep.state = b_.transposed;
    sweep.state_end = b_.transposed_end;
  } else {
    sweep.state = begin;
    sweep.state_end = end;
  }
  if (source_keeps_) {
    const bool last = first + tokens == tokens_;
    if (erases_) {
      std::copy_n(begin, b_.state_size, b_.kept);
      erase_forward(0, b_.kept, nullptr);
      if (last) transpose_slabs(isa_, b_.keys, sweep.values, b_.kept, b_.transposed_end);
    } else if (last) {
      write_forward(first, b_.transposed, b_.transposed_end);
    }
  }
  pack_queries(first, tokens);
  const bool slow = sums_slowly(first + tokens);
  if (slow && !two_parts_) std::fill_n(b_.grad_low, b_.state_size, 0.0f);
  two_parts_ = slow;
  const bool direct = kind_.decay && folds_.lambda == nullptr;
  if (erases_ || direct) {
    ErasingArgs block = block_args(source_keeps_ ? 0 : first);
    block.erase_products_stand = source_keeps_;
    block.qk = b_.qk;
    block.qb = b_.qb;
    cut_blocks(block, {erases_ || source_keeps_ ? of_slabs(begin) : of_lanes(begin),
                       of_lanes(b_.grad), of_rows(b_.packed.v, b_.value_pitch),
                       of_rows(b_.output_grad, b_.value_pitch, kind_.queries)});
    if (erases_) {
      block.state = b_.grad_slabs;
      block.low = slow ? b_.grad_low : nullptr;
      block.output_grad = b_.output_grad;
      block.written = b_.written;
      block.dv = b_.grads.v;
      block.dr = b_.dr;
      block.dc = b_.grads.c;
      block_backward(isa_, block);
      sweep.read = block.r;
    }
  }
  // A tile of the state at the chunk's end is not needed any more when its gradient is stored.
  sweep.grad_out = !slow ? b_.grad : erases_ || source_keeps_ ? b_.transposed_end : end;
  sweep.prefetch = prefetch_;
  sweep.prefetch_count = lines_of(first - backward_chunk(kind_), true);
  direct&& four_ ? block_sweep(isa_, block_sweep_args(sweep)) : backward_sweep(isa_, sweep);
  if (slow && erases_) {
    transpose_slabs(isa_, b_.keys, sweep.values, b_.grad_slabs, b_.grad);
  } else if (slow) {
    AccumulateArgs args = accumulate_args();
    args.reverse = true;
    args.writes = kind_.queries;
    args.x = folded(b_.packed.q, b_.q);
    args.a = b_.output_grad;
    args.state = args.state_out = b_.grad;
    args.low = b_.grad_low;
    accumulate_rows(isa_, args);
  }
  std::swap(b_.transposed, b_.transposed_end);
  unpack(first, sweep);
}

// Gradients of folded rows back to those of the rows.
void RowsBackward::unpack(std::int64_t first, const SweepArgs& sweep) {
  const std::int64_t tokens = b_.packed.tokens;
  FoldRowsArgs args = fold_args();
  const bool folded = folds_.lambda != nullptr;
  if (folded) {
    args.factor = folds_.inverse;
    unfold_rows(isa_, args, b_.grads.k, b_.grads.k);
    if (b_.b != nullptr) unfold_rows(isa_, args, b_.grads.b, b_.grads.b);
    args.factor = folds_.lambda;
    args.next = kind_.erase_decayed;
    if (erases_) unfold_rows(isa_, args, b_.grads.e, b_.grads.e);
  } else if (kind_.decay && four_) {
    block_grads(isa_, block_grad_args(sweep));
  }
  if (folded || spreads_) {
    args.every = kind_.rows_per_token;
    args.next = !kind_.bonus;
    for (std::int64_t i = 0; i < kind_.queries; ++i) {
      float* dq = b_.grads.q + i * tokens * b_.key_pitch;
      unfold_rows(isa_, args, spreads_ ? b_.dq + i * rows_ * b_.key_pitch : dq, dq);
    }
  }
  if (folded) gate_grads(isa_, gate_args());
  if (kind_.decay && !kind_.decay_per_key) sum_keys(isa_, fold_args(), b_.dg, b_.grads.g);
  if (kind_.bonus) {
    std::fill_n(b_.grads.u, b_.key_pitch, 0.0f);
    BonusArgs bonus;
    bonus.rows = tokens;
    bonus.key_pitch = b_.key_pitch;
    bonus.value_pitch = b_.value_pitch;
    bonus.k = b_.packed.k;
    bonus.u = b_.packed.u;
    bonus.v = b_.packed.v;
    bonus.dk = b_.grads.k;
    bonus.du = b_.grads.u;
    bonus.dv = b_.grads.v;
    for (std::int64_t i = 0; i < kind_.queries; ++i) {
      bonus.q = b_.packed.q + i * tokens * b_.key_pitch;
      bonus.dq = b_.grads.q + i * tokens * b_.key_pitch;
      bonus.output_grad = b_.output_grad + i * tokens * b_.value_pitch;
      bonus_grads(isa_, bonus);
    }
  }
  adjoint_.unpack(first, b_.packed, b_.grads);
}

void RowsBackward::run(const StateMemory<const float>& initial,
                       const StateMemory<const float>& final_grad,
                       const StateMemory<float>& initial_grad) {
  // Columns beyond the last tile, which no sweep writes.
  std::fill_n(b_.grads.v, b_.rows * b_.value_pitch, 0.0f);
  if (kind_.value_decay) std::fill_n(b_.grads.gv, b_.rows * b_.value_pitch, 0.0f);
  for (float* s : {b_.kept, b_.low, b_.grad, b_.grad_slabs}) {
    if (s != nullptr) std::fill_n(s, b_.state_size, 0.0f);
  }
  for (std::int64_t key = 0; key < kind_.keys; ++key) {
    for (std::int64_t value = 0; value < kind_.values; ++value) {
      const std::int64_t lanes = in_key_lanes(key, value), slab = in_slabs(key, value);
      const auto at = [&](const StateMemory<const float>& m) {
        return key * m.row + value * m.column;
      };
      if (initial.s != nullptr) b_.kept[erases_ ? slab : lanes] = initial.s[at(initial)];
      if (initial.residue != nullptr && !source_keeps_) {
        // Erases sum in two parts from a position on, all else always.
        float* low = !erases_ ? b_.low + lanes : position_ >= kLongSum ? b_.low + slab : nullptr;
        if (low != nullptr) {
          *low = initial.residue[at(initial)];
        } else {
          b_.kept[slab] += initial.residue[at(initial)];
        }
      }
      if (final_grad.s != nullptr) {
        b_.grad[lanes] = final_grad.s[at(final_grad)];
        if (erases_) b_.grad_slabs[slab] = b_.grad[lanes];
      }
    }
  }
  from_final_grad_ = final_grad.s != nullptr;
  const std::int64_t chunk = backward_chunk(kind_), last = padded(tokens_, chunk) - chunk;
  float* states = source_keeps_ ? nullptr : first_pass();
  if (erases_ && !source_keeps_) {
    transpose_slabs(isa_, b_.keys, chunk_args().values, states, b_.transposed_end);
  }
  for (std::int64_t t = last; t >= 0; t -= chunk) {
    check_cancelled();
    const std::int64_t tokens = std::min(chunk, tokens_ - t);
    if (source_keeps_) {
      backward(t, tokens, source_.kept(t, 0), nullptr);
    } else {
      backward(t, tokens, states - b_.state_size, states);
      states -= b_.state_size;
    }
  }
  if (initial_grad.s == nullptr) return;
  for (std::int64_t key = 0; key < kind_.keys; ++key) {
    for (std::int64_t value = 0; value < kind_.values; ++value) {
      initial_grad.s[key * initial_grad.row + value * initial_grad.column] =
          b_.grad[in_key_lanes(key, value)];
    }
  }
}

}  // namespace

std::size_t rows_backward_scratch(const RowsKind& kind, std::int64_t tokens, bool kept) {
  ScratchCounter counter;
  RowsBuffers(counter, kind, tokens, kept);
  return counter.bytes();
}

void rows_backward(Isa isa, const RowsKind& kind, RowSource& source, RowAdjoint& adjoint,
                   const StateMemory<const float>& initial, std::int64_t position,
                   const StateMemory<const float>& final_grad,
                   const StateMemory<float>& initial_grad, Scratch& scratch) {
  RowsBackward(isa, kind, source, adjoint, position, scratch)
      .run(initial, final_grad, initial_grad);
}

}  // namespace ouzel
