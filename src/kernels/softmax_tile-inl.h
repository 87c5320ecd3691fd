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
#include "src/kernels/softmax_tile.h"

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

// What becomes of c, with the sum in registers.
enum class Into {
  kAssign,     // c = sum
  kContinue,   // the chain of sums goes on from c
  kAdd,        // c = c + sum
  kScaledAdd,  // c = c alpha + sum
};

// sum[r][v] = sum over i < n, in order, of a[i * kStepA + r * kRowA] * b[i * ldb + v], for kRows
// rows and NV vectors.
template <int NV, Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                              std::int64_t ldb, std::int64_t n, float* HWY_RESTRICT c,
                              std::int64_t ldc, const float* HWY_RESTRICT alpha) {
  const D d;
  V acc[kRows][NV];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      acc[r][v] = kInto == Into::kContinue ? hn::LoadU(d, c + r * ldc + v * kLanes) : hn::Zero(d);
    }
  }
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
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      float* to = c + r * ldc + v * kLanes;
      if constexpr (kInto == Into::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, to), acc[r][v]);
      if constexpr (kInto == Into::kScaledAdd) {
        acc[r][v] = hn::MulAdd(hn::LoadU(d, to), hn::LoadU(d, alpha + v * kLanes), acc[r][v]);
      }
      hn::StoreU(acc[r][v], d, to);
    }
  }
}

// multiply_rows for the kPanel rows of a panel.
template <int NV, Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply(const float* a, const float* b, std::int64_t ldb, std::int64_t n, float* c,
                         std::int64_t ldc, const float* alpha) {
  for (std::int64_t r = 0; r < kPanel; r += kRows) {
    multiply_rows<NV, kInto, kStepA, kRowA>(a + r * kRowA, b, ldb, n, c + r * ldc, ldc, alpha);
  }
}

// The same for 1 to 3 vectors, known at run time.
template <Into kInto, std::int64_t kStepA, std::int64_t kRowA>
HWY_INLINE void multiply_vecs(std::int64_t vecs, const float* a, const float* b, std::int64_t ldb,
                              std::int64_t n, float* c, std::int64_t ldc, const float* alpha) {
  if (vecs == 3) {
    multiply<3, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, alpha);
  } else if (vecs == 2) {
    multiply<2, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, alpha);
  } else {
    multiply<1, kInto, kStepA, kRowA>(a, b, ldb, n, c, ldc, alpha);
  }
}

