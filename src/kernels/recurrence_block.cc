// The slab block: a chunk's rows in blocks of four through 32 columns of the state, which stay in
// the first-level cache (src/kernels/recurrence_block.h). The forward substitution within a block
// is that of the delta rule's WY form (Yang et al. 2024, arXiv:2406.06484), four rows at a time.
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
constexpr float kLeast = 0x1p-60f;
// Rows that are read in one sweep: with two vectors each, 16 accumulators of the 32 registers of
// AVX-512, 8 of the 16 of AVX2.
constexpr int kSweepRows = HWY_TARGET == HWY_AVX3 ? 8 : 4;

enum class Erase { kNone, kCollinear, kGeneral };
enum class ColumnDecay { kNone, kSame, kPerValue };

// out[row] = S^T x_row for four rows, and for four others.
template <int kGroups>
HWY_INLINE void sweep_reads(const float* const* rows, std::int64_t pitch, std::int64_t keys,
                            const float* state, float* out) {
  const D d;
  // Alternate keys have sums of their own: eight sums would not hide the latency.
  constexpr int kSums = kSweepRows / (kGroups * kBlock);
  V sum[kSums][kGroups][kBlock][kVectors];
  OUZEL_UNROLL
  for (int n = 0; n < kSums; ++n) {
    OUZEL_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) sum[n][g][i][j] = hn::Zero(d);
      }
    }
  }
  for (std::int64_t key = 0; key < keys; key += kSums) {
    OUZEL_UNROLL
    for (int n = 0; n < kSums; ++n) {
      V s[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        s[j] = hn::Load(d, state + (key + n) * kSlab + j * kLanes);
      }
      OUZEL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        OUZEL_UNROLL
        for (int i = 0; i < kBlock; ++i) {
          const V x = hn::Set(d, rows[g][i * pitch + key + n]);
          OUZEL_UNROLL
          for (int j = 0; j < kVectors; ++j) sum[n][g][i][j] = hn::MulAdd(x, s[j], sum[n][g][i][j]);
        }
      }
    }
  }
  OUZEL_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        V total = sum[0][g][i][j];
        OUZEL_UNROLL
        for (int n = 1; n < kSums; ++n) total = hn::Add(total, sum[n][g][i][j]);
        hn::Store(total, d, out + (g * kBlock + i) * kSlab + j * kLanes);
      }
    }
  }
}

struct Sweep {
  std::int64_t keys, pitch;
  const float *state_in, *low_in;
  float *state, *low;
  const float* k;
  const float* b;
  const float* leave;  // of keys, or null
  const float* leave_minus_1;
};

// S = S * leave + sum_i k_i w_i^T + b_i r_i^T
template <Erase kErase, bool kLeaveKeys, bool kLeaveColumns>
HWY_INLINE void sweep_writes(const Sweep& a, const V (&w)[kBlock][kVectors],
                             const V (&r)[kBlock][kVectors], const V (&leave)[kVectors]) {
  const D d;
  for (std::int64_t key = 0; key < a.keys; ++key) {
    V s[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[j] = hn::Load(d, a.state_in + key * kSlab + j * kLanes);
      if constexpr (kLeaveKeys) s[j] = hn::Mul(s[j], hn::Set(d, a.leave[key]));
      if constexpr (kLeaveColumns) s[j] = hn::Mul(s[j], leave[j]);
    }
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const V k = hn::Set(d, a.k[i * a.pitch + key]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) s[j] = hn::MulAdd(k, w[i][j], s[j]);
      if constexpr (kErase == Erase::kGeneral) {
        const V b = hn::Set(d, a.b[i * a.pitch + key]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) s[j] = hn::MulAdd(b, r[i][j], s[j]);
      }
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) hn::Store(s[j], d, a.state + key * kSlab + j * kLanes);
  }
}

