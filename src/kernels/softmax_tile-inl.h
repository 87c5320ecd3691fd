// What the softmax kernels share: panels, the register tile, and who sees whom.

// Per-target include guard.
#if defined(OUZEL_KERNELS_SOFTMAX_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_SOFTMAX_TILE_INL_H_
#undef OUZEL_KERNELS_SOFTMAX_TILE_INL_H_
#else
#define OUZEL_KERNELS_SOFTMAX_TILE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/softmax_tile.h"
#include "src/kernels/typed-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace softmax {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline constexpr std::int64_t kLanes = hn::MaxLanes(D());
inline constexpr std::int64_t kVecs = 3;  // vectors of queries in a tile
inline constexpr std::int64_t kTile =
    kVecs * kLanes;                        // queries of a tile: the row length of its arrays
inline constexpr std::int64_t kPanel = 8;  // keys (or features) broadcast side by side
// Rows of accumulators held at once: 8 x 3 of 32 registers, or 4 x 3 of 16.
inline constexpr int kRows = HWY_TARGET == HWY_AVX3 ? 8 : 4;
// Steps of a product before its loop counts: counting and what else is no multiply-add costs a core
// that it shares with another thread as much as a multiply-add does.
inline constexpr int kSteps = HWY_TARGET == HWY_AVX3 ? 1 : 8;

HWY_INLINE std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

// How scores become weights: 2^((score - reference) * to_base2), where queries are packed times
// `pack`. Differences of raw scores come first, so that what rounds is as small as what is left of
// the weight.
struct Scale {
  float pack = 1;
  float to_base2 = 1;
  double natural = 1;  // to_base2 in natural units

  explicit Scale(float scale) {
    constexpr double kLn2 = 0.69314718055994531;
    const float size = std::abs(scale);
    // Next to 0 the reference of the backward, lse / scale, would not be a float.
    const bool tiny = size < 0x1p-60f;
    pack = tiny ? scale : std::copysign(1.0f, scale);
    to_base2 = static_cast<float>((tiny ? 1.0 : static_cast<double>(size)) / kLn2);
    natural = static_cast<double>(to_base2) * kLn2;
  }
};

// 2^x for x <= 0 (or little above): relative error 1e-7, exactly 1 at 0 and 0 at -inf, NaN for NaN.
// One weight costs what 8 fused multiply-adds do with AVX-512: a tenth of forming its score at K
// = 64.
HWY_INLINE V weight(D d, V x) {
#if HWY_TARGET == HWY_AVX3
  const V f{_mm512_reduce_ps(x.raw, 0x09)};  // x - floor(x); 0 at -inf
  V p = hn::Set(d, 1.867129817e-03f);
  p = hn::MulAdd(p, f, hn::Set(d, 9.017030708e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.579991266e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.401644439e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931512952e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return V{_mm512_scalef_ps(p.raw, x.raw)};  // p 2^floor(x)
#else
  // From -127 on 2^n is 0, and so is the weight.
#if HWY_TARGET == HWY_AVX2
  x = V{_mm256_max_ps(hn::Set(d, -127.0f).raw, x.raw)};  // the second where either is NaN
#else
  x = hn::IfThenElse(hn::Lt(x, hn::Set(d, -127.0f)), hn::Set(d, -127.0f), x);
#endif
  // Adding 1.5 * 2^23 rounds to an integer n, which the lower bits then hold; with 127 more they
  // hold the exponent of 2^n.
  const hn::RebindToSigned<D> di;
  const V magic = hn::Set(d, 12582912.0f + 127.0f);
  const V t = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(t, magic));
  V p = hn::Set(d, 1.326472731e-03f);
  p = hn::MulAdd(p, f, hn::Set(d, 9.671512991e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550733581e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402224243e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931470037e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, t))));
#endif
}

// What becomes of c, with the sum in registers.
enum class Into {
  kAssign,     // c = sum
  kAssignMax,  // c = sum, and `per_lane` becomes its maximum with the rows of sum
  kContinue,   // the chain of sums goes on from c
  kAdd,        // c = c + sum
  kScaledAdd,  // c = c per_lane + sum
};

