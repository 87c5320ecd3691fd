// What the rows of a chunk are to each other, once for all slabs: decays folded into rows of keys,
// and the small matrices of each block of four (src/kernels/recurrence_block.h).
#include "src/kernels/recurrence_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_keys.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);
// A factor that the state lacks stays above 2^-60, so that its reciprocal is harmless.
constexpr float kLeast = 0x1p-60f;
constexpr float kSmallest = 0x1p-126f;  // of floats that are not flushed to 0

// out[i] = the sum of x[i]'s lanes.
HWY_INLINE void sum_four(D d, V x0, V x1, V x2, V x3, float* out) {
#if HWY_TARGET == HWY_SCALAR
  (void)d;
  out[0] = hn::GetLane(x0);
  out[1] = hn::GetLane(x1);
  out[2] = hn::GetLane(x2);
  out[3] = hn::GetLane(x3);
#else
  const hn::Repartition<double, D> d2;
  const auto pairs = [](D t, V a, V b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(t, a, b), hn::InterleaveUpper(t, a, b));
  };
  const auto x01 = hn::BitCast(d2, pairs(d, x0, x1)), x23 = hn::BitCast(d2, pairs(d, x2, x3));
  const V x = hn::Add(hn::BitCast(d, hn::InterleaveLower(d2, x01, x23)),
                      hn::BitCast(d, hn::InterleaveUpper(d2, x01, x23)));
  // A quarter (half, ...) of each sum in each group of four lanes.
  const hn::CappedTag<float, 4> d4;
#if HWY_TARGET == HWY_AVX3
  const auto half = hn::Add(hn::LowerHalf(x), hn::UpperHalf(hn::Half<D>(), x));
  hn::StoreU(hn::Add(hn::LowerHalf(half), hn::UpperHalf(d4, half)), d4, out);
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::Add(hn::LowerHalf(x), hn::UpperHalf(d4, x)), d4, out);
#else
  hn::StoreU(x, d4, out);
#endif
#endif
}

// Where rows of a block stand: of kind `kind` (q, k, e, b in this order) those from `rows` on.
struct BlockRows {
  float* first;
  std::int64_t pitch;  // of groups of 16 keys
  BlockRows kind(std::int64_t n) const { return {first + n * kBlock * kGroupKeys, pitch}; }
  HWY_INLINE float* at(int i, std::int64_t key) const {
    return first + key / kGroupKeys * pitch + i * kGroupKeys + key % kGroupKeys;
  }
};

// Rows of a block on their way from the caller's memory (`from`, if there is one) to where they
// stand.
struct Input {
  const float* from;
  std::int64_t stride;
  float scale;
  BlockRows rows;
  HWY_INLINE V load(D d, int i, std::int64_t key) const {
    if (from == nullptr) return hn::Load(d, rows.at(i, key));
    const V x = hn::Mul(hn::LoadU(d, from + i * stride + key), hn::Set(d, scale));
    hn::Store(x, d, rows.at(i, key));
    return x;
  }
};

