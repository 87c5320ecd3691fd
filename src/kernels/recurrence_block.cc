// The slab block: a chunk's rows in blocks of four through slabs of the state that stay in the
// first-level cache (src/kernels/recurrence_block.h). The forward substitution within a block is
// that of the delta rule's WY form (Yang et al. 2024, arXiv:2406.06484), four rows at a time.
//
// The work of a block on a strip of two vectors of columns: a sweep for what is erased, the
// substitution, and a sweep that reads and writes. Two strips take turns, so that one's
// substitution, a chain of dependent operations, runs beside the other's sweep.
#include "src/kernels/recurrence_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_block.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/two_part-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);
constexpr int kVectors = 2;
constexpr std::int64_t kStrip = kVectors * kLanes;
// A factor that the state lacks stays above this, so that its reciprocal is harmless.
constexpr float kLeast = 0x1p-60f;
// AVX-512 has registers enough to read for the first query in the sweep that writes.
constexpr bool kReadsInWrite = HWY_TARGET == HWY_AVX3;

enum class Erase { kNone, kCollinear, kGeneral };
enum class ColumnDecay { kNone, kSame, kPerValue };

// Brings in the lines of the next chunk, evenly spread over the steps of all sweeps, two keys each:
// in bursts they would take the buffers that loads from the second-level cache need too.
struct Prefetch {
  static constexpr std::int64_t kNever = std::int64_t{1} << 62;
  const PrefetchColumn* column;
  const float* next;
  std::int64_t columns, tokens, token, every, wait;
  Prefetch(const BlockArgs& a, std::int64_t steps)
      : column(a.prefetch), columns(a.prefetch_count), tokens(a.prefetch_tokens), token(0) {
    next = columns > 0 ? column->first : nullptr;
    every = columns > 0 ? HWY_MAX(1, steps / (columns * tokens)) : kNever;
    wait = every;
  }
  // A line; returns after how many steps the next is due.
  std::int64_t fetch() {
    __builtin_prefetch(next, 0, 2);
    next += column->stride;
    if (++token == tokens) {
      if (--columns == 0) return kNever;
      token = 0;
      next = (++column)->first;
    }
    return every;
  }
};

// A strip's scratch, in rows of kStrip: what four rows write, what they read, and so on.
struct Strip {
  const BlockSlab* slab;
  std::int64_t column;
  const float *state_in, *low_in;
  float *state, *low;
  float* fold;    // what the columns lack
  float* erased;  // [4]: the state read for the erase
  float* w;       // [4]: goes with k
  float* r;       // [4]: goes with b
  float* factor;  // [4]: decay of the columns from the state to each row's read
  float* reads;   // [queries][4]: the state read
  float* recent;  // [queries][4]: what the block's own rows add

  static std::int64_t floats(std::int64_t queries) {
    return kStrip + (4 + 2 * queries) * kBlock * kStrip;
  }
  Strip(const BlockArgs& a, std::int64_t index, float* scratch)
      : slab(a.slabs + index * kStrip / kSlab), column(index * kStrip % kSlab) {
    state_in = slab->state_in + column;
    state = slab->state + column;
    if (slab->low != nullptr) {
      low_in = slab->low_in + column;
      low = slab->low + column;
    }
    fold = scratch;
    erased = fold + kStrip;
    w = erased + kBlock * kStrip;
    r = w + kBlock * kStrip;
    factor = r + kBlock * kStrip;
    reads = factor + kBlock * kStrip;
    recent = reads + a.queries * kBlock * kStrip;
    for (std::int64_t i = 0; i < kStrip; ++i) fold[i] = 1;
  }
};

// out_i = S^T x_i for four rows.
HWY_INLINE void sweep_reads(const float* x, std::int64_t pitch, std::int64_t keys,
                            const float* state, float* out, Prefetch& prefetch) {
  const D d;
  std::int64_t wait = prefetch.wait;  // in a register
  // AVX-512: odd keys have sums of their own, since eight do not hide the latency.
  constexpr int kSums = HWY_TARGET == HWY_AVX3 ? 2 : 1;
  V sum[kSums][kBlock][kVectors];
  OUZEL_UNROLL
  for (int n = 0; n < kSums; ++n) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[n][i][j] = hn::Zero(d);
    }
  }
  for (std::int64_t key = 0; key < keys; key += 2) {
    if (--wait == 0) wait = prefetch.fetch();
    OUZEL_UNROLL
    for (int n = 0; n < 2; ++n) {
      V s[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        s[j] = hn::Load(d, state + (key + n) * kSlab + j * kLanes);
      }
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        const V x_i = hn::Set(d, x[i * pitch + key + n]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          sum[n % kSums][i][j] = hn::MulAdd(x_i, s[j], sum[n % kSums][i][j]);
        }
      }
    }
  }
  prefetch.wait = wait;
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V total = kSums == 1 ? sum[0][i][j] : hn::Add(sum[0][i][j], sum[kSums - 1][i][j]);
      hn::Store(total, d, out + i * kStrip + j * kLanes);
    }
  }
}