// sum[r][v] = sum over i < n, in order, of a[i * kStepA + r * kRowA] * b[i * ldb + v], for kRows
// rows and NV vectors.
template <int NV, Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                              std::int64_t ldb, std::int64_t n, float* HWY_RESTRICT c,
                              std::int64_t ldc, float* HWY_RESTRICT per_lane) {
  const D d;
  V acc[kRows][NV];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      acc[r][v] = kInto == Into::kContinue ? hn::LoadU(d, c + r * ldc + v * kLanes) : hn::Zero(d);
    }
  }
  HWY_UNROLL(kSteps)
  for (std::int64_t i = 0; i < n; ++i) {
    V bv[NV];
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) bv[v] = hn::LoadU(d, b + v * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const V av = hn::Set(d, a[r * kRowA]);
      HWY_UNROLL(3)
      for (int v = 0; v < NV; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
    }
    a += kStepA;
    b += ldb;
  }
  if constexpr (kInto == Into::kAssignMax) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      V max = hn::LoadU(d, per_lane + v * kLanes);
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) max = hn::Max(max, acc[r][v]);
      hn::StoreU(max, d, per_lane + v * kLanes);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      float* to = c + r * ldc + v * kLanes;
      if constexpr (kInto == Into::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, to), acc[r][v]);
      if constexpr (kInto == Into::kScaledAdd) {
        acc[r][v] = hn::MulAdd(hn::LoadU(d, to), hn::LoadU(d, per_lane + v * kLanes), acc[r][v]);
      }
      hn::StoreU(acc[r][v], d, to);
    }
  }
}

// multiply_rows for the kPanel rows of a panel.
template <int NV, Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply(const float* a, const float* b, std::int64_t ldb, std::int64_t n, float* c,
                         std::int64_t ldc, float* per_lane) {
  HWY_UNROLL(1)
  for (std::int64_t r = 0; r < kPanel; r += kRows) {
    multiply_rows<NV, kInto, kStepA, kRowA>(a + r * kRowA, b, ldb, n, c + r * ldc, ldc, per_lane);
  }
}

// The same for 1 to 3 vectors, known at run time.
template <Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply_vecs(std::int64_t vecs, const float* a, const float* b, std::int64_t ldb,
                              std::int64_t n, float* c, std::int64_t ldc, float* per_lane) {
  if (vecs == 3) {
    multiply<3, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, per_lane);
  } else if (vecs == 2) {
    multiply<2, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, per_lane);
  } else {
    multiply<1, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, per_lane);
  }
}

#if HWY_TARGET != HWY_SCALAR
// Four numbers of one row; with 256 bits those of the fourth row after it beside them.
template <class DQuads>
HWY_INLINE hn::Vec<DQuads> load_quads(DQuads d, const float* const* rows, std::int64_t c) {
  if constexpr (hn::MaxLanes(DQuads()) == 8) {
    const hn::Half<DQuads> half;
    return hn::Combine(d, hn::LoadU(half, rows[4] + c), hn::LoadU(half, rows[0] + c));
  } else {
    return hn::LoadU(d, rows[0] + c);
  }
}
#endif

// to[c * ld + r] = scale * rows[r][c] for r < count (a multiple of 4, of 8 with 256 bits) and c <
// cols.
HWY_INLINE void pack_transposed(const float* const* rows, std::int64_t count, std::int64_t cols,
                                float scale, float* HWY_RESTRICT to, std::int64_t ld) {
  std::int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::CappedTag<float, 8> d;
  constexpr std::int64_t kQuads = hn::MaxLanes(hn::CappedTag<float, 8>());
  const auto s = hn::Set(d, scale);
  for (std::int64_t r = 0; r < count; r += kQuads) {
    for (c = 0; c + 4 <= cols; c += 4) {
      const auto a0 = load_quads(d, rows + r, c);
      const auto a1 = load_quads(d, rows + r + 1, c);
      const auto a2 = load_quads(d, rows + r + 2, c);
      const auto a3 = load_quads(d, rows + r + 3, c);
      const auto b0 = hn::InterleaveLower(d, a0, a2);  // 00 20 01 21
      const auto b1 = hn::InterleaveUpper(d, a0, a2);  // 02 22 03 23
      const auto b2 = hn::InterleaveLower(d, a1, a3);
      const auto b3 = hn::InterleaveUpper(d, a1, a3);
      float* out = to + c * ld + r;
      hn::StoreU(hn::Mul(s, hn::InterleaveLower(d, b0, b2)), d, out);
      hn::StoreU(hn::Mul(s, hn::InterleaveUpper(d, b0, b2)), d, out + ld);
      hn::StoreU(hn::Mul(s, hn::InterleaveLower(d, b1, b3)), d, out + 2 * ld);
      hn::StoreU(hn::Mul(s, hn::InterleaveUpper(d, b1, b3)), d, out + 3 * ld);
    }
  }
#endif
  for (; c < cols; ++c) {
    for (std::int64_t r = 0; r < count; ++r) to[c * ld + r] = scale * rows[r][c];
  }
}

