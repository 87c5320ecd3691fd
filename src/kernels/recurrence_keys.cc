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
// A factor that the state lacks stays above this, so that its reciprocal is harmless.
constexpr float kLeast = 0x1p-60f;

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

// The pairs of one reader and one writer in a block; `decay` are the block's own, or null.
template <bool kDecay, bool kReadDecayed, bool kDiagonal>
void pairs_of(const float* read, const float* write, const float* decay, const float* u,
              std::int64_t pitch, float* out) {
  const D d;
  V sum[12];
  OUZEL_UNROLL
  for (int p = 0; p < 12; ++p) sum[p] = hn::Zero(d);
  for (std::int64_t key = 0; key < pitch; key += kLanes) {
    V x[kBlock], a[kBlock];
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      x[i] = hn::Load(d, read + i * pitch + key);
      if constexpr (kDecay) a[i] = hn::Load(d, decay + i * pitch + key);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kBlock; ++j) {
      V y = hn::Load(d, write + j * pitch + key);
      if constexpr (kDiagonal) {
        const V own = u != nullptr ? hn::Mul(y, hn::Load(d, u + key)) : y;
        sum[pair_of(j, j)] = hn::MulAdd(x[j], own, sum[pair_of(j, j)]);
      }
      OUZEL_UNROLL
      for (int i = j + 1; i < kBlock; ++i) {
        if constexpr (kDecay && kReadDecayed) y = hn::Mul(y, a[i]);
        sum[pair_of(i, j)] = hn::MulAdd(x[i], y, sum[pair_of(i, j)]);
        if constexpr (kDecay && !kReadDecayed) y = hn::Mul(y, a[i]);
      }
    }
  }
  sum_four(d, sum[0], sum[1], sum[2], sum[3], out);
  sum_four(d, sum[4], sum[5], sum[6], sum[7], out + 4);
  if constexpr (kDiagonal) sum_four(d, sum[8], sum[9], sum[10], sum[11], out + 8);
}

template <bool kDecay>
void pairs_of_block(const KeyRowsArgs& a, std::int64_t block) {
  const std::int64_t offset = block * kBlock * a.key_pitch;
  const std::int64_t writers = a.b != nullptr ? 2 : 1, readers = (a.e != nullptr) + a.queries;
  float* out = a.pairs + block * readers * writers * kPairs;
  const float* decay = kDecay ? a.decay + offset : nullptr;
  const float* write[2] = {a.k + offset, a.b != nullptr ? a.b + offset : nullptr};
  if (a.e != nullptr) {
    for (std::int64_t w = 0; w < writers; ++w, out += kPairs) {
      a.erase_decayed
          ? pairs_of<kDecay, true, false>(a.e + offset, write[w], decay, nullptr, a.key_pitch, out)
          : pairs_of<kDecay, false, false>(a.e + offset, write[w], decay, nullptr, a.key_pitch,
                                           out);
    }
  }
  for (std::int64_t r = 0; r < a.queries; ++r) {
    const float* q = a.q + r * a.query_stride + offset;
    for (std::int64_t w = 0; w < writers; ++w, out += kPairs) {
      a.u == nullptr ? pairs_of<kDecay, true, true>(q, write[w], decay, nullptr, a.key_pitch, out)
                     : pairs_of<kDecay, false, true>(q, write[w], decay, a.u, a.key_pitch, out);
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

void fold_block(const KeyRowsArgs& a, std::int64_t block) {
  const D d;
  const std::int64_t offset = block * kBlock * a.key_pitch;
  const float* decay = a.decay + offset;
  const V one = hn::Set(d, 1.0f);
  bool leaves = !a.fold || block + 1 == a.blocks;
  if (!leaves) {
    V least = one;
    for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
      V p = hn::Load(d, a.missing + key);
      OUZEL_UNROLL
      for (int i = 0; i < kBlock; ++i) p = hn::Mul(p, hn::Load(d, decay + i * a.key_pitch + key));
      least = hn::Min(least, p);
    }
    leaves = !hn::AllFalse(d, hn::Lt(least, hn::Set(d, kLeast)));
  }
  a.leaves[block] = leaves;
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    const std::int64_t at = offset + key;
    V x[kBlock];
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) x[i] = hn::Load(d, decay + i * a.key_pitch + key);
    V from_start[kBlock + 1];
    from_start[0] = hn::Load(d, a.missing + key);
    OUZEL_UNROLL
    for (int i = 0; i < kBlock; ++i) from_start[i + 1] = hn::Mul(from_start[i], x[i]);
    V to_end[kBlock];
    if (leaves) {
      to_end[3] = one;
      hn::Store(from_start[4], d, a.leave + block * a.key_pitch + key);
      hn::Store(one, d, a.missing + key);
    } else {
      to_end[3] = hn::Div(one, from_start[4]);
      hn::Store(from_start[4], d, a.missing + key);
    }
    OUZEL_UNROLL
    for (int i = kBlock - 1; i-- > 0;) to_end[i] = hn::Mul(to_end[i + 1], x[i + 1]);
    scale_rows(d, a.k + at, a.k_folded + at, a.key_pitch, to_end);
    if (a.b != nullptr) scale_rows(d, a.b + at, a.b_folded + at, a.key_pitch, to_end);
    if (a.e != nullptr) {
      scale_rows(d, a.e + at, a.e_folded + at, a.key_pitch, from_start + (a.erase_decayed ? 1 : 0));
    }
    for (std::int64_t r = 0; r < a.queries; ++r) {
      scale_rows(d, a.q + r * a.query_stride + at, a.q_folded + r * a.folded_query_stride + at,
                 a.key_pitch, from_start + (a.u == nullptr ? 1 : 0));
    }
  }
}

}  // namespace

void FoldKeyRows(const KeyRowsArgs& a) {
  if (a.decay == nullptr) {
    for (std::int64_t block = 0; block < a.blocks; ++block) pairs_of_block<false>(a, block);
    return;
  }
  const D d;
  for (std::int64_t key = 0; key < a.key_pitch; key += kLanes) {
    hn::Store(hn::Set(d, 1.0f), d, a.missing + key);
  }
  for (std::int64_t block = 0; block < a.blocks; ++block) {
    pairs_of_block<true>(a, block);
    fold_block(a, block);
  }
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
void fold_key_rows(Isa isa, const KeyRowsArgs& args) { OUZEL_DISPATCH(isa, FoldKeyRows)(args); }
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