struct WriteArgs {
  std::int64_t keys, pitch;
  const float *q, *k, *b;
  const float *leave, *leave_minus_1;  // of keys, or null
  // The columns' factor, and in two parts its difference to 1.
  const float *column_leave, *column_minus_1;
};

// S = S * leave + sum_i k_i w_i^T + b_i r_i^T, and the reads of the state before for the first
// query
template <Erase kErase, bool kTwoParts, bool kLeaveKeys, bool kLeaveColumns>
HWY_INLINE void sweep_writes(const WriteArgs a, const Strip& strip, const V (&w)[kBlock][kVectors],
                             const V (&r)[kBlock][kVectors], Prefetch& prefetch) {
  const D d;
  std::int64_t wait = prefetch.wait;  // in a register, as are the addresses
  const float *state_in = strip.state_in, *low_in = strip.low_in;
  float *state = strip.state, *low_out = strip.low;
  V sum[kBlock][kVectors], fold[kVectors], column_minus_1[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) sum[i][j] = hn::Zero(d);
    if constexpr (kLeaveColumns) fold[j] = hn::Load(d, a.column_leave + j * kLanes);
    if constexpr (kLeaveColumns && kTwoParts) {
      column_minus_1[j] = hn::Load(d, a.column_minus_1 + j * kLanes);
    }
  }
  for (std::int64_t key = 0; key < a.keys; key += 2) {
    if (--wait == 0) wait = prefetch.fetch();
    OUZEL_UNROLL
    for (int n = 0; n < 2; ++n) {
      const std::int64_t at = (key + n) * kSlab;
      V s[kVectors], change[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        s[j] = hn::Load(d, state_in + at + j * kLanes);
        if constexpr (kTwoParts) {
          change[j] = hn::Zero(d);
        } else {
          change[j] = s[j];
          if constexpr (kLeaveKeys) change[j] = hn::Mul(change[j], hn::Set(d, a.leave[key + n]));
          if constexpr (kLeaveColumns) change[j] = hn::Mul(change[j], fold[j]);
        }
      }
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        if constexpr (kReadsInWrite) {
          const V q = hn::Set(d, a.q[i * a.pitch + key + n]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(q, s[j], sum[i][j]);
        }
        const V k = hn::Set(d, a.k[i * a.pitch + key + n]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) change[j] = hn::MulAdd(k, w[i][j], change[j]);
        if constexpr (kErase == Erase::kGeneral) {
          const V b = hn::Set(d, a.b[i * a.pitch + key + n]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) change[j] = hn::MulAdd(b, r[i][j], change[j]);
        }
      }
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (kTwoParts) {
          V factor = hn::Set(d, 1.0f), minus_1 = hn::Zero(d);
          if constexpr (kLeaveKeys) {
            factor = hn::Set(d, a.leave[key + n]);
            minus_1 = hn::Set(d, a.leave_minus_1[key + n]);
          }
          if constexpr (kLeaveColumns) {
            factor = hn::Mul(factor, fold[j]);
            minus_1 = hn::MulAdd(minus_1, column_minus_1[j], hn::Add(minus_1, column_minus_1[j]));
          }
          V low = hn::Load(d, low_in + at + j * kLanes);
          change[j] = two_part_sum(d, s[j], low, factor, minus_1, change[j]);
          hn::Store(low, d, low_out + at + j * kLanes);
        }
        hn::Store(change[j], d, state + at + j * kLanes);
      }
    }
  }
  prefetch.wait = wait;
  if constexpr (kReadsInWrite) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        hn::Store(sum[i][j], d, strip.reads + i * kStrip + j * kLanes);
      }
    }
  }
}