// to[c * ld + r] = scale * rows[r][c] for r < count (a multiple of 4) and c < cols.
HWY_INLINE void pack_transposed(const float* const* rows, std::int64_t count, std::int64_t cols,
                                float scale, float* HWY_RESTRICT to, std::int64_t ld) {
  std::int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<float> d4;
  const auto s = hn::Set(d4, scale);
  for (std::int64_t r = 0; r < count; r += 4) {
    for (c = 0; c + 4 <= cols; c += 4) {
      const auto a0 = hn::LoadU(d4, rows[r] + c);
      const auto a1 = hn::LoadU(d4, rows[r + 1] + c);
      const auto a2 = hn::LoadU(d4, rows[r + 2] + c);
      const auto a3 = hn::LoadU(d4, rows[r + 3] + c);
      const auto b0 = hn::InterleaveLower(d4, a0, a2);  // 00 20 01 21
      const auto b1 = hn::InterleaveUpper(d4, a0, a2);  // 02 22 03 23
      const auto b2 = hn::InterleaveLower(d4, a1, a3);
      const auto b3 = hn::InterleaveUpper(d4, a1, a3);
      float* out = to + c * ld + r;
      hn::StoreU(hn::Mul(s, hn::InterleaveLower(d4, b0, b2)), d4, out);
      hn::StoreU(hn::Mul(s, hn::InterleaveUpper(d4, b0, b2)), d4, out + ld);
      hn::StoreU(hn::Mul(s, hn::InterleaveLower(d4, b1, b3)), d4, out + 2 * ld);
      hn::StoreU(hn::Mul(s, hn::InterleaveUpper(d4, b1, b3)), d4, out + 3 * ld);
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
HWY_INLINE void pack_feature_panels(const float* const* rows, std::int64_t count, std::int64_t cols,
                                    float* HWY_RESTRICT to) {
  const hn::CappedTag<float, kPanel> d;
  constexpr std::int64_t kStep = hn::MaxLanes(hn::CappedTag<float, kPanel>());
  const std::int64_t whole = cols / kPanel * kPanel;
  const std::int64_t stride = kSoftmaxBlock * kPanel;
  for (std::int64_t r = 0; r < count; ++r) {
    float* out = to + r * kPanel;
    for (std::int64_t c = 0; c < whole; c += kPanel, out += stride) {
      for (std::int64_t i = 0; i < kPanel; i += kStep) {
        hn::StoreU(hn::LoadU(d, rows[r] + c + i), d, out + i);
      }
    }
    if (whole < cols) {
      for (std::int64_t i = 0; i < kPanel; ++i) {
        out[i] = whole + i < cols ? rows[r][whole + i] : 0.0f;
      }
    }
  }
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
HWY_INLINE void find_rows(const SoftmaxKeys* pieces, std::int64_t piece_count, std::int64_t begin,
                          const float** k_rows, const float** v_rows) {
  std::int64_t i = 0;
  for (std::int64_t p = 0; p < piece_count; ++p) {
    const SoftmaxKeys& piece = pieces[p];
    if (piece.begin == piece.end) continue;
    // Every position up to the piece's end that has no row yet.
    const std::int64_t end =
        p + 1 == piece_count ? kSoftmaxBlock : std::min(kSoftmaxBlock, piece.end - begin);
    for (; i < end; ++i) {
      const std::int64_t j = std::clamp(begin + i, piece.begin, piece.end - 1) - piece.begin;
      k_rows[i] = piece.k + j * piece.k_stride;
      v_rows[i] = piece.v + j * piece.v_stride;
    }
  }
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

// scores[j][lane] = sum over the features of keys[j] * queries[lane], for the panels and vectors
// that see each other. Keys in panels of keys, queries [feature][kTile].
HWY_INLINE void score(const Sight& s, const float* key_panels, const float* queries,
                      std::int64_t features, std::int64_t keys, float* scores) {
  for (std::int64_t j = 0; j < keys; j += kPanel) {
    // The vectors that see a key of this panel are neighbours: ranges grow with v.
    std::int64_t v = 0, end = s.vecs;
    while (v < end && (s.any_end[v] <= j || s.any_begin[v] >= s.any_end[v])) ++v;
    while (v < end &&
           (s.any_begin[end - 1] >= j + kPanel || s.any_begin[end - 1] >= s.any_end[end - 1]))
      --end;
    if (v >= end) continue;
    multiply_vecs<Into::kAssign, kPanel, 1>(end - v, key_panels + j * features,
                                            queries + v * kLanes, kTile, features,
                                            scores + j * kTile + v * kLanes, kTile, nullptr);
  }
}

// One vector of lanes: acc[f][lane] += sum over keys j that the lane sees, in order, of
// panels[f][j] * weights[j][lane].
HWY_INLINE void gather_vector(const Sight& s, std::int64_t v, const float* panels,
                              std::int64_t panel_count, const float* weights, float* acc) {
  const D d;
  const auto masked = [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    for (std::int64_t j = begin; j < end; ++j) {
      const auto seen = seeing_lanes(s, j, v);
      const V w = hn::LoadU(d, weights + j * kTile + v * kLanes);
      for (std::int64_t p = 0; p < panel_count; ++p) {
        const float* a = panels + p * kSoftmaxBlock * kPanel + j * kPanel;
        for (std::int64_t r = 0; r < kPanel; ++r) {
          float* to = acc + (p * kPanel + r) * kTile + v * kLanes;
          const V old = hn::LoadU(d, to);
          hn::StoreU(hn::IfThenElse(seen, hn::MulAdd(hn::Set(d, a[r]), w, old), old), d, to);
        }
      }
    }
  };
  const std::int64_t begin = s.any_begin[v], end = s.any_end[v];
  const std::int64_t full_begin = std::clamp(s.full_begin[v], begin, end);
  const std::int64_t full_end = std::clamp(s.full_end[v], full_begin, end);
  masked(begin, full_begin);
  if (full_begin < full_end) {
    for (std::int64_t p = 0; p < panel_count; ++p) {
      multiply<1, Into::kContinue, kPanel, 1>(
          panels + p * kSoftmaxBlock * kPanel + full_begin * kPanel,
          weights + full_begin * kTile + v * kLanes, kTile, full_end - full_begin,
          acc + p * kPanel * kTile + v * kLanes, kTile, nullptr);
    }
  }
  masked(full_end, end);
}

}  // namespace softmax
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