// The pairs of a block of rows that write with those that read it: the erase's and the first
// query's in one go, or a query's alone. `u`: on the diagonal; q reads before the decay. `decay`:
// [4][key_pitch].
template <bool kErase, bool kDecay, bool kEraseDecayed, bool kReadDecayed>
void pairs_of(const KeyRowsArgs& a, const Input e, const Input q, const Input write,
              const float* decay, float* out) {
  const D d;
  constexpr int kFirst = kErase ? 6 : 0;
  V sum[16];
  OUZEL_UNROLL
  for (int p = 0; p < 16; ++p) sum[p] = hn::Zero(d);
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    V x[kBlock], erase[kBlock], factor[kBlock];
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      x[i] = q.load(d, i, key);
      if constexpr (kErase) erase[i] = e.load(d, i, key);
      if constexpr (kDecay) factor[i] = hn::Load(d, decay + i * a.key_pitch + key);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kBlock; ++j) {
      V y = write.load(d, j, key);
      const V own = kReadDecayed ? y : hn::Mul(y, hn::Load(d, a.u + key));
      V& diagonal = sum[kFirst + pair_of(j, j)];
      diagonal = hn::MulAdd(x[j], own, diagonal);
      OUZEL_UNROLL
      for (int i = j + 1; i < kBlock; ++i) {
        const V before = y;
        if constexpr (kDecay) y = hn::Mul(y, factor[i]);
        V& read = sum[kFirst + pair_of(i, j)];
        read = hn::MulAdd(x[i], kReadDecayed ? y : before, read);
        if constexpr (kErase) {
          sum[pair_of(i, j)] = hn::MulAdd(erase[i], kEraseDecayed ? y : before, sum[pair_of(i, j)]);
        }
      }
    }
  }
  sum_four(d, sum[0], sum[1], sum[2], sum[3], out);
  sum_four(d, sum[4], sum[5], sum[6], sum[7], out + 4);
  sum_four(d, sum[8], sum[9], sum[10], sum[11], out + 8);
  if constexpr (kErase) sum_four(d, sum[12], sum[13], sum[14], sum[15], out + 12);
}

BlockRows rows_of_block(const KeyRowsArgs& a, std::int64_t block) {
  const std::int64_t rows = block_rows(a.e.first != nullptr, a.b.first != nullptr);
  return {a.rows + block * rows * a.key_pitch, rows * kGroupKeys};
}
BlockRows other_query(const KeyRowsArgs& a, std::int64_t query, std::int64_t block) {
  return {a.other_queries + ((query - 1) * a.blocks + block) * kBlock * a.key_pitch,
          kBlock * kGroupKeys};
}

// Gathers the rows of a block and pairs them. `decay`: of the block's rows.
template <bool kDecay>
void pairs_of_block(const KeyRowsArgs& a, std::int64_t block, const float* decay) {
  const bool erase = a.e.first != nullptr;
  const std::int64_t row = block * kBlock, writers = a.b.first != nullptr ? 2 : 1;
  const BlockRows rows = rows_of_block(a, block);
  // Rows come from the caller's memory once.
  const auto first = [](bool wanted, const StridedRows& x, std::int64_t at) {
    return wanted ? x.at(at) : nullptr;
  };
  for (std::int64_t w = 0; w < writers; ++w) {
    float* out = a.pairs + (block * writers + w) * pairs_pitch(erase, a.queries);
    Input write = {(w == 0 ? a.k : a.b).at(row), (w == 0 ? a.k : a.b).stride, 1,
                   rows.kind(w == 0 ? 1 : 3)};
    std::int64_t r = 0;
    if (erase) {
      const Input e = {first(w == 0, a.e, row), a.e.stride, 1, rows.kind(2)};
      const Input q = {first(w == 0, a.q, row), a.q.stride, a.q_scale, rows};
      a.erase_decayed ? pairs_of<true, kDecay, true, true>(a, e, q, write, decay, out)
                      : pairs_of<true, kDecay, false, true>(a, e, q, write, decay, out);
      write.from = nullptr;
      r = 1;
    }
    for (; r < a.queries; ++r) {
      const StridedRows from = {a.q.first + r * a.query_stride, a.q.stride};
      const Input q = {first(w == 0, from, row), from.stride, a.q_scale,
                       r == 0 ? rows : other_query(a, r, block)};
      float* to = out + query_pairs(erase, r);
      a.u == nullptr ? pairs_of<false, kDecay, true, true>(a, {}, q, write, decay, to)
                     : pairs_of<false, kDecay, true, false>(a, {}, q, write, decay, to);
      write.from = nullptr;
    }
  }
}