// x + what rows before row i, and for the diagonal i itself, add to what a reader reads.
template <Erase kErase>
HWY_INLINE V add_recent(V x, const float* pairs, std::int64_t pitch, int i, bool diagonal, int j,
                        const V (&w)[kBlock][kVectors], const V (&r)[kBlock][kVectors]) {
  const D d;
  OUZEL_UNROLL
  for (int m = 0; m < kBlock; ++m) {
    if (m > i || (m == i && !diagonal)) continue;
    x = hn::MulAdd(hn::Set(d, pairs[pair_of(i, m)]), w[m][j], x);
    if constexpr (kErase == Erase::kGeneral) {
      x = hn::MulAdd(hn::Set(d, pairs[pitch + pair_of(i, m)]), r[m][j], x);
    }
  }
  return x;
}

template <Erase kErase, ColumnDecay kDecay, bool kTwoParts>
struct Block {
  static constexpr bool kErases = kErase != Erase::kNone;
  static constexpr bool kPerValue = kDecay == ColumnDecay::kPerValue;
  // Without either, what is written is the values.
  static constexpr bool kSubstitutes = kErases || kPerValue;

  static HWY_INLINE const float* pairs(const BlockArgs& a, std::int64_t block) {
    return a.pairs + block * (kErase == Erase::kGeneral ? 2 : 1) * pairs_pitch(kErases, a.queries);
  }

