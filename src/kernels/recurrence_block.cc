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
constexpr int kUnrolled = 4;  // keys

enum class Erase { kNone, kCollinear, kGeneral };

// Where rows of q, k, e and b stand in a group of 16 keys of a block.
constexpr std::int64_t kRowsOfQ = 0, kRowsOfK = kBlock * kGroupKeys, kRowsOfE = 2 * kRowsOfK,
                       kRowsOfB = 3 * kRowsOfK;
template <Erase kErase>
constexpr std::int64_t group_pitch() {
  return kGroupKeys * block_rows(kErase != Erase::kNone, kErase == Erase::kGeneral);
}

// Keys of a sweep after which more lines are brought in.
constexpr std::int64_t kStepKeys = 64;

// Brings in the lines of the next chunk, evenly spread over the steps of all sweeps: in bursts they
// would take the buffers that loads from the second-level cache need too.
struct Prefetch {
  PrefetchAhead* ahead;
  std::int64_t a_step;
  Prefetch(const BlockArgs& a, std::int64_t steps)
      : ahead(a.ahead), a_step((a.ahead->lines + steps - 1) / steps) {}
  // Inline: a call would spill all vectors.
  HWY_INLINE void step() {
    std::int64_t count = HWY_MIN(a_step, ahead->lines);
    ahead->lines -= count;
    const PrefetchColumn* column = ahead->next;
    std::int64_t token = ahead->token;
    while (count > 0) {
      const PrefetchColumn* end = column + HWY_MIN(count, ahead->end - column);
      count -= end - column;
      for (; column != end; ++column) {
        __builtin_prefetch(column->first + token * column->stride, 0, 2);
      }
      if (column == ahead->end) {
        column = ahead->columns;
        ++token;
      }
    }
    ahead->next = column;
    ahead->token = token;
  }
};

// A strip's scratch, in rows of kStrip.
struct Strip {
  const BlockSlab* slab;
  std::int64_t column;
  const float* state_in;
  float* state;
  float* fold;  // what the columns lack
  float* w;     // [4], rows `pitch` apart: goes with k
  float* r;     // [4], likewise: goes with b
  std::int64_t pitch = kStrip;
  float* factor;  // [4]: decay of the columns from the state to each row's read
  float* recent;  // [queries][4]: what the block's own rows add to it

  static std::int64_t floats(std::int64_t queries) {
    return kStrip + (3 + queries) * kBlock * kStrip;
  }
  Strip(const BlockArgs& a, std::int64_t index, float* scratch)
      : slab(a.slabs + index * kStrip / kSlab), column(index * kStrip % kSlab) {
    state_in = slab->state_in + column;
    state = slab->state + column;
    fold = scratch;
    w = fold + kStrip;
    r = w + kBlock * kStrip;
    factor = r + kBlock * kStrip;
    recent = factor + kBlock * kStrip;
    for (std::int64_t i = 0; i < kStrip; ++i) fold[i] = 1;
    if (a.sums) pitch = kSlab;
  }
  // Where what a block writes stays for sums in two parts.
  void select(std::int64_t block) {
    const std::int64_t at = block * kBlock * kSlab + column;
    if (slab->written != nullptr) w = slab->written + at;
    if (slab->erased != nullptr) r = slab->erased + at;
  }
};