// Which rows of a block there are, and which decays they get.
template <bool erase, bool general, bool erase_decayed, bool read_decayed>
struct Fold {
  // x_i *= factor_i
  static HWY_INLINE void scale(float* x, const V (&factor)[kBlock + 1], int first) {
    const D d;
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i, x += kGroupKeys) {
      hn::Store(hn::Mul(hn::Load(d, x), factor[first + i]), d, x);
    }
  }
  // Multiplies the rows of a block by what they get of the decays: reads what is left of the state
  // `from_start` after i + 1 decays (or i of them), writes `to_end`.
  static HWY_INLINE void rows(const KeyRowsArgs& a, std::int64_t block, const BlockRows& rows,
                              std::int64_t key, const V (&from_start)[kBlock + 1],
                              const V (&to_end)[kBlock + 1]) {
    float* x = rows.at(0, key);
    scale(x, from_start, read_decayed ? 1 : 0);
    scale(x += kBlock * kGroupKeys, to_end, 1);
    if (erase) scale(x += kBlock * kGroupKeys, from_start, erase_decayed ? 1 : 0);
    if (general) scale(x += kBlock * kGroupKeys, to_end, 1);
    for (std::int64_t r = 1; r < a.queries; ++r) {
      scale(other_query(a, r, block).at(0, key), from_start, read_decayed ? 1 : 0);
    }
  }
  static bool block(const KeyRowsArgs a, std::int64_t block);
  static float row_block(const KeyRowsArgs& a, std::int64_t block, float missing);
};

// 1 / x within an ulp, for normal x.
HWY_INLINE V reciprocal(D d, V x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Div(hn::Set(d, 1.0f), x);
#else
  V y = hn::ApproximateReciprocal(x);
  OUZEL_UNROLL
  for (int step = 0; step < (HWY_TARGET == HWY_AVX3 ? 1 : 2); ++step) {
    y = hn::MulAdd(y, hn::NegMulAdd(x, y, hn::Set(d, 1.0f)), y);
  }
  return y;
#endif
}

// math::exp of numbers that are not above 0, four side by side: one is a long chain of operations.
HWY_INLINE void exp_four(D d, V (&x)[kBlock]) {
  V n[kBlock], r[kBlock];
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    n[i] = math::reduce_by_ln2(d, math::at_least(d, hn::Set(d, -104.0f), x[i]), r[i]);
  }
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    x[i] = hn::Add(hn::Set(d, 1.0f), math::expm1_reduced(d, r[i]));
  }
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) x[i] = math::scale_by_pow2(d, x[i], n[i]);
}

