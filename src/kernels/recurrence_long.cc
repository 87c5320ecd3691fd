// The compensated chunk, for sums that hardly decay, beyond their first 2,048 tokens: the chunk's
// sum R is formed from zero, and then added to S in two parts, S and what it lost to rounding.
// Tokens go 16 by 16:
//
//     o_i = (S + R)^T q_i + sum_(j <= i) (q_i . k_j) v_j        R += sum_j k_j v_j^T
#include "src/kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_long.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/recurrence_rows-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);
constexpr int kTileKeys = HWY_TARGET == HWY_AVX3 ? 8 : 4;
template <int kVectors>
using Tile = V[kTileKeys][kVectors];
constexpr int kTogether = 2;  // tokens: the sums of one alone are a chain that waits for itself
constexpr int kAddedTogether = 4;

// The written halves of 16 tokens of a block of 8 keys, [16][kKeyedPitch], as [8][16].
HWY_INLINE void transpose_keys(const float* keyed, float* out) {
#if HWY_TARGET == HWY_AVX3
  for (int f = 0; f < 8; f += 4) {
    // Quarter b of x[i]: the four features of token 4 b + i.
    __m512 x[4];
    OUZEL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* p = keyed + i * kKeyedPitch + f;
      x[i] = _mm512_castps128_ps512(_mm_loadu_ps(p));
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 4 * kKeyedPitch), 1);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 8 * kKeyedPitch), 2);
      x[i] = _mm512_insertf32x4(x[i], _mm_loadu_ps(p + 12 * kKeyedPitch), 3);
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    const __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    _mm512_store_ps(out + (f + 0) * kLongChunk, _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
    _mm512_store_ps(out + (f + 1) * kLongChunk, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
    _mm512_store_ps(out + (f + 2) * kLongChunk, _mm512_castpd_ps(_mm512_unpacklo_pd(b, e)));
    _mm512_store_ps(out + (f + 3) * kLongChunk, _mm512_castpd_ps(_mm512_unpackhi_pd(b, e)));
  }
#elif HWY_TARGET == HWY_AVX2
  OUZEL_UNROLL
  for (int t = 0; t < kLongChunk; t += 8) {
    OUZEL_UNROLL
    for (int f = 0; f < 8; f += 4) {
      // Half b of x[i]: the four features of token 4 b + i.
      __m256 x[4];
      OUZEL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* p = keyed + (t + i) * kKeyedPitch + f;
        x[i] = _mm256_castps128_ps256(_mm_load_ps(p));
        x[i] = _mm256_insertf128_ps(x[i], _mm_load_ps(p + 4 * kKeyedPitch), 1);
      }
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1]));
      const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1]));
      const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3]));
      const __m256d e = _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]));
      float* to = out + f * kLongChunk + t;
      _mm256_store_ps(to, _mm256_castpd_ps(_mm256_unpacklo_pd(a, c)));
      _mm256_store_ps(to + kLongChunk, _mm256_castpd_ps(_mm256_unpackhi_pd(a, c)));
      _mm256_store_ps(to + 2 * kLongChunk, _mm256_castpd_ps(_mm256_unpacklo_pd(b, e)));
      _mm256_store_ps(to + 3 * kLongChunk, _mm256_castpd_ps(_mm256_unpackhi_pd(b, e)));
    }
  }
#else
  for (int f = 0; f < 8; ++f) {
    for (int t = 0; t < kLongChunk; ++t) out[f * kLongChunk + t] = keyed[t * kKeyedPitch + f];
  }
#endif
}

// Rows [row, row + kRows) and columns [j, j + kVectors vectors) of the scores; `columns` are
// transposed keys. Sums begin at 0 if `first`, else they go on.
template <int kRows, int kVectors>
HWY_INLINE void score_rows(const float* keyed, std::int64_t blocks, const float* columns, int row,
                           int j, bool first, float* scores) {
  const D d;
  float* to = scores + row * kLongChunk + j;
  V sum[kRows][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      sum[i][c] = first ? hn::Zero(d) : hn::Load(d, to + i * kLongChunk + c * kLanes);
    }
  }
  for (std::int64_t b = 0; b < blocks; ++b) {
    const float* q = keyed + b * kKeyedBlockPitch + row * kKeyedPitch;
    const float* k = columns + b * kKeyBlock * kLongChunk + j;
    for (int f = 0; f < kKeyBlock; ++f) {
      V x[kVectors];
      OUZEL_UNROLL
      for (int c = 0; c < kVectors; ++c) x[c] = hn::Load(d, k + f * kLongChunk + c * kLanes);
      OUZEL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const V w = hn::Set(d, q[i * kKeyedPitch + f]);
        OUZEL_UNROLL
        for (int c = 0; c < kVectors; ++c) sum[i][c] = hn::MulAdd(w, x[c], sum[i][c]);
      }
    }
  }
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      hn::Store(sum[i][c], d, to + i * kLongChunk + c * kLanes);
    }
  }
}