// sum_i += S^T x_i for four rows.
HWY_INLINE void sweep_reads(const float* x, std::int64_t pitch, std::int64_t keys,
                            const float* state, V (&sum)[kBlock][kVectors], Prefetch& prefetch) {
  const D d;
  // AVX-512: odd keys have sums of their own, since eight do not hide the latency.
  constexpr int kSums = HWY_TARGET == HWY_AVX3 ? 2 : 1;
  V odd[kBlock][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) odd[i][j] = hn::Zero(d);
  }
  for (std::int64_t key = 0; key < keys; key += kGroupKeys, x += pitch) {
    if (key % kStepKeys == 0) prefetch.step();
    const std::int64_t end = HWY_MIN(keys - key, kGroupKeys);
    for (std::int64_t n = 0; n < end; n += kUnrolled, state += kUnrolled * kSlab) {
      OUZEL_UNROLL
      for (int m = 0; m < kUnrolled; ++m) {
        V s[kVectors];
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) s[j] = hn::Load(d, state + m * kSlab + j * kLanes);
        OUZEL_UNROLL
        for (int i = 0; i < kBlock; ++i) {
          const V x_i = hn::Set(d, x[i * kGroupKeys + n + m]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            V& to = m % kSums == 0 ? sum[i][j] : odd[i][j];
            to = hn::MulAdd(x_i, s[j], to);
          }
        }
      }
    }
  }
  if constexpr (kSums == 2) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Add(sum[i][j], odd[i][j]);
    }
  }
}

struct WriteArgs {
  std::int64_t keys;
  const float* rows;          // of the block
  const float* leave;         // of keys, or null
  const float* column_leave;  // the columns' factor
};

