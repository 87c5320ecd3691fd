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

// The pairs of a block of rows that write with those that read it: the erase's and the first
// query's in one go, or a query's alone. `u`: on the diagonal; q reads before the decay.
template <bool kErase, bool kDecay, bool kEraseDecayed, bool kReadDecayed>
void pairs_of(const KeyRowsArgs& a, const float* e, const float* q, const float* write,
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
      x[i] = hn::Load(d, q + i * a.key_pitch + key);
      if constexpr (kErase) erase[i] = hn::Load(d, e + i * a.key_pitch + key);
      if constexpr (kDecay) factor[i] = hn::Load(d, decay + i * a.key_pitch + key);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kBlock; ++j) {
      V y = hn::Load(d, write + j * a.key_pitch + key);
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

// `decay`: of the block's rows.
template <bool kDecay>
void pairs_of_block(const KeyRowsArgs& a, std::int64_t block, const float* decay) {
  const bool erase = a.e != nullptr;
  const std::int64_t offset = block * kBlock * a.key_pitch, writers = a.b != nullptr ? 2 : 1;
  for (std::int64_t w = 0; w < writers; ++w) {
    const float* write = (w == 0 ? a.k : a.b) + offset;
    float* out = a.pairs + (block * writers + w) * pairs_pitch(erase, a.queries);
    std::int64_t r = 0;
    if (erase) {
      const float *e = a.e + offset, *q = a.q + offset;
      a.erase_decayed ? pairs_of<true, kDecay, true, true>(a, e, q, write, decay, out)
                      : pairs_of<true, kDecay, false, true>(a, e, q, write, decay, out);
      r = 1;
    }
    for (; r < a.queries; ++r) {
      const float* q = a.q + r * a.query_stride + offset;
      float* to = out + query_pairs(erase, r);
      a.u == nullptr ? pairs_of<false, kDecay, true, true>(a, nullptr, q, write, decay, to)
                     : pairs_of<false, kDecay, true, false>(a, nullptr, q, write, decay, to);
    }
  }
}

// to_i = from_i * factor_i
HWY_INLINE void scale_rows(D d, const float* from, float* to, std::int64_t pitch, const V* factor) {
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    hn::Store(hn::Mul(hn::Load(d, from + i * pitch), factor[i]), d, to + i * pitch);
  }
}

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

// The last row's decays make up for what rounding did to those of the others, whose logarithms sum
// to `log` with its own, where all together are weak: 3e-8 a row, which adds up over many tokens
// where a decay is the same for all.
void settle(const KeyRowsArgs& a, const float* log) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const std::int64_t others = a.blocks * kBlock - 1;
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    V product = one;
    for (std::int64_t i = 0; i < others; ++i) {
      product = hn::Mul(product, hn::Load(d, a.g + i * a.key_pitch + key));
    }
    float* last = a.g + others * a.key_pitch + key;
    const V sum = hn::Load(d, log + key);
    const V settled = hn::Div(math::exp(d, sum), product);
    const auto weak = hn::Gt(sum, hn::Set(d, -1.0f));
    hn::Store(hn::IfThenElse(weak, settled, hn::Load(d, last)), d, last);
  }
}

// Folds the decays of a block into its rows. Returns whether a decay may be 0. (The arguments by
// value: stores of floats could change what a reference names.)
bool fold_block(const KeyRowsArgs a, std::int64_t block) {
  const D d;
  const std::int64_t pitch = a.key_pitch, offset = block * kBlock * pitch;
  const float* decay = a.g + offset;
  const V one = hn::Set(d, 1.0f);
  // Of products that are not above a bound, or not a number.
  auto vanishes = hn::Lt(one, one), is_least = vanishes;
  for (std::int64_t key = 0; key < pitch; key += kLanes) {
    const float* x = decay + key;
    const V product = hn::Mul(hn::Mul(hn::Load(d, x), hn::Load(d, x + pitch)),
                              hn::Mul(hn::Load(d, x + 2 * pitch), hn::Load(d, x + 3 * pitch)));
    const V missing = hn::Mul(product, hn::Load(d, a.missing + key));
    vanishes = hn::Or(vanishes, hn::Not(hn::Gt(product, hn::Set(d, kSmallest))));
    is_least = hn::Or(is_least, hn::Not(hn::Gt(missing, hn::Set(d, kLeast))));
  }
  const bool leaves = !a.fold || block + 1 == a.blocks || !hn::AllFalse(d, is_least);
  a.leaves[block] = leaves;
  for (std::int64_t key = 0; key < pitch; key += kLanes) {
    const std::int64_t at = offset + key;
    V x[kBlock], from_start[kBlock + 1], to_end[kBlock];
    from_start[0] = hn::Load(d, a.missing + key);
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      x[i] = hn::Load(d, decay + i * pitch + key);
      from_start[i + 1] = hn::Mul(from_start[i], x[i]);
    }
    if (leaves) {
      to_end[3] = one;
      hn::Store(from_start[4], d, a.leave + block * pitch + key);
      hn::Store(one, d, a.missing + key);
    } else {
      to_end[3] = reciprocal(d, from_start[4]);
      hn::Store(from_start[4], d, a.missing + key);
    }
    OUZEL_UNROLL
    for (int i = kBlock - 1; i-- > 0;) to_end[i] = hn::Mul(to_end[i + 1], x[i + 1]);
    // The erase first: its rows may be those of k.
    if (a.e != nullptr) {
      scale_rows(d, a.e + at, a.e_folded + at, pitch, from_start + (a.erase_decayed ? 1 : 0));
    }
    scale_rows(d, a.k + at, a.k + at, pitch, to_end);
    if (a.b != nullptr) scale_rows(d, a.b + at, a.b + at, pitch, to_end);
    for (std::int64_t r = 0; r < a.queries; ++r) {
      float* q = a.q + r * a.query_stride + at;
      scale_rows(d, q, q, pitch, from_start + (a.u == nullptr ? 1 : 0));
    }
  }
  return !hn::AllFalse(d, vanishes);
}