// rows[r][c] = from[c * ld + r] (added to rows[r][c] if kAdd) for r < count and c < cols.
template <bool kAdd>
HWY_INLINE void unpack_transposed(const float* HWY_RESTRICT from, std::int64_t ld,
                                  std::int64_t count, std::int64_t cols, float* const* rows) {
  std::int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<float> d4;
  const auto put = [&](auto x, float* out)
                       HWY_ATTR { hn::StoreU(kAdd ? hn::Add(hn::LoadU(d4, out), x) : x, d4, out); };
  for (; r + 4 <= count; r += 4) {
    std::int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      const float* in = from + c * ld + r;
      const auto a0 = hn::LoadU(d4, in);
      const auto a1 = hn::LoadU(d4, in + ld);
      const auto a2 = hn::LoadU(d4, in + 2 * ld);
      const auto a3 = hn::LoadU(d4, in + 3 * ld);
      const auto b0 = hn::InterleaveLower(d4, a0, a2);
      const auto b1 = hn::InterleaveUpper(d4, a0, a2);
      const auto b2 = hn::InterleaveLower(d4, a1, a3);
      const auto b3 = hn::InterleaveUpper(d4, a1, a3);
      put(hn::InterleaveLower(d4, b0, b2), rows[r] + c);
      put(hn::InterleaveUpper(d4, b0, b2), rows[r + 1] + c);
      put(hn::InterleaveLower(d4, b1, b3), rows[r + 2] + c);
      put(hn::InterleaveUpper(d4, b1, b3), rows[r + 3] + c);
    }
    for (; c < cols; ++c) {
      for (std::int64_t i = r; i < r + 4; ++i) {
        rows[i][c] = kAdd ? rows[i][c] + from[c * ld + i] : from[c * ld + i];
      }
    }
  }
#endif
  for (; r < count; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      rows[r][c] = kAdd ? rows[r][c] + from[c * ld + r] : from[c * ld + r];
    }
  }
}

// Panels of kPanel features: to[c / 8][r][c % 8] = rows[r][c], the last panel filled up with zeros.
// Returns whether all are finite.
HWY_INLINE bool pack_feature_panels(const float* const* rows, std::int64_t count, std::int64_t cols,
                                    float* HWY_RESTRICT to) {
  const hn::CappedTag<float, kPanel> d;
  constexpr std::int64_t kStep = hn::MaxLanes(hn::CappedTag<float, kPanel>());
  const std::int64_t whole = cols / kPanel * kPanel;
  const std::int64_t stride = kSoftmaxBlock * kPanel;
  auto nothing = hn::Zero(d);  // 0 x, which is NaN for an x of infinity or NaN
  float rest = 0;
  for (std::int64_t r = 0; r < count; ++r) {
    float* out = to + r * kPanel;
    for (std::int64_t c = 0; c < whole; c += kPanel, out += stride) {
      for (std::int64_t i = 0; i < kPanel; i += kStep) {
        const auto x = hn::LoadU(d, rows[r] + c + i);
        nothing = hn::Or(nothing, hn::Mul(x, hn::Zero(d)));
        hn::StoreU(x, d, out + i);
      }
    }
    if (whole < cols) {
      for (std::int64_t i = 0; i < kPanel; ++i) {
        out[i] = whole + i < cols ? rows[r][whole + i] : 0.0f;
        rest += 0.0f * out[i];
      }
    }
  }
  return hn::AllTrue(d, hn::Eq(nothing, hn::Zero(d))) && rest == 0.0f;
}