// The same in two parts: the block's sum is formed from zero.
HWY_INLINE void sweep_long_writes(const Sweep& a, const V (&w)[kBlock][kVectors],
                                  const V (&leave)[kVectors], const V (&leave_minus_1)[kVectors]) {
  const D d;
  for (std::int64_t key = 0; key < a.keys; ++key) {
    V sum[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[j] = hn::Zero(d);
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const V k = hn::Set(d, a.k[i * a.pitch + key]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[j] = hn::MulAdd(k, w[i][j], sum[j]);
    }
    const V factor = hn::Set(d, a.leave != nullptr ? a.leave[key] : 1.0f);
    const V minus_1 = hn::Set(d, a.leave != nullptr ? a.leave_minus_1[key] : 0.0f);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = key * kSlab + j * kLanes;
      V low = hn::Load(d, a.low_in + at);
      const V s = two_part_sum(
          d, hn::Load(d, a.state_in + at), low, hn::Mul(factor, leave[j]),
          hn::MulAdd(minus_1, leave_minus_1[j], hn::Add(minus_1, leave_minus_1[j])), sum[j]);
      hn::Store(s, d, a.state + at);
      hn::Store(low, d, a.low + at);
    }
  }
}

// One vector of columns each of what a block reads: of rows before row i, and for the diagonal of i
// itself. `pairs` are the reader's; the state lacks the factor `fold`.
template <Erase kErase, ColumnDecay kDecay>
HWY_INLINE V recall(const float* read, const float* pairs, int i, bool diagonal, int j, V fold,
                    const V (&w)[kBlock][kVectors], const V (&r)[kBlock][kVectors]) {
  const D d;
  V x = hn::Load(d, read + i * kSlab + j * kLanes);
  if constexpr (kDecay != ColumnDecay::kNone) x = hn::Mul(x, fold);
  OUZEL_UNROLL
  for (int m = 0; m < kBlock; ++m) {
    if (m > i || (m == i && !diagonal)) continue;
    x = hn::MulAdd(hn::Set(d, pairs[pair_of(i, m)]), w[m][j], x);
    if constexpr (kErase == Erase::kGeneral) {
      x = hn::MulAdd(hn::Set(d, pairs[kPairs + pair_of(i, m)]), r[m][j], x);
    }
  }
  return x;
}

// Two vectors of columns from `column` on.
template <Erase kErase, ColumnDecay kDecay, bool kTwoParts>
struct Columns {
  static constexpr std::int64_t kErasers = kErase == Erase::kNone ? 0 : 1;
  static constexpr std::int64_t kReaderPairs = (kErase == Erase::kGeneral ? 2 : 1) * kPairs;

  // All that a block reads of the state.
  static HWY_INLINE void read_state(const BlockArgs& a, const Sweep& sweep, std::int64_t offset,
                                    float* reads) {
    std::int64_t query = 0;
    if constexpr (kErase != Erase::kNone && kSweepRows == 2 * kBlock) {
      const float* both[2] = {a.e + offset, a.q + offset};
      sweep_reads<2>(both, a.key_pitch, a.keys, sweep.state_in, reads);
      query = 1;
    } else if constexpr (kErase != Erase::kNone) {
      const float* e = a.e + offset;
      sweep_reads<1>(&e, a.key_pitch, a.keys, sweep.state_in, reads);
    }
    for (; query < a.queries; ++query) {
      const float* q = a.q + query * a.query_stride + offset;
      sweep_reads<1>(&q, a.key_pitch, a.keys, sweep.state_in,
                     reads + (kErasers + query) * kBlock * kSlab);
    }
  }