  // What the block's own rows add to the reads of row i, and the decay of the state up to there.
  static HWY_INLINE void recall(const BlockArgs& a, const float* pairs, int i, const Strip& strip,
                                const V (&fold)[kVectors], const V (&w)[kBlock][kVectors],
                                const V (&r)[kBlock][kVectors]) {
    const D d;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = i * kStrip + j * kLanes;
      hn::Store(fold[j], d, strip.factor + at);
      for (std::int64_t query = 0; query < a.queries; ++query) {
        const V x = add_recent<kErase>(hn::Zero(d), pairs + query_pairs(kErases, query),
                                       pairs_pitch(kErases, a.queries), i, true, j, w, r);
        hn::Store(x, d, strip.recent + query * kBlock * kStrip + at);
      }
    }
  }

  static HWY_INLINE void erase(const BlockArgs& a, const float* pairs, std::int64_t row, int i,
                               const Strip& strip, const V (&fold)[kVectors],
                               const V (&w)[kBlock][kVectors], V (&r)[kBlock][kVectors]) {
    const D d;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      V x = hn::Load(d, strip.erased + i * kStrip + j * kLanes);
      if constexpr (kPerValue) x = hn::Mul(x, fold[j]);
      if constexpr (kDecay == ColumnDecay::kSame) x = hn::Mul(x, hn::Set(d, a.erase_factor[row]));
      r[i][j] = add_recent<kErase>(x, pairs, pairs_pitch(kErases, a.queries), i, false, j, w, r);
    }
  }

  // Reads what is erased, then finds row by row what is written: w and r. Decays per value are
  // followed from row to row by them and by what the columns of the state lack.
  static void substitute(const BlockArgs& a, std::int64_t block, const Strip& strip,
                         Prefetch& prefetch) {
    const D d;
    const float* pairs = Block::pairs(a, block);
    if constexpr (kErases) {
      sweep_reads(a.e + block * kBlock * a.key_pitch, a.key_pitch, a.keys, strip.state_in,
                  strip.erased, prefetch);
    }
    V w[kBlock][kVectors], r[kBlock][kVectors], fold[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) fold[j] = hn::Load(d, strip.fold + j * kLanes);
    const BlockSlab& slab = *strip.slab;
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const std::int64_t row = block * kBlock + i;
      const std::int64_t at = row * a.value_pitch + strip.column;
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        w[i][j] = hn::Load(d, slab.v + at + j * kLanes);
        r[i][j] = hn::Zero(d);
      }
      if constexpr (kPerValue) {
        if (kErases && !a.erase_decayed) erase(a, pairs, row, i, strip, fold, w, r);
        if (!a.read_decayed) recall(a, pairs, i, strip, fold, w, r);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          const V factor = hn::Load(d, slab.value_decay + at + j * kLanes);
          fold[j] = hn::Mul(fold[j], factor);
          OUZEL_UNROLL
          for (int m = 0; m < kBlock; ++m) {
            if (m >= i) continue;
            w[m][j] = hn::Mul(w[m][j], factor);
            if constexpr (kErase == Erase::kGeneral) r[m][j] = hn::Mul(r[m][j], factor);
          }
        }
      }
      if (kErases && (!kPerValue || a.erase_decayed)) {
        erase(a, pairs, row, i, strip, fold, w, r);
      }
      if constexpr (kErase == Erase::kCollinear) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          const V c = a.strength_per_value ? hn::Load(d, slab.c + at + j * kLanes)
                                           : hn::Set(d, slab.c[row]);
          w[i][j] = hn::NegMulAdd(c, r[i][j], w[i][j]);
        }
      }
      if constexpr (kPerValue) {
        if (a.read_decayed) recall(a, pairs, i, strip, fold, w, r);
      }
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kPerValue) hn::Store(fold[j], d, strip.fold + j * kLanes);
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        hn::Store(w[i][j], d, strip.w + i * kStrip + j * kLanes);
        if constexpr (kErase == Erase::kGeneral) {
          hn::Store(r[i][j], d, strip.r + i * kStrip + j * kLanes);
        }
      }
    }
  }

  static HWY_INLINE void load_written(const BlockArgs& a, std::int64_t block, const Strip& strip,
                                      V (&w)[kBlock][kVectors], V (&r)[kBlock][kVectors]) {
    const D d;
    const float* from = strip.w;
    std::int64_t pitch = kStrip;
    if constexpr (!kSubstitutes) {
      pitch = a.value_pitch;
      from = strip.slab->v + block * kBlock * pitch + strip.column;
    }
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        w[i][j] = hn::Load(d, from + i * pitch + j * kLanes);
        r[i][j] = kErase == Erase::kGeneral ? hn::Load(d, strip.r + i * kStrip + j * kLanes)
                                            : hn::Zero(d);
      }
    }
  }

  // Multiplies what row i writes by factor_i.
  template <class Factor>
  static HWY_INLINE void scale_written(Factor factor, V (&w)[kBlock][kVectors],
                                       V (&r)[kBlock][kVectors]) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const V x = factor(i, j);
        w[i][j] = hn::Mul(w[i][j], x);
        if constexpr (kErase == Erase::kGeneral) r[i][j] = hn::Mul(r[i][j], x);
      }
    }
  }

  // Whether the state must take the columns' factor now.
  static HWY_INLINE bool columns_leave(const BlockArgs& a, std::int64_t block, const Strip& strip) {
    if constexpr (kDecay == ColumnDecay::kSame) return a.leaves[block];
    if constexpr (!kPerValue) return false;
    const D d;
    bool leave = kTwoParts || block + 1 == a.blocks;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V fold = hn::Load(d, strip.fold + j * kLanes);
      leave = leave || !hn::AllFalse(d, hn::Lt(fold, hn::Set(d, kLeast)));
    }
    return leave;
  }

  static void write(const BlockArgs& a, std::int64_t block, const Strip& strip,
                    Prefetch& prefetch) {
    const D d;
    const std::int64_t offset = block * kBlock * a.key_pitch;
    for (std::int64_t query = kReadsInWrite ? 1 : 0; query < a.queries; ++query) {
      sweep_reads(a.q + query * a.query_stride + offset, a.key_pitch, a.keys, strip.state_in,
                  strip.reads + query * kBlock * kStrip, prefetch);
    }
    WriteArgs args = {};
    args.keys = a.keys;
    args.pitch = a.key_pitch;
    args.q = a.q + offset;
    args.k = a.k + offset;
    if constexpr (kErase == Erase::kGeneral) args.b = a.b + offset;
    const bool leave_keys = a.decay_per_key && a.leaves[block];
    if (leave_keys) {
      args.leave = a.leave + block * a.key_pitch;
      if constexpr (kTwoParts) args.leave_minus_1 = a.leave_minus_1 + block * a.key_pitch;
    }
    V w[kBlock][kVectors], r[kBlock][kVectors];
    load_written(a, block, strip, w, r);
    const bool leave_columns = columns_leave(a, block, strip);
    HWY_ALIGN float column_leave[kStrip];
    args.column_leave = strip.fold;
    if constexpr (kDecay == ColumnDecay::kSame) {
      const float* factor = a.write_factor + block * kBlock;
      scale_written([&](int i, int) HWY_ATTR { return hn::Set(D(), factor[i]); }, w, r);
      for (float& x : column_leave) x = a.leave[block];
      args.column_leave = column_leave;
      if constexpr (kTwoParts) {
        for (std::int64_t i = 0; i < kStrip; ++i) strip.fold[i] = a.leave_minus_1[block];
        args.column_minus_1 = strip.fold;
      }
    } else if constexpr (kPerValue) {
      if (!leave_columns) {
        scale_written(
            [&](int, int j) HWY_ATTR {
              return hn::Div(hn::Set(D(), 1.0f), hn::Load(D(), strip.fold + j * kLanes));
            },
            w, r);
      }
      if constexpr (kTwoParts) {
        args.column_minus_1 =
            strip.slab->value_leave_minus_1 + block * a.value_pitch + strip.column;
      }
    }
    if (leave_columns) {
      leave_keys ? sweep_writes<kErase, kTwoParts, true, true>(args, strip, w, r, prefetch)
                 : sweep_writes<kErase, kTwoParts, false, true>(args, strip, w, r, prefetch);
    } else {
      leave_keys ? sweep_writes<kErase, kTwoParts, true, false>(args, strip, w, r, prefetch)
                 : sweep_writes<kErase, kTwoParts, false, false>(args, strip, w, r, prefetch);
    }
    if constexpr (kPerValue) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors && leave_columns; ++j) {
        hn::Store(hn::Set(d, 1.0f), d, strip.fold + j * kLanes);
      }
    }
    output(a, block, strip);
  }

  static HWY_INLINE void output(const BlockArgs& a, std::int64_t block, const Strip& strip) {
    const D d;
    V w[kBlock][kVectors], r[kBlock][kVectors];
    if constexpr (!kPerValue) load_written(a, block, strip, w, r);
    for (std::int64_t query = 0; query < a.queries; ++query) {
      const float* pairs = Block::pairs(a, block) + query_pairs(kErases, query);
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        float* out = strip.slab->out[query * a.out_pitch + block * kBlock + i];
        if (out == nullptr) continue;
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          const std::int64_t at = (query * kBlock + i) * kStrip + j * kLanes;
          V o = hn::Load(d, strip.reads + at);
          if constexpr (kPerValue) {
            o = hn::MulAdd(o, hn::Load(d, strip.factor + i * kStrip + j * kLanes),
                           hn::Load(d, strip.recent + at));
          } else {
            if constexpr (kDecay == ColumnDecay::kSame) {
              o = hn::Mul(o, hn::Set(d, a.read_factor[block * kBlock + i]));
            }
            o = add_recent<kErase>(o, pairs, pairs_pitch(kErases, a.queries), i, true, j, w, r);
          }
          const std::int64_t column = strip.column + j * kLanes;
          a.stream ? hn::Stream(o, d, out + column)
                   : store_first(d, o, out + column, strip.slab->width - column);
        }
      }
    }
  }

  static void run(const BlockArgs& a) {
    const std::int64_t strips = a.slab_count * (kSlab / kStrip);
    const std::int64_t floats = Strip::floats(a.queries);
    const std::int64_t sweeps = (kErases ? 1 : 0) + (kReadsInWrite ? 0 : 1) + a.queries;
    Prefetch prefetch(a, strips * a.blocks * sweeps * a.keys / 2);
    for (std::int64_t index = 0; index < strips; index += 2) {
      // A lone strip of AVX-512 has no other to take turns with.
      Strip first(a, index, a.scratch),
          second(a, HWY_MIN(index + 1, strips - 1), a.scratch + floats);
      const bool both = index + 1 < strips;
      for (std::int64_t block = 0; block < a.blocks; ++block) {
        if constexpr (kSubstitutes) {
          substitute(a, block, first, prefetch);
          if (both) substitute(a, block, second, prefetch);
        }
        write(a, block, first, prefetch);
        if (both) write(a, block, second, prefetch);
        for (Strip* strip : {&first, &second}) {
          strip->state_in = strip->state;
          strip->low_in = strip->low;
        }
      }
    }
  }
};

template <ColumnDecay kDecay>
void block_of(const BlockArgs& a) {
  if (a.slabs->low != nullptr) {
    Block<Erase::kNone, kDecay, true>::run(a);
  } else if (a.e == nullptr) {
    Block<Erase::kNone, kDecay, false>::run(a);
  } else if (a.b == nullptr) {
    Block<Erase::kCollinear, kDecay, false>::run(a);
  } else {
    Block<Erase::kGeneral, kDecay, false>::run(a);
  }
}

}  // namespace

void RecurrenceBlock(const BlockArgs& a) {
  if (a.slabs->value_decay != nullptr) {
    block_of<ColumnDecay::kPerValue>(a);
  } else if (a.write_factor != nullptr) {
    block_of<ColumnDecay::kSame>(a);
  } else {
    block_of<ColumnDecay::kNone>(a);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceBlock);
void recurrence_block(Isa isa, const BlockArgs& args) {
  OUZEL_DISPATCH(isa, RecurrenceBlock)(args);
}
}  // namespace ouzel
#endif