// The same for a decay a row: factors of rows, and decays within the small matrices.
void fold_row_decays(const KeyRowsArgs& a) {
  const bool erase = a.e != nullptr;
  float missing = 1;
  for (std::int64_t block = 0; block < a.blocks; ++block) {
    const float* x = a.decay + block * kBlock;
    float from_start[kBlock + 1] = {missing};
    for (int i = 0; i < kBlock; ++i) from_start[i + 1] = from_start[i] * x[i];
    missing = from_start[kBlock];
    const bool leaves = !a.fold || block + 1 == a.blocks || !(missing >= kLeast);
    a.leaves[block] = leaves;
    a.leave[block] = missing;
    float to_end = leaves ? 1 : 1 / missing;
    if (leaves) missing = 1;
    for (int i = kBlock; i-- > 0;) {
      const std::int64_t row = block * kBlock + i;
      a.erase_factor[row] = from_start[i + (a.erase_decayed ? 1 : 0)];
      a.read_factor[row] = from_start[i + (a.u == nullptr ? 1 : 0)];
      a.write_factor[row] = to_end;
      to_end *= x[i];
    }
    const std::int64_t writers = a.b != nullptr ? 2 : 1, pitch = pairs_pitch(erase, a.queries);
    for (int j = 0; j < kBlock; ++j) {
      float before = 1;
      for (int i = j + 1; i < kBlock; ++i) {
        const float after = before * x[i];
        for (std::int64_t w = 0; w < writers; ++w) {
          float* p = a.pairs + (block * writers + w) * pitch + pair_of(i, j);
          if (erase) *p *= a.erase_decayed ? after : before;
          for (std::int64_t r = 0; r < a.queries; ++r) {
            p[query_pairs(erase, r)] *= a.u == nullptr ? after : before;
          }
        }
        before = after;
      }
    }
  }
}

}  // namespace

bool FoldKeyRows(const KeyRowsArgs& a) {
  if (a.g == nullptr) {
    for (std::int64_t block = 0; block < a.blocks; ++block) {
      pairs_of_block<false>(a, block, nullptr);
    }
    if (a.decay != nullptr) fold_row_decays(a);
    return false;
  }
  const D d;
  float* log = a.missing + a.key_pitch;
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    hn::Store(hn::Set(d, 1.0f), d, a.missing + key);
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < a.blocks * kBlock; ++i) {
      sum = hn::Add(sum, hn::Load(d, a.g + i * a.key_pitch + key));
    }
    hn::Store(sum, d, log + key);
  }
  bool vanishes = false;
  const std::int64_t block_size = kBlock * a.key_pitch;
  for (std::int64_t block = 0; block < a.blocks; ++block) {
    // Exponentials are long chains of operations: many at a time hide that.
    constexpr std::int64_t kTogether = 4;
    if (block % kTogether == 0) {
      float* g = a.g + block * block_size;
      const std::int64_t count = HWY_MIN(a.blocks - block, kTogether) * block_size;
      for (std::int64_t i = 0; i < count; i += kLanes) {
        hn::Store(math::exp(d, hn::Load(d, g + i)), d, g + i);
      }
    }
    if (block + 1 == a.blocks) settle(a, log);
    pairs_of_block<true>(a, block, a.g + block * block_size);
    vanishes = fold_block(a, block) || vanishes;
  }
  return vanishes;
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
  V sum = hn::Zero(d);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V y = load_first(d, x + i, count - i);
    sum = hn::Add(sum, hn::Sub(y, y));
  }
  return hn::AllTrue(d, hn::Eq(sum, sum));
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
bool fold_key_rows(Isa isa, const KeyRowsArgs& args) {
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