  static HWY_INLINE void output(const BlockArgs& a, std::int64_t block, int i, std::int64_t column,
                                const float* reads, const float* pairs, const V (&fold)[kVectors],
                                const V (&w)[kBlock][kVectors], const V (&r)[kBlock][kVectors]) {
    const D d;
    for (std::int64_t query = 0; query < a.queries; ++query) {
      float* out = a.out[query * a.out_pitch + block * kBlock + i];
      if (out == nullptr) continue;
      const std::int64_t reader = kErasers + query;
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const V o =
            recall<kErase, kDecay>(reads + reader * kBlock * kSlab, pairs + reader * kReaderPairs,
                                   i, true, j, fold[j], w, r);
        float* to = out + column + j * kLanes;
        a.stream ? hn::Stream(o, d, to) : store_first(d, o, to, a.width - column - j * kLanes);
      }
    }
  }

  // Four tokens of the next chunk.
  static HWY_INLINE void prefetch(const BlockArgs& a, std::int64_t block) {
    if ((block + 1) * kBlock > kChunk) return;
    for (std::int64_t i = 0; i < a.prefetch_count; ++i) {
      const PrefetchColumn& line = a.prefetch[i];
      for (std::int64_t t = block * kBlock; t < (block + 1) * kBlock; ++t) {
        __builtin_prefetch(line.first + t * line.stride, 0, 2);
      }
    }
  }

  // Row i: w[i] goes with k_i, r[i] with b_i; those of earlier rows and `fold`, what the columns of
  // the state lack, follow the columns' decays.
  static HWY_INLINE void substitute(const BlockArgs& a, std::int64_t block, int i,
                                    std::int64_t column, const float* reads, const float* pairs,
                                    V (&fold)[kVectors], V (&w)[kBlock][kVectors],
                                    V (&r)[kBlock][kVectors]) {
    const D d;
    const std::int64_t row = block * kBlock + i, at = row * a.value_pitch + column;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) w[i][j] = hn::Load(d, a.v + at + j * kLanes);
    if constexpr (kErase != Erase::kNone) {
      if (!a.erase_decayed) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          r[i][j] = recall<kErase, kDecay>(reads, pairs, i, false, j, fold[j], w, r);
        }
      }
    }
    if (!a.read_decayed) output(a, block, i, column, reads, pairs, fold, w, r);
    if constexpr (kDecay != ColumnDecay::kNone) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const V factor = kDecay == ColumnDecay::kSame
                             ? hn::Set(d, a.column_decay[row])
                             : hn::Load(d, a.column_decay + at + j * kLanes);
        fold[j] = hn::Mul(fold[j], factor);
        OUZEL_UNROLL
        for (int m = 0; m < kBlock; ++m) {
          if (m >= i) continue;
          w[m][j] = hn::Mul(w[m][j], factor);
          if constexpr (kErase == Erase::kGeneral) r[m][j] = hn::Mul(r[m][j], factor);
        }
      }
    }
    if constexpr (kErase != Erase::kNone) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        if (a.erase_decayed) {
          r[i][j] = recall<kErase, kDecay>(reads, pairs, i, false, j, fold[j], w, r);
        }
        if constexpr (kErase == Erase::kCollinear) {
          const V c =
              a.strength_per_value ? hn::Load(d, a.c + at + j * kLanes) : hn::Set(d, a.c[row]);
          w[i][j] = hn::NegMulAdd(c, r[i][j], w[i][j]);
        }
      }
    }
    if (a.read_decayed) output(a, block, i, column, reads, pairs, fold, w, r);
  }

  // All that a block writes to the state. `last` of its chunk: no factor stays behind.
  static HWY_INLINE void write_state(const BlockArgs& a, Sweep& sweep, std::int64_t block,
                                     bool last, std::int64_t column, V (&fold)[kVectors],
                                     V (&w)[kBlock][kVectors], V (&r)[kBlock][kVectors]) {
    const D d;
    const V one = hn::Set(d, 1.0f);
    sweep.k = a.k + block * kBlock * a.key_pitch;
    if constexpr (kErase == Erase::kGeneral) sweep.b = a.b + block * kBlock * a.key_pitch;
    const bool leave_keys = a.leaves != nullptr && a.leaves[block];
    if (leave_keys) sweep.leave = a.leave + block * a.key_pitch;
    bool leave_columns = false;
    if constexpr (kDecay != ColumnDecay::kNone) {
      leave_columns =
          last || !hn::AllFalse(d, hn::Lt(hn::Min(fold[0], fold[1]), hn::Set(d, kLeast)));
    }
    if constexpr (kTwoParts) {
      V minus_1[kVectors];
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        minus_1[j] = hn::Zero(d);
        if constexpr (kDecay == ColumnDecay::kSame) {
          minus_1[j] = hn::Set(d, a.column_leave_minus_1[block]);
        } else if constexpr (kDecay == ColumnDecay::kPerValue) {
          minus_1[j] =
              hn::Load(d, a.column_leave_minus_1 + block * a.value_pitch + column + j * kLanes);
        }
      }
      sweep.leave = leave_keys ? a.leave + block * a.key_pitch : nullptr;
      sweep.leave_minus_1 = leave_keys ? a.leave_minus_1 + block * a.key_pitch : nullptr;
      sweep_long_writes(sweep, w, fold, minus_1);
      leave_columns = true;
    } else if (leave_columns) {
      leave_keys ? sweep_writes<kErase, true, true>(sweep, w, r, fold)
                 : sweep_writes<kErase, false, true>(sweep, w, r, fold);
    } else {
      if constexpr (kDecay != ColumnDecay::kNone) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          const V inverse = hn::Div(one, fold[j]);
          OUZEL_UNROLL
          for (int i = 0; i < kBlock; ++i) {
            w[i][j] = hn::Mul(w[i][j], inverse);
            if constexpr (kErase == Erase::kGeneral) r[i][j] = hn::Mul(r[i][j], inverse);
          }
        }
      }
      leave_keys ? sweep_writes<kErase, true, false>(sweep, w, r, fold)
                 : sweep_writes<kErase, false, false>(sweep, w, r, fold);
    }
    if (leave_columns) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) fold[j] = one;
    }
  }

  static void run(const BlockArgs& a, std::int64_t column) {
    const D d;
    Sweep sweep = {};
    sweep.keys = a.keys;
    sweep.pitch = a.key_pitch;
    sweep.state_in = a.state_in + column;
    sweep.state = a.state + column;
    if constexpr (kTwoParts) {
      sweep.low_in = a.low_in + column;
      sweep.low = a.low + column;
    }
    float* reads = a.reads + column;
    V fold[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) fold[j] = hn::Set(d, 1.0f);
    for (std::int64_t block = 0; block < a.blocks; ++block) {
      const float* pairs = a.pairs + block * (kErasers + a.queries) * kReaderPairs;
      read_state(a, sweep, block * kBlock * a.key_pitch, reads);
      V w[kBlock][kVectors], r[kBlock][kVectors];
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) r[i][j] = hn::Zero(d);
        substitute(a, block, i, column, reads, pairs, fold, w, r);
      }
      prefetch(a, block);
      write_state(a, sweep, block, block + 1 == a.blocks, column, fold, w, r);
      sweep.state_in = sweep.state;
      sweep.low_in = sweep.low;
    }
  }
};

template <Erase kErase, ColumnDecay kDecay, bool kTwoParts>
void slab(const BlockArgs& a) {
  for (std::int64_t column = 0; column < a.width; column += kVectors * kLanes) {
    Columns<kErase, kDecay, kTwoParts>::run(a, column);
  }
}

template <ColumnDecay kDecay>
void slab_of(const BlockArgs& a) {
  if (a.low != nullptr) {
    slab<Erase::kNone, kDecay, true>(a);
  } else if (a.e == nullptr) {
    slab<Erase::kNone, kDecay, false>(a);
  } else if (a.b == nullptr) {
    slab<Erase::kCollinear, kDecay, false>(a);
  } else {
    slab<Erase::kGeneral, kDecay, false>(a);
  }
}

}  // namespace

void RecurrenceBlock(const BlockArgs& a) {
  if (a.column_decay == nullptr) {
    slab_of<ColumnDecay::kNone>(a);
  } else if (!a.decay_per_value) {
    slab_of<ColumnDecay::kSame>(a);
  } else {
    slab_of<ColumnDecay::kPerValue>(a);
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