// The decays of a chunk's rows, and the largest of their logarithms above 0. The last row's make up
// for what rounding did to those of the others, where all together are weak: 3e-8 a row, which adds
// up over many tokens where a decay is the same for all.
float decays_of(const KeyRowsArgs& a) {
  const D d;
  const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  V largest = zero;
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    V log = zero, product = one;
    for (std::int64_t block = 0; block < a.blocks; ++block) {
      V g[kBlock], x[kBlock];
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        g[i] = hn::LoadU(d, a.g.at(block * kBlock + i) + key);
        largest = math::at_least(d, g[i], largest);
        x[i] = g[i] = math::at_most(d, zero, g[i]);
      }
      exp_four(d, x);
      const V sum = hn::Add(hn::Add(g[0], g[1]), hn::Add(g[2], g[3]));
      log = hn::Add(log, sum);
      // Product by product, as they will be applied.
      OUZEL_UNROLL
      for (int i = 0; i < kBlock - 1; ++i) product = hn::Mul(product, x[i]);
      if (block + 1 == a.blocks) {
        const auto weak = hn::Gt(log, hn::Set(d, -1.0f));
        x[3] = hn::IfThenElse(weak, hn::Div(math::exp(d, log), product), x[3]);
      }
      product = hn::Mul(product, x[3]);
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        hn::Store(x[i], d, a.decay_rows + (block * kBlock + i) * a.key_pitch + key);
      }
    }
    if (a.total_minus_1 != nullptr) hn::Store(math::expm1(d, log), d, a.total_minus_1 + key);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Folds the decays of a block into its rows. Returns whether a decay may be 0. (The arguments by
// value: stores of floats could change what a reference names.)
template <bool erase, bool general, bool erase_decayed, bool read_decayed>
bool Fold<erase, general, erase_decayed, read_decayed>::block(const KeyRowsArgs a,
                                                              std::int64_t block) {
  const D d;
  const BlockRows rows = rows_of_block(a, block);
  const std::int64_t pitch = a.key_pitch;
  const float* decay = a.decay_rows + block * kBlock * pitch;
  float* leave = a.leave + block * pitch;
  const V one = hn::Set(d, 1.0f);
  const bool all_leave = block + 1 == a.blocks;
  const V bound = hn::Set(d, all_leave ? 2.0f : kLeast);
  auto any_leaves = hn::Gt(one, one), any_small = any_leaves;
  for (std::int64_t key = 0; key < pitch; key += kLanes) {
    V x[kBlock], from_start[kBlock + 1], to_end[kBlock + 1];
    from_start[0] = hn::Load(d, a.missing + key);
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      x[i] = hn::Load(d, decay + i * pitch + key);
      from_start[i + 1] = hn::Mul(from_start[i], x[i]);
    }
    const V missing = from_start[kBlock];
    const V product = hn::Mul(hn::Mul(x[0], x[1]), hn::Mul(x[2], x[3]));
    // What is not a number is neither large nor kept.
    const auto leaves = hn::Not(hn::Ge(missing, bound));
    any_leaves = hn::Or(any_leaves, leaves);
    any_small = hn::Or(any_small, hn::Not(hn::Gt(product, hn::Set(d, kSmallest))));
    hn::Store(hn::IfThenElse(leaves, missing, one), d, leave + key);
    hn::Store(hn::IfThenElse(leaves, one, missing), d, a.missing + key);
    to_end[kBlock] = hn::IfThenElse(leaves, one, reciprocal(d, missing));
    OUZEL_UNROLL
    for (int i = kBlock - 1; i > 0; --i) to_end[i] = hn::Mul(to_end[i + 1], x[i]);
    Fold::rows(a, block, rows, key, from_start, to_end);
  }
  a.leaves[block] = all_leave || !hn::AllFalse(d, any_leaves);
  return !hn::AllFalse(d, any_small);
}

// The same for a decay a row: factors of rows, and decays within the small matrices. Returns what
// the state lacks after the block.
template <bool erase, bool general, bool erase_decayed, bool read_decayed>
float Fold<erase, general, erase_decayed, read_decayed>::row_block(const KeyRowsArgs& a,
                                                                   std::int64_t block,
                                                                   float missing) {
  const D d;
  const float* x = a.decay + block * kBlock;
  V from_start[kBlock + 1], to_end[kBlock + 1];
  from_start[0] = hn::Set(d, missing);
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    missing *= x[i];
    from_start[i + 1] = hn::Set(d, missing);
  }
  const bool leaves = block + 1 == a.blocks || !(missing >= kLeast);
  a.leaves[block] = leaves;
  float end = leaves ? 1 : 1 / missing;
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    to_end[kBlock - i] = hn::Set(d, end);
    end *= x[kBlock - 1 - i];
  }
  const BlockRows rows = rows_of_block(a, block);
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    if (leaves) hn::Store(from_start[kBlock], d, a.leave + block * a.key_pitch + key);
    Fold::rows(a, block, rows, key, from_start, to_end);
  }
  const std::int64_t writers = general ? 2 : 1, pitch = pairs_pitch(erase, a.queries);
  for (int j = 0; j < kBlock; ++j) {
    float before = 1;
    for (int i = j + 1; i < kBlock; ++i) {
      const float after = before * x[i];
      for (std::int64_t w = 0; w < writers; ++w) {
        float* p = a.pairs + (block * writers + w) * pitch + pair_of(i, j);
        if (erase) *p *= erase_decayed ? after : before;
        for (std::int64_t r = 0; r < a.queries; ++r) {
          p[query_pairs(erase, r)] *= read_decayed ? after : before;
        }
      }
      before = after;
    }
  }
  return leaves ? 1 : missing;
}