// Panels of kPanel keys: to[r / 8][c][r % 8] = rows[r][c]; count is a multiple of 8.
HWY_INLINE void pack_key_panels(const float* const* rows, std::int64_t count, std::int64_t cols,
                                float* HWY_RESTRICT to) {
  for (std::int64_t r = 0; r < count; r += kPanel) {
    pack_transposed(rows + r, kPanel, cols, 1.0f, to + r * cols, kPanel);
  }
}

// Addresses of the rows of keys and values [begin, begin + kSoftmaxBlock). Positions that no piece
// holds repeat a neighbour: nothing sees them, and masked scores are selected away whatever they
// are.
HWY_INLINE void find_rows(const SoftmaxKeys* pieces, std::int64_t piece_count,
                          const SoftmaxTypes& types, std::int64_t begin, const void** k_rows,
                          const void** v_rows) {
  const auto row = [](const void* first, std::int64_t i, std::int64_t stride, DType type) {
    return static_cast<const char*>(first) + i * stride * (type == DType::kF32 ? 4 : 2);
  };
  std::int64_t i = 0;
  for (std::int64_t p = 0; p < piece_count; ++p) {
    const SoftmaxKeys& piece = pieces[p];
    if (piece.begin == piece.end) continue;
    // Every position up to the piece's end that has no row yet.
    const std::int64_t end =
        p + 1 == piece_count ? kSoftmaxBlock : std::min(kSoftmaxBlock, piece.end - begin);
    for (; i < end; ++i) {
      const std::int64_t j = std::clamp(begin + i, piece.begin, piece.end - 1) - piece.begin;
      k_rows[i] = row(piece.k, j, piece.k_stride, types.k);
      v_rows[i] = row(piece.v, j, piece.v_stride, types.v);
    }
  }
}

template <class Element>
HWY_NOINLINE void widen_each(const void* const* rows, std::int64_t count, std::int64_t cols,
                             float* HWY_RESTRICT wide) {
  const D d;
  for (std::int64_t r = 0; r < count; ++r) {
    const auto* x = static_cast<const Element*>(rows[r]);
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      store_first(d, LoadFirst(d, x + c, cols - c), wide + r * cols + c, cols - c);
    }
  }
}
// Rows as float32: where they are, or in `wide`, [count][cols].
HWY_INLINE void as_floats(DType type, const void* const* rows, std::int64_t count,
                          std::int64_t cols, float* wide, const float** floats) {
  if (type == DType::kF32) {
    for (std::int64_t r = 0; r < count; ++r) floats[r] = static_cast<const float*>(rows[r]);
    return;
  }
  (type == DType::kBF16 ? widen_each<BFloat16> : widen_each<Float16>)(rows, count, cols, wide);
  for (std::int64_t r = 0; r < count; ++r) floats[r] = wide + r * cols;
}
template <class Element>
HWY_NOINLINE void narrow_row(const float* from, std::int64_t cols, void* to) {
  const D d;
  for (std::int64_t c = 0; c < cols; c += kLanes) {
    StoreFirst(d, load_first(d, from + c, cols - c), static_cast<Element*>(to) + c, cols - c);
  }
}
// A row of 16 bits, rounded.
HWY_INLINE void put_row(DType type, const float* from, std::int64_t cols, void* to) {
  (type == DType::kBF16 ? narrow_row<BFloat16> : narrow_row<Float16>)(from, cols, to);
}