// scores[i][j] = q_i . k_j of 16 tokens; those with j > i, and beyond the last token, are not used.
void scores_of(const float* keyed, std::int64_t key_blocks, float* scores) {
  constexpr std::int64_t kBlocks = 16;  // at a time: 8 KiB
  HWY_ALIGN float columns[kBlocks * kKeyBlock * kLongChunk];
  for (std::int64_t b = 0; b < key_blocks; b += kBlocks) {
    const std::int64_t blocks = HWY_MIN(kBlocks, key_blocks - b);
    const float* block = keyed + b * kKeyedBlockPitch;
    for (std::int64_t i = 0; i < blocks; ++i) {
      transpose_keys(block + i * kKeyedBlockPitch + kKeyBlock,
                     columns + i * kKeyBlock * kLongChunk);
    }
    if constexpr (kLanes == 16) {
      score_rows<16, 1>(block, blocks, columns, 0, 0, b == 0, scores);
    } else if constexpr (kLanes == 8) {
      score_rows<8, 1>(block, blocks, columns, 0, 0, b == 0, scores);
      score_rows<4, 2>(block, blocks, columns, 8, 0, b == 0, scores);
      score_rows<4, 2>(block, blocks, columns, 12, 0, b == 0, scores);
    } else {
      for (int j = 0; j < kLongChunk; j += static_cast<int>(kLanes)) {
        for (int row = 0; row < kLongChunk; row += 8) {
          score_rows<8, 1>(block, blocks, columns, row, j, b == 0, scores);
        }
      }
    }
  }
}

// Rows [row, row + kRows) of sum_(j <= i) scores[i][j] v_j. Later tokens are skipped, not
// multiplied by zero.
template <int kRows, int kVectors>
HWY_INLINE void recent_rows(const float* scores, const float* values, float* partial, int row) {
  const D d;
  V o[kRows][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) o[i][c] = hn::Zero(d);
  }
  const float* a = scores + row * kLongChunk;
  for (int j = 0; j < row; ++j) {
    V v[kVectors];
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) v[c] = hn::Load(d, values + j * kSlab + c * kLanes);
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const V w = hn::Set(d, a[i * kLongChunk + j]);
      OUZEL_UNROLL
      for (int c = 0; c < kVectors; ++c) o[i][c] = hn::MulAdd(w, v[c], o[i][c]);
    }
  }
  OUZEL_UNROLL
  for (int j = 0; j < kRows; ++j) {
    V v[kVectors];
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) v[c] = hn::Load(d, values + (row + j) * kSlab + c * kLanes);
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (i < j) continue;
      const V w = hn::Set(d, a[i * kLongChunk + row + j]);
      OUZEL_UNROLL
      for (int c = 0; c < kVectors; ++c) o[i][c] = hn::MulAdd(w, v[c], o[i][c]);
    }
  }
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      hn::Store(o[i][c], d, partial + (row + i) * kSlab + c * kLanes);
    }
  }
}

// Where tokens that read stand: pointers that move on, since finding them anew for every token
// would cost a tenth of the time.
struct Reader {
  const float *keyed, *values;
  float *partial, *out;
  const float* factor;
  HWY_INLINE Reader ahead(const LongArgs& a, std::int64_t tokens) const {
    return {keyed + tokens * kKeyedPitch, values + tokens * kSlab, partial + tokens * kSlab,
            out + tokens * a.out_stride, factor + tokens};
  }
};