template <bool erase, bool general, bool erase_decayed, bool read_decayed>
KeyRowsResult fold_all(const KeyRowsArgs& a) {
  using F = Fold<erase, general, erase_decayed, read_decayed>;
  KeyRowsResult result;
  if (a.g.first == nullptr) {
    float missing = 1;
    for (std::int64_t block = 0; block < a.blocks; ++block) {
      pairs_of_block<false>(a, block, nullptr);
      if (a.decay != nullptr) missing = F::row_block(a, block, missing);
    }
    return result;
  }
  const D d;
  result.largest_log = decays_of(a);
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    hn::Store(hn::Set(d, 1.0f), d, a.missing + key);
  }
  for (std::int64_t block = 0; block < a.blocks; ++block) {
    pairs_of_block<true>(a, block, a.decay_rows + block * kBlock * a.key_pitch);
    result.resets = F::block(a, block) || result.resets;
  }
  return result;
}

}  // namespace

KeyRowsResult FoldKeyRows(const KeyRowsArgs& a) {
  if (a.b.first != nullptr) {
    return a.erase_decayed ? fold_all<true, true, true, true>(a)
                           : fold_all<true, true, false, true>(a);
  }
  if (a.e.first != nullptr) {
    return a.erase_decayed ? fold_all<true, false, true, true>(a)
                           : fold_all<true, false, false, true>(a);
  }
  return a.u == nullptr ? fold_all<false, false, false, true>(a)
                        : fold_all<false, false, false, false>(a);
}

bool DecayFactors(std::int64_t count, const float* g, float* factor) {
  const D d;
  auto zero = hn::Lt(hn::Zero(d), hn::Zero(d));
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V y = math::exp(d, load_first(d, g + i, count - i));
    zero = hn::Or(zero, hn::Eq(y, hn::Zero(d)));
    store_first(d, y, factor + i, count - i);
  }
  return !hn::AllFalse(d, zero);
}

void DecayMinus1(std::int64_t count, const float* g, float* factor_minus_1) {
  const D d;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    store_first(d, math::expm1(d, load_first(d, g + i, count - i)), factor_minus_1 + i, count - i);
  }
}

bool AllFinite(std::int64_t count, const float* x) {
  const D d;
  constexpr std::int64_t kChains = 4;  // one would be waited for
  V sum[kChains];
  OUZEL_UNROLL
  for (int i = 0; i < kChains; ++i) sum[i] = hn::Zero(d);
  const auto add = [&](V& to, V y) HWY_ATTR { to = hn::Add(to, hn::Sub(y, y)); };
  std::int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    OUZEL_UNROLL
    for (int j = 0; j < kChains; ++j) add(sum[j], hn::LoadU(d, x + i + j * kLanes));
  }
  for (; i < count; i += kLanes) add(sum[0], load_first(d, x + i, count - i));
  const V all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return hn::AllTrue(d, hn::Eq(all, all));
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(FoldKeyRows);
HWY_EXPORT(DecayFactors);
HWY_EXPORT(DecayMinus1);
HWY_EXPORT(AllFinite);
KeyRowsResult fold_key_rows(Isa isa, const KeyRowsArgs& args) {
  return OUZEL_DISPATCH(isa, FoldKeyRows)(args);
}
bool decay_factors(Isa isa, std::int64_t count, const float* g, float* factor) {
  return OUZEL_DISPATCH(isa, DecayFactors)(count, g, factor);
}
void decay_minus_1(Isa isa, std::int64_t count, const float* g, float* factor_minus_1) {
  OUZEL_DISPATCH(isa, DecayMinus1)(count, g, factor_minus_1);
}
bool all_finite(Isa isa, std::int64_t count, const float* x) {
  return OUZEL_DISPATCH(isa, AllFinite)(count, x);
}
}  // namespace ouzel
#endif