// Asks for rows that are packed next: strided rows come from far, and no hardware foresees them.
HWY_INLINE void prefetch_row(const void* row, DType type, std::int64_t cols) {
  const std::int64_t bytes = cols * (type == DType::kF32 ? 4 : 2);
  const auto* at = static_cast<const char*>(row);
  for (std::int64_t c = 0; c < bytes; c += 64) __builtin_prefetch(at + c, 0, 2);
  __builtin_prefetch(at + bytes - 1, 0, 2);
}
HWY_INLINE void prefetch_rows(const void* const* rows, DType type, std::int64_t begin,
                              std::int64_t end, std::int64_t cols) {
  for (std::int64_t r = begin; r < end; ++r) prefetch_row(rows[r], type, cols);
}

// Which keys of a block the vectors of a tile of queries see, in block coordinates: vector v sees
// [any_begin, any_end) with some lane and [full_begin, full_end) with every lane.
struct Sight {
  std::int64_t vecs = 0;  // vectors that hold a query
  std::int64_t any_begin[kVecs], any_end[kVecs], full_begin[kVecs], full_end[kVecs];
  // Key j of the block is seen by lanes [j - shift, j - shift + width) of vector 0.
  std::int64_t shift_low = 0, shift_high = 0;
  bool whole = false;  // every vector sees the same keys with every lane
  bool none = true;
};

// Queries [first, first + count) and keys [begin, end).
HWY_INLINE Sight see(const SoftmaxShape& shape, std::int64_t first, std::int64_t count,
                     std::int64_t begin, std::int64_t end) {
  Sight s;
  s.vecs = (count + kLanes - 1) / kLanes;
  s.whole = true;
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    const std::int64_t a = first + v * kLanes + shape.offset;
    const std::int64_t z = first + std::min((v + 1) * kLanes, count) - 1 + shape.offset;
    const auto clip = [&](std::int64_t j) { return std::clamp(j, begin, end) - begin; };
    s.any_begin[v] = clip(a - shape.before);
    s.any_end[v] = clip(z + shape.after + 1);
    s.full_begin[v] = clip(z - shape.before);
    s.full_end[v] = clip(a + shape.after + 1);
    if (s.any_begin[v] < s.any_end[v]) s.none = false;
    s.whole = s.whole && s.full_begin[v] == 0 && s.full_end[v] == end - begin;
  }
  // i + offset - before <= j <= i + offset + after, with i = first + lane and j = begin + key.
  s.shift_low = begin - first - shape.offset - shape.after;
  s.shift_high = begin - first - shape.offset + shape.before;
  return s;
}

// The lanes of vector v that see key j.
HWY_INLINE hn::Mask<D> seeing_lanes(const Sight& s, std::int64_t j, std::int64_t v) {
  const D d;
  const auto bound = [&](std::int64_t lane) HWY_ATTR {
    return hn::Set(d, static_cast<float>(std::clamp<std::int64_t>(lane, -1, kLanes)));
  };
  const V lane = hn::Iota(d, 0.0f);
  return hn::And(hn::Ge(lane, bound(j + s.shift_low - v * kLanes)),
                 hn::Le(lane, bound(j + s.shift_high - v * kLanes)));
}

// body(j) for the keys that some lanes of vector v see and others do not.
template <class Body>
HWY_INLINE void for_partial_keys(const Sight& s, std::int64_t v, const Body& body) {
  const std::int64_t begin = s.any_begin[v], end = s.any_end[v];
  const std::int64_t full_begin = std::clamp(s.full_begin[v], begin, end);
  const std::int64_t full_end = std::clamp(s.full_end[v], full_begin, end);
  for (std::int64_t j = begin; j < full_begin; ++j) body(j);
  for (std::int64_t j = full_end; j < end; ++j) body(j);
}

// scores[j][lane] = sum over the features of keys[j] * queries[lane], for the panels and vectors
// that see each other. Keys in panels of keys, queries [feature][kTile], scores and what follows
// from them in rows of kLd. kAssignMax, of whole tiles only: `max` [kTile] becomes the maximum with
// the scores.
template <Into kInto, std::int64_t kLd>
HWY_INLINE void score(const Sight& s, const float* key_panels, const float* queries,
                      std::int64_t features, std::int64_t keys, float* scores, float* max) {
  for (std::int64_t j = 0; j < keys; j += kPanel) {
    std::int64_t v = 0, end = s.vecs;
    if (!s.whole) {
      // The vectors that see a key of this panel are neighbours: ranges grow with v.
      const auto blind = [&](std::int64_t i) {
        return s.any_begin[i] >= std::min(j + kPanel, s.any_end[i]) || s.any_end[i] <= j;
      };
      while (v < end && blind(v)) ++v;
      while (v < end && blind(end - 1)) --end;
      if (v == end) continue;
    }
    multiply_vecs<kInto, kPanel, 1>(end - v, key_panels + j * features, queries + v * kLanes, kTile,
                                    features, scores + j * kLd + v * kLanes, kLd, max);
  }
}

