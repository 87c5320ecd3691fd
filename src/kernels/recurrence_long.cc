// The compensated chunk, for sums that hardly decay, beyond their first 2,048 tokens: the chunk's
// sum R is formed apart, from what S lost to rounding, and then added to S in two parts, S and what
// is lost now. Tokens go 16 by 16, and X is what they read:
//
//     o_i = X^T q_i + sum_(j <= i) (q_i . k_j) v_j        R += sum_j k_j v_j^T        X = S + R
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
// Tokens that read, or keys that are written, side by side: with a slab's vectors what registers
// hold. AVX-512 has a third of the steps and does thrice the pieces (Pieces) in each.
constexpr int kTogether = HWY_TARGET == HWY_AVX3 ? 8 : 3;
constexpr std::int64_t kPiecesABlock = HWY_TARGET == HWY_AVX3 ? 3 : 1;

// sum[i][c] += w[i] x[c]: kRows numbers w, `pitch` apart, and a vector of kVectors.
template <int kRows, int kVectors>
HWY_INLINE void add_products(const float* w, std::int64_t pitch, const float* x,
                             V (&sum)[kRows][kVectors]) {
  const D d;
  V factor[kRows];
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) factor[i] = hn::Set(d, w[i * pitch]);
  OUZEL_UNROLL
  for (int c = 0; c < kVectors; ++c) {
    const V y = hn::Load(d, x + c * kLanes);
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) sum[i][c] = hn::MulAdd(factor[i], y, sum[i][c]);
  }
}

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

// Rows [row, row + kRows) of 16 tokens from t on read X and each other:
//     out_i = factor_i (X^T q_i + sum_(j <= i) scores[i][j] v_j)
// Later tokens are skipped, not multiplied by zero. `left`: pieces that are to be done meanwhile.
template <int kRows, int kVectors, Beside kBeside>
HWY_INLINE void read_rows(const LongArgs& a, const float* x, std::int64_t t, int row,
                          std::int64_t column, Pieces<kBeside>& pieces, std::int64_t& left) {
  const D d;
  V o[kRows][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) o[i][c] = hn::Zero(d);
  }
  const float* q = a.keyed + (t + row) * kKeyedPitch;
  x += column;
  for (std::int64_t block = a.key_blocks; block > 0; --block) {
    const std::int64_t now = HWY_MIN(left, kPiecesABlock);
    left -= now;
    for (std::int64_t n = now; n > 0; --n) pieces.next();
    OUZEL_UNROLL
    for (int f = 0; f < kKeyBlock; ++f) {
      add_products<kRows, kVectors>(q + f, kKeyedPitch, x + f * kSlab, o);
    }
    q += kKeyedBlockPitch;
    x += kKeyBlock * kSlab;
  }
  const float* scores = a.scores + (t + row) * kLongChunk;
  const float* values = a.values + t * kSlab + column;
  for (int j = 0; j < row; ++j) {
    add_products<kRows, kVectors>(scores + j, kLongChunk, values + j * kSlab, o);
  }
  scores += row;
  values += row * kSlab;
  OUZEL_UNROLL
  for (int j = 0; j < kRows; ++j) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      const V v = hn::Load(d, values + j * kSlab + c * kLanes);
      OUZEL_UNROLL
      for (int i = j; i < kRows; ++i) {
        o[i][c] = hn::MulAdd(hn::Set(d, scores[i * kLongChunk + j]), v, o[i][c]);
      }
    }
  }
  float* out = a.out + (t + row) * a.out_stride + column;
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const V factor = hn::Set(d, a.factor[t + row + i]);
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      V y = hn::Mul(o[i][c], factor);
      if (a.skip != 0.0f) {
        const V v = hn::Load(d, values + i * kSlab + c * kLanes);
        y = hn::MulAdd(v, hn::Set(d, a.skip), y);
      }
      if (a.stream) {
        hn::Stream(y, d, out + c * kLanes);
      } else {
        store_first(d, y, out + c * kLanes, a.width - column - c * kLanes);
      }
    }
    out += a.out_stride;
  }
}

// Up to 16 tokens from t on read X.
template <int kVectors>
void read_tokens(const LongArgs& a, const float* x, std::int64_t t, int tokens,
                 std::int64_t column) {
  const auto rows =
      [&]<int kSome, Beside kBeside>(int row, Pieces<kBeside>& pieces, std::int64_t& left)
          HWY_ATTR { read_rows<kSome, kVectors, kBeside>(a, x, t, row, column, pieces, left); };
  const auto all = [&]<Beside kBeside>() HWY_ATTR {
    const std::int64_t blocks = a.key_blocks * ((tokens + kTogether - 1) / kTogether);
    Pieces<kBeside> pieces(a.meanwhile, kPiecesABlock * blocks);
    std::int64_t left = pieces.count;
    int row = 0;
    // Two pairs rather than three and one, which would wait for its own sums.
    for (; row + kTogether <= tokens && row + kTogether + 1 != tokens; row += kTogether) {
      rows.template operator()<kTogether, kBeside>(row, pieces, left);
    }
    for (; row + 2 <= tokens; row += 2) rows.template operator()<2, kBeside>(row, pieces, left);
    for (; row < tokens; ++row) rows.template operator()<1, kBeside>(row, pieces, left);
    for (; left > 0; --left) pieces.next();
  };
  if constexpr (kVectors * kLanes == kSlab) {
    with_beside(a.meanwhile, all);
  } else {
    all.template operator()<Beside::kNothing>();
  }
}