// S = S * leave + sum_i k_i w_i^T + b_i r_i^T, and the reads of the state before for the first
// query: sum_i += S^T q_i.
template <Erase kErase, bool kLeaveKeys, bool kLeaveColumns>
HWY_INLINE void sweep_writes(const WriteArgs a, const Strip& strip, const V (&w)[kBlock][kVectors],
                             const V (&r)[kBlock][kVectors], V (&sum)[kBlock][kVectors],
                             Prefetch& prefetch) {
  const D d;
  // In registers.
  const float *state_in = strip.state_in, *rows = a.rows;
  float* state = strip.state;
  V fold[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    if constexpr (kLeaveColumns) fold[j] = hn::Load(d, a.column_leave + j * kLanes);
  }
  for (std::int64_t group = 0; group < a.keys; group += kGroupKeys, rows += group_pitch<kErase>()) {
    if (group % kStepKeys == 0) prefetch.step();
    const std::int64_t end = HWY_MIN(a.keys - group, kGroupKeys);
    for (std::int64_t n = 0; n < end; n += kUnrolled) {
      OUZEL_UNROLL
      for (int m = 0; m < kUnrolled; ++m) {
        const float* x = rows + n + m;
        const std::int64_t key = group + n + m, at = key * kSlab;
        V s[kVectors], change[kVectors];
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          s[j] = hn::Load(d, state_in + at + j * kLanes);
          change[j] = s[j];
          if constexpr (kLeaveKeys) change[j] = hn::Mul(change[j], hn::Set(d, a.leave[key]));
          if constexpr (kLeaveColumns) change[j] = hn::Mul(change[j], fold[j]);
        }
        OUZEL_UNROLL
        for (int i = 0; i < kBlock; ++i) {
          if constexpr (kReadsInWrite) {
            const V q = hn::Set(d, x[kRowsOfQ + i * kGroupKeys]);
            OUZEL_UNROLL
            for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(q, s[j], sum[i][j]);
          }
          const V k = hn::Set(d, x[kRowsOfK + i * kGroupKeys]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) change[j] = hn::MulAdd(k, w[i][j], change[j]);
          if constexpr (kErase == Erase::kGeneral) {
            const V b = hn::Set(d, x[kRowsOfB + i * kGroupKeys]);
            OUZEL_UNROLL
            for (int j = 0; j < kVectors; ++j) change[j] = hn::MulAdd(b, r[i][j], change[j]);
          }
        }
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) hn::Store(change[j], d, state + at + j * kLanes);
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

template <Erase kErase, bool kPerValue>
struct Block {
  static constexpr bool kErases = kErase != Erase::kNone;
  // Without either, what is written is the values.
  static constexpr bool kSubstitutes = kErases || kPerValue;

  static HWY_INLINE const float* pairs(const BlockArgs& a, std::int64_t block) {
    return a.pairs + block * (kErase == Erase::kGeneral ? 2 : 1) * pairs_pitch(kErases, a.queries);
  }
  static HWY_INLINE const float* rows(const BlockArgs& a, std::int64_t block) {
    return a.rows + block * (a.key_pitch / kGroupKeys) * group_pitch<kErase>();
  }

  // What the block's own rows add to the read of row i.
  static HWY_INLINE V recent(const BlockArgs& a, const float* pairs, std::int64_t query, int i,
                             int j, const V (&w)[kBlock][kVectors],
                             const V (&r)[kBlock][kVectors]) {
    return add_recent<kErase>(hn::Zero(D()), pairs + query_pairs(kErases, query),
                              pairs_pitch(kErases, a.queries), i, true, j, w, r);
  }
  // The same and the decay of the state up to there, for decays per value.
  static HWY_INLINE void recall(const BlockArgs& a, const float* pairs, int i, const Strip& strip,
                                const V (&fold)[kVectors], const V (&w)[kBlock][kVectors],
                                const V (&r)[kBlock][kVectors]) {
    const D d;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = i * kStrip + j * kLanes;
      hn::Store(fold[j], d, strip.factor + at);
      for (std::int64_t query = 0; query < a.queries; ++query) {
        hn::Store(recent(a, pairs, query, i, j, w, r), d,
                  strip.recent + query * kBlock * kStrip + at);
      }
    }
  }

  // Turns r_i from what is read of the state into what is erased.
  static HWY_INLINE void erase(const BlockArgs& a, const float* pairs, int i,
                               const V (&fold)[kVectors], const V (&w)[kBlock][kVectors],
                               V (&r)[kBlock][kVectors]) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      V x = r[i][j];
      if constexpr (kPerValue) x = hn::Mul(x, fold[j]);
      r[i][j] = add_recent<kErase>(x, pairs, pairs_pitch(kErases, a.queries), i, false, j, w, r);
    }
  }

  // Reads what is erased, then finds row by row what is written: w and r. Decays per value are
  // followed from row to row by them and by what the columns of the state lack.
  static void substitute(const BlockArgs& a, std::int64_t block, const Strip& strip,
                         Prefetch& prefetch) {
    const D d;
    const float* pairs = Block::pairs(a, block);
    V w[kBlock][kVectors], r[kBlock][kVectors], fold[kVectors];
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) r[i][j] = hn::Zero(d);
    }
    if constexpr (kErases) {
      sweep_reads(rows(a, block) + kRowsOfE, group_pitch<kErase>(), a.keys, strip.state_in, r,
                  prefetch);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) fold[j] = hn::Load(d, strip.fold + j * kLanes);
    const BlockSlab& slab = *strip.slab;
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const std::int64_t row = block * kBlock + i;
      const std::int64_t at = row * a.value_pitch + strip.column;
      V c[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        w[i][j] = hn::LoadU(d, slab.v + row * a.v_stride + strip.column + j * kLanes);
        if constexpr (kErase == Erase::kCollinear) {
          c[j] = a.strength_per_value ? hn::Load(d, slab.c + at + j * kLanes)
                                      : hn::Set(d, slab.c[row]);
          if (a.v_lacks_c) w[i][j] = hn::Mul(w[i][j], c[j]);
        }
      }
      if constexpr (kPerValue) {
        if (kErases && !a.erase_decayed) erase(a, pairs, i, fold, w, r);
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
      if (kErases && (!kPerValue || a.erase_decayed)) erase(a, pairs, i, fold, w, r);
      if constexpr (kErase == Erase::kCollinear) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) w[i][j] = hn::NegMulAdd(c[j], r[i][j], w[i][j]);
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
        hn::Store(w[i][j], d, strip.w + i * strip.pitch + j * kLanes);
        if constexpr (kErase == Erase::kGeneral) {
          hn::Store(r[i][j], d, strip.r + i * strip.pitch + j * kLanes);
        }
      }
    }
  }

  static HWY_INLINE void load_written(const BlockArgs& a, std::int64_t block, const Strip& strip,
                                      V (&w)[kBlock][kVectors], V (&r)[kBlock][kVectors]) {
    const D d;
    const float* from = strip.w;
    std::int64_t pitch = strip.pitch;
    if constexpr (!kSubstitutes) {
      pitch = a.v_stride;
      from = strip.slab->v + block * kBlock * pitch + strip.column;
    }
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        w[i][j] = hn::LoadU(d, from + i * pitch + j * kLanes);
        r[i][j] = kErase == Erase::kGeneral ? hn::Load(d, strip.r + i * strip.pitch + j * kLanes)
                                            : hn::Zero(d);
      }
    }
  }

  // Whether the state must take the columns' factor now.
  static HWY_INLINE bool columns_leave(const BlockArgs& a, std::int64_t block, const Strip& strip) {
    if constexpr (!kPerValue) return false;
    const D d;
    bool leave = block + 1 == a.blocks;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V fold = hn::Load(d, strip.fold + j * kLanes);
      leave = leave || !hn::AllFalse(d, hn::Lt(fold, hn::Set(d, kLeast)));
    }
    return leave;
  }

  // What the sums of reads begin with.
  static HWY_INLINE void begin_reads(const BlockArgs& a, std::int64_t block, std::int64_t query,
                                     const V (&w)[kBlock][kVectors], const V (&r)[kBlock][kVectors],
                                     V (&sum)[kBlock][kVectors]) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = kPerValue ? hn::Zero(D()) : recent(a, pairs(a, block), query, i, j, w, r);
      }
    }
  }

  static HWY_INLINE void end_reads(const BlockArgs& a, std::int64_t block, std::int64_t query,
                                   const Strip& strip, V (&sum)[kBlock][kVectors]) {
    const D d;
    const std::int64_t width = strip.slab->width - strip.column;
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      float* out = strip.slab->out[query * a.out_pitch + block * kBlock + i];
      if (out == nullptr) continue;
      out += strip.column;
      if constexpr (kPerValue) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          const std::int64_t at = i * kStrip + j * kLanes;
          sum[i][j] = hn::MulAdd(sum[i][j], hn::Load(d, strip.factor + at),
                                 hn::Load(d, strip.recent + query * kBlock * kStrip + at));
        }
      }
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        a.stream ? hn::Stream(sum[i][j], d, out + j * kLanes)
                 : store_first(d, sum[i][j], out + j * kLanes, width - j * kLanes);
      }
    }
  }

  template <bool kWrites, bool kLeaveKeys, bool kLeaveColumns>
  static HWY_INLINE void read_and_write(const BlockArgs& a, std::int64_t block, const Strip& strip,
                                        Prefetch& prefetch) {
    WriteArgs args = {};
    args.keys = a.keys;
    args.rows = rows(a, block);
    if constexpr (kLeaveKeys) args.leave = a.leave + block * a.key_pitch;
    args.column_leave = strip.fold;
    V w[kBlock][kVectors], r[kBlock][kVectors], sum[kBlock][kVectors];
    load_written(a, block, strip, w, r);
    for (std::int64_t query = 1; query < a.queries; ++query) {
      const float* q = a.other_queries + ((query - 1) * a.blocks + block) * kBlock * a.key_pitch;
      begin_reads(a, block, query, w, r, sum);
      sweep_reads(q, kBlock * kGroupKeys, a.keys, strip.state_in, sum, prefetch);
      end_reads(a, block, query, strip, sum);
    }
    begin_reads(a, block, 0, w, r, sum);
    if constexpr (!kReadsInWrite || !kWrites) {
      sweep_reads(args.rows + kRowsOfQ, group_pitch<kErase>(), a.keys, strip.state_in, sum,
                  prefetch);
      end_reads(a, block, 0, strip, sum);
    }
    if constexpr (kPerValue && !kLeaveColumns) unfold_columns(a, strip, w, r);
    if constexpr (kWrites) {
      sweep_writes<kErase, kLeaveKeys, kLeaveColumns>(args, strip, w, r, sum, prefetch);
      if constexpr (kReadsInWrite) end_reads(a, block, 0, strip, sum);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors && kPerValue; ++j) {
      const D d;
      const V one = hn::Set(d, 1.0f), fold = hn::Load(d, strip.fold + j * kLanes);
      if (a.sums) {
        hn::Store(kLeaveColumns ? fold : one, d,
                  strip.slab->column_leave + block * kSlab + strip.column + j * kLanes);
      }
      if (kLeaveColumns) hn::Store(one, d, strip.fold + j * kLanes);
    }
  }

  // What is written to columns that go on lacking their factor.
  static HWY_INLINE void unfold_columns(const BlockArgs& a, const Strip& strip,
                                        V (&w)[kBlock][kVectors], V (&r)[kBlock][kVectors]) {
    const D d;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V x = hn::Div(hn::Set(d, 1.0f), hn::Load(d, strip.fold + j * kLanes));
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        const std::int64_t at = i * strip.pitch + j * kLanes;
        w[i][j] = hn::Mul(w[i][j], x);
        if (a.sums) hn::Store(w[i][j], d, strip.w + at);
        if constexpr (kErase == Erase::kGeneral) {
          r[i][j] = hn::Mul(r[i][j], x);
          if (a.sums) hn::Store(r[i][j], d, strip.r + at);
        }
      }
    }
  }

  static void write(const BlockArgs& a, std::int64_t block, const Strip& strip,
                    Prefetch& prefetch) {
    const bool leave_keys = a.decay && a.leaves[block];
    const bool writes = !a.sums || block + 1 < a.blocks;
    if constexpr (kPerValue) {
      if (columns_leave(a, block, strip)) {
        !writes      ? read_and_write<false, false, true>(a, block, strip, prefetch)
        : leave_keys ? read_and_write<true, true, true>(a, block, strip, prefetch)
                     : read_and_write<true, false, true>(a, block, strip, prefetch);
        return;
      }
    }
    !writes      ? read_and_write<false, false, false>(a, block, strip, prefetch)
    : leave_keys ? read_and_write<true, true, false>(a, block, strip, prefetch)
                 : read_and_write<true, false, false>(a, block, strip, prefetch);
  }

  static void run(const BlockArgs& a) {
    const std::int64_t strips = a.slab_count * (kSlab / kStrip);
    const std::int64_t floats = Strip::floats(a.queries);
    const std::int64_t sweeps = (kErases ? 1 : 0) + (kReadsInWrite ? 0 : 1) + a.queries;
    const std::int64_t steps = (a.keys + kStepKeys - 1) / kStepKeys;
    Prefetch prefetch(a, strips * a.blocks * sweeps * steps);
    for (std::int64_t index = 0; index < strips; index += 2) {
      // A lone strip of AVX-512 has no other to take turns with.
      Strip first(a, index, a.scratch),
          second(a, HWY_MIN(index + 1, strips - 1), a.scratch + floats);
      const bool both = index + 1 < strips;
      for (std::int64_t block = 0; block < a.blocks; ++block) {
        first.select(block);
        second.select(block);
        if constexpr (kSubstitutes) {
          substitute(a, block, first, prefetch);
          if (both) substitute(a, block, second, prefetch);
        }
        write(a, block, first, prefetch);
        if (both) write(a, block, second, prefetch);
        first.state_in = first.state;
        second.state_in = second.state;
      }
    }
  }
};

template <bool kPerValue>
void block_of(const BlockArgs& a) {
  if (!a.erase) {
    Block<Erase::kNone, kPerValue>::run(a);
  } else if (!a.general) {
    Block<Erase::kCollinear, kPerValue>::run(a);
  } else {
    Block<Erase::kGeneral, kPerValue>::run(a);
  }
}

}  // namespace

void RecurrenceBlock(const BlockArgs& a) {
  a.slabs->value_decay != nullptr ? block_of<true>(a) : block_of<false>(a);
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