// kTokens tokens side by side read a tile of S: o += S^T q.
template <int kVectors, bool kLast, int kTokens>
HWY_INLINE void read_tile(const LongArgs& a, const Tile<kVectors>& s, const Reader& at,
                          std::int64_t width) {
  const D d;
  V o[kTokens][kVectors];
  OUZEL_UNROLL
  for (int u = 0; u < kTokens; ++u) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) o[u][j] = hn::Load(d, at.partial + u * kSlab + j * kLanes);
  }
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int u = 0; u < kTokens; ++u) {
      const V q = hn::Set(d, at.keyed[u * kKeyedPitch + i]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) o[u][j] = hn::MulAdd(q, s[i][j], o[u][j]);
    }
  }
  OUZEL_UNROLL
  for (int u = 0; u < kTokens; ++u) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kLast) {
        V y = hn::Mul(o[u][j], hn::Set(d, at.factor[u]));
        if (a.skip != 0.0f) {
          const V v = hn::Load(d, at.values + u * kSlab + j * kLanes);
          y = hn::MulAdd(v, hn::Set(d, a.skip), y);
        }
        float* out = at.out + u * a.out_stride + j * kLanes;
        if (a.stream) {
          hn::Stream(y, d, out);
        } else {
          store_first(d, y, out, width - j * kLanes);
        }
      } else {
        hn::Store(o[u][j], d, at.partial + u * kSlab + j * kLanes);
      }
    }
  }
}

// sum += k v^T of kTokens tokens.
template <int kVectors, int kTokens>
HWY_INLINE void add_tokens(const float* keyed, const float* values, Tile<kVectors>& sum) {
  const D d;
  OUZEL_UNROLL
  for (int u = 0; u < kTokens; ++u) {
    V v[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) v[j] = hn::Load(d, values + u * kSlab + j * kLanes);
    OUZEL_UNROLL
    for (int i = 0; i < kTileKeys; ++i) {
      const V k = hn::Set(d, keyed[u * kKeyedPitch + kKeyBlock + i]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(k, v[j], sum[i][j]);
    }
  }
}

// A tile of S takes in the chunk's sum. Fast two-sum (Dekker): exact where S is the larger, which
// is where long sums are lost; else it errs by a rounding of the chunk's sum.
template <int kVectors>
HWY_INLINE void add_sum(const Tile<kVectors>& sum, float* state, float* low) {
  const D d;
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = i * kSlab + j * kLanes;
      const V before = hn::Load(d, state + at);
      const V change = hn::Add(sum[i][j], hn::Load(d, low + at));
      const V after = hn::Add(before, change);
      hn::Store(after, d, state + at);
      hn::Store(hn::Sub(change, hn::Sub(after, before)), d, low + at);
    }
  }
}

// One block of keys over all tokens, 16 by 16: they read S + R, then their sum is added to R. Both
// tiles stay in the first-level cache meanwhile.
template <bool kRead, int kVectors, bool kLast, Beside kBeside>
HWY_INLINE void long_tile(const LongArgs& a, std::int64_t key, std::int64_t column) {
  const D d;
  float* state = a.state + key * kSlab + column;
  const float* keyed = a.keyed + key / kKeyBlock * kKeyedBlockPitch + key % kKeyBlock;
  const float* values = a.values + column;
  const std::int64_t width = a.width - column;
  Tile<kVectors> recent;
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) recent[i][j] = hn::Zero(d);
  }
  Pieces<kBeside> pieces(a.meanwhile, a.tokens / kPieceTokens);
  std::int64_t left = pieces.count;
  for (std::int64_t t0 = 0; t0 < a.tokens; t0 += kLongChunk) {
    const int tokens = static_cast<int>(HWY_MIN(kLongChunk, a.tokens - t0));
    if constexpr (kRead) {
      Tile<kVectors> s;
      OUZEL_UNROLL
      for (int i = 0; i < kTileKeys; ++i) {
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          s[i][j] = hn::Add(hn::Load(d, state + i * kSlab + j * kLanes), recent[i][j]);
        }
      }
      Reader reader = {keyed, values, a.partial + t0 * kSlab + column,
                       a.out + t0 * a.out_stride + column, a.factor + t0};
      int t = 0;
      for (; t + kPieceTokens <= tokens; t += kPieceTokens) {
        if (left > 0) {
          pieces.next();
          --left;
        }
        OUZEL_UNROLL
        for (int u = 0; u < kPieceTokens; u += kTogether) {
          read_tile<kVectors, kLast, kTogether>(a, s, reader.ahead(a, u), width);
        }
        reader = reader.ahead(a, kPieceTokens);
      }
      for (; t < tokens; ++t, reader = reader.ahead(a, 1)) {
        read_tile<kVectors, kLast, 1>(a, s, reader, width);
      }
    }
    int t = 0;
    for (; t + kAddedTogether <= tokens; t += kAddedTogether) {
      add_tokens<kVectors, kAddedTogether>(keyed, values, recent);
      keyed += kAddedTogether * kKeyedPitch;
      values += kAddedTogether * kSlab;
    }
    for (; t < tokens; ++t, keyed += kKeyedPitch, values += kSlab) {
      add_tokens<kVectors, 1>(keyed, values, recent);
    }
  }
  for (; left > 0; --left) pieces.next();
  add_sum<kVectors>(recent, state, a.low + key * kSlab + column);
}