// R += k v^T of `tokens` from the pointers on, for kKeys keys. X = S + R, or, at last, S + R in two
// parts. Fast two-sum (Dekker): exact where S is the larger, which is where long sums are lost;
// else it errs by a rounding of R.
template <bool kLast, int kKeys, int kVectors>
HWY_INLINE void write_keys(const float* k, const float* values, std::int64_t tokens, float* state,
                           float* low, float* x) {
  const D d;
  V sum[kKeys][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kKeys; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) sum[i][c] = hn::Load(d, low + i * kSlab + c * kLanes);
  }
  const auto add = [&](int token) HWY_ATTR OUZEL_ALWAYS_INLINE {
    add_products<kKeys, kVectors>(k + token * kKeyedPitch, 1, values + token * kSlab, sum);
  };
  constexpr int kUnrolled = 4;
  for (; tokens >= kUnrolled; tokens -= kUnrolled) {
    OUZEL_UNROLL
    for (int u = 0; u < kUnrolled; ++u) add(u);
    k += kUnrolled * kKeyedPitch;
    values += kUnrolled * kSlab;
  }
  for (; tokens > 0; --tokens) {
    add(0);
    k += kKeyedPitch;
    values += kSlab;
  }
  OUZEL_UNROLL
  for (int i = 0; i < kKeys; ++i) {
    OUZEL_UNROLL
    for (int c = 0; c < kVectors; ++c) {
      const std::int64_t at = i * kSlab + c * kLanes;
      const V before = hn::Load(d, state + at), after = hn::Add(before, sum[i][c]);
      if constexpr (kLast) {
        hn::Store(after, d, state + at);
        hn::Store(hn::Sub(sum[i][c], hn::Sub(after, before)), d, low + at);
      } else {
        hn::Store(sum[i][c], d, low + at);
        hn::Store(after, d, x + at);
      }
    }
  }
}

template <bool kLast, int kVectors>
void write_tokens(const LongArgs& a, std::int64_t t, std::int64_t tokens, std::int64_t column) {
  constexpr int kRest = kKeyBlock % kTogether;
  const float *k = a.keyed + t * kKeyedPitch + kKeyBlock, *values = a.values + t * kSlab + column;
  float *state = a.state + column, *low = a.low + column, *x = a.x + column;
  const auto keys = [&]<int kSome>(int i) HWY_ATTR OUZEL_ALWAYS_INLINE {
    write_keys<kLast, kSome, kVectors>(k + i, values, tokens, state + i * kSlab, low + i * kSlab,
                                       x + i * kSlab);
  };
  for (std::int64_t block = 0; block < a.key_blocks; ++block) {
    OUZEL_UNROLL
    for (int i = 0; i + kTogether <= kKeyBlock; i += kTogether) {
      keys.template operator()<kTogether>(i);
    }
    if constexpr (kRest != 0) keys.template operator()<kRest>(kKeyBlock - kRest);
    k += kKeyedBlockPitch;
    state += kKeyBlock * kSlab;
    low += kKeyBlock * kSlab;
    x += kKeyBlock * kSlab;
  }
}

template <int kVectors>
void long_columns(const LongArgs& a, std::int64_t column) {
  if (a.out == nullptr) return write_tokens<true, kVectors>(a, 0, a.tokens, column);
  for (std::int64_t t = 0; t < a.tokens; t += kLongChunk) {
    const std::int64_t tokens = HWY_MIN(kLongChunk, a.tokens - t);
    read_tokens<kVectors>(a, t == 0 ? a.state : a.x, t, static_cast<int>(tokens), column);
    t + tokens < a.tokens ? write_tokens<false, kVectors>(a, t, tokens, column)
                          : write_tokens<true, kVectors>(a, t, tokens, column);
  }
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

}  // namespace

void RecurrenceScores(std::int64_t tokens, std::int64_t key_blocks, const float* keyed,
                      float* scores) {
  for (std::int64_t t = 0; t < tokens; t += kLongChunk) {
    scores_of(keyed + t * kKeyedPitch, key_blocks, scores + t * kLongChunk);
  }
}

void RecurrenceLong(const LongArgs& a) {
  // As many vectors as the slab has, up to four.
  constexpr int kMost = HWY_MIN(kSlab / kLanes, 4);
  for (std::int64_t column = 0; column < a.width; column += kMost * kLanes) {
    const std::int64_t left = a.width - column;
    if (left <= kLanes) {
      long_columns<1>(a, column);
    } else if (left <= 2 * kLanes) {
      long_columns<2>(a, column);
    } else {
      long_columns<kMost>(a, column);
    }
  }
  if (a.leave_minus_1 != 0.0f) decay(a);
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