// weights[j][lane] = 0 for the lanes of vector v that do not see key j, in the panels in which it
// sees any.
template <std::int64_t kLd>
HWY_INLINE void clear_unseen(const Sight& s, std::int64_t v, float* weights) {
  const D d;
  const std::int64_t begin = s.any_begin[v], end = s.any_end[v];
  if (begin >= end) return;
  float* column = weights + v * kLanes;
  const auto clear = [&](std::int64_t j) HWY_ATTR { hn::StoreU(hn::Zero(d), d, column + j * kLd); };
  for (std::int64_t j = begin / kPanel * kPanel; j < begin; ++j) clear(j);
  for_partial_keys(s, v, [&](std::int64_t j) HWY_ATTR {
    float* at = column + j * kLd;
    hn::StoreU(hn::IfThenElseZero(seeing_lanes(s, j, v), hn::LoadU(d, at)), d, at);
  });
  for (std::int64_t j = end; j < round_up(end, kPanel); ++j) clear(j);
}

// acc[f][lane] += sum over keys j, in order, of panels[f][j] * weights[j][lane], where weights of
// keys that a lane does not see are 0 and panels are finite: what is 0 adds 0.
template <std::int64_t kLd>
HWY_INLINE void gather_finite(const Sight& s, const float* panels, std::int64_t panel_count,
                              const float* weights, float* acc) {
  std::int64_t j = kSoftmaxBlock;
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    if (s.any_begin[v] < s.any_end[v]) j = std::min(j, s.any_begin[v]);
  }
  // Stretches of keys that the same vectors see.
  while (true) {
    std::int64_t first = kVecs, last = 0, next = kSoftmaxBlock;
    for (std::int64_t v = 0; v < s.vecs; ++v) {
      if (s.any_begin[v] > j) {
        next = std::min(next, s.any_begin[v]);
      } else if (s.any_end[v] > j) {
        first = std::min(first, v);
        last = v + 1;
        next = std::min(next, s.any_end[v]);
      }
    }
    if (first == kVecs && next == kSoftmaxBlock) return;
    if (first < kVecs) {
      for (std::int64_t p = 0; p < panel_count; ++p) {
        multiply_vecs<Into::kContinue, kPanel, 1>(
            last - first, panels + (p * kSoftmaxBlock + j) * kPanel,
            weights + j * kLd + first * kLanes, kLd, next - j,
            acc + p * kPanel * kTile + first * kLanes, kTile, nullptr);
      }
    }
    j = next;
    if (j == kSoftmaxBlock) return;
  }
}

// The same for panels that hold infinities or NaN, which must not meet lanes that do not see them.
template <std::int64_t kLd>
HWY_INLINE void gather_careful(const Sight& s, const float* panels, std::int64_t panel_count,
                               const float* weights, float* acc) {
  const D d;
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    for (std::int64_t j = s.any_begin[v]; j < s.any_end[v]; ++j) {
      const auto seen = seeing_lanes(s, j, v);
      const V w = hn::LoadU(d, weights + j * kLd + v * kLanes);
      for (std::int64_t f = 0; f < panel_count * kPanel; ++f) {
        const float a = panels[f / kPanel * kPanel * kSoftmaxBlock + j * kPanel + f % kPanel];
        float* to = acc + f * kTile + v * kLanes;
        const V old = hn::LoadU(d, to);
        hn::StoreU(hn::IfThenElse(seen, hn::MulAdd(hn::Set(d, a), w, old), old), d, to);
      }
    }
  }
}

}  // namespace softmax
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