// S + low times e^g, as S + low + (S + low) expm1(g).
void decay(const LongArgs& a) {
  const D d;
  const V shrink = hn::Set(d, a.leave_minus_1);
  for (std::int64_t i = 0; i < a.key_blocks * kKeyBlock * kSlab; i += kLanes) {
    const V before = hn::Load(d, a.state + i), low = hn::Load(d, a.low + i);
    const V change = hn::MulAdd(before, shrink, hn::MulAdd(low, shrink, low));
    const V after = hn::Add(before, change);
    hn::Store(after, d, a.state + i);
    hn::Store(hn::Sub(change, hn::Sub(after, before)), d, a.low + i);
  }
}

template <bool kRead, int kVectors>
void long_columns(const LongArgs& a, std::int64_t column) {
  const std::int64_t keys = a.key_blocks * kKeyBlock;
  for (std::int64_t t = 0; kRead && t < a.tokens; t += kLongChunk) {
    const int tokens = static_cast<int>(HWY_MIN(kLongChunk, a.tokens - t));
    const float* scores = a.scores + t * kLongChunk;
    const float* values = a.values + t * kSlab + column;
    float* partial = a.partial + t * kSlab + column;
    int row = 0;
    for (; row + 4 <= tokens; row += 4) recent_rows<4, kVectors>(scores, values, partial, row);
    for (; row < tokens; ++row) recent_rows<1, kVectors>(scores, values, partial, row);
  }
  for (std::int64_t key = 0; key < keys; key += kTileKeys) {
    const auto tile = [&]<Beside kBeside>() HWY_ATTR {
      if (key + kTileKeys < keys) {
        long_tile<kRead, kVectors, false, kBeside>(a, key, column);
      } else {
        long_tile<kRead, kVectors, true, kBeside>(a, key, column);
      }
    };
    if constexpr (kRead && kVectors == 2) {
      with_beside(a.meanwhile, tile);
    } else {
      tile.template operator()<Beside::kNothing>();
    }
  }
}

template <bool kRead>
void long_slab(const LongArgs& a) {
  std::int64_t column = 0;
  for (; column + kLanes < a.width; column += 2 * kLanes) long_columns<kRead, 2>(a, column);
  if (column < a.width) long_columns<kRead, 1>(a, column);
  if (a.leave_minus_1 != 0.0f) decay(a);
}

}  // namespace

void RecurrenceScores(std::int64_t tokens, std::int64_t key_blocks, const float* keyed,
                      float* scores) {
  for (std::int64_t t = 0; t < tokens; t += kLongChunk) {
    scores_of(keyed + t * kKeyedPitch, key_blocks, scores + t * kLongChunk);
  }
}

void RecurrenceLong(const LongArgs& a) {
  a.out != nullptr ? long_slab<true>(a) : long_slab<false>(a);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceScores);
HWY_EXPORT(RecurrenceLong);
void recurrence_scores(Isa isa, std::int64_t tokens, std::int64_t key_blocks, const float* keyed,
                       float* scores) {
  OUZEL_DISPATCH(isa, RecurrenceScores)(tokens, key_blocks, keyed, scores);
}
void recurrence_long(Isa isa, const LongArgs& args) { OUZEL_DISPATCH(isa, RecurrenceLong)(args); }
}  // namespace ouzel
#endif
