// Rows on their way into packed scratch, a vector at a time: the feature maps that act on each
// number alone, the stores into the keyed layout (recurrence.h), and the pieces of a chunk that is
// packed beside arithmetic.

// Per-target include guard.
#if defined(OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#undef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#else
#define OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/recurrence.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// elu(x) + 1: within 4e-7 for the results above 1e-8, 2e-6 below (thrice that without fused
// operations); NaN for NaN. It shares the ports of the tile's arithmetic, so it is made of few
// instructions: n = x log2(e) rounded by adding 1.5 * 2^23, and 2^f of |f| <= 1/2 from a polynomial
// (relative error 1.5e-7).
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec elu1(Tag d, Vec x) {
#if HWY_TARGET == HWY_AVX3
  const Vec low = hn::Max(x, hn::Set(d, -87.0f));  // -87 for NaN
#else
  const Vec low = hn::Min(hn::Max(x, hn::Set(d, -87.0f)), hn::Zero(d));
#endif
  const Vec log2e = hn::Set(d, 1.44269504089f), round = hn::Set(d, 12582912.0f);
  const Vec rounded = hn::MulAdd(low, log2e, round), n = hn::Sub(rounded, round);
  const Vec f = hn::MulSub(low, log2e, n);
  Vec p = hn::Set(d, 1.327647217e-03f);
  p = hn::MulAdd(p, f, hn::Set(d, 9.675541331e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550713273e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402211972e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931469671e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const Vec linear = hn::Add(x, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3
  const Vec power{_mm512_scalef_ps(p.raw, n.raw)};
  return hn::IfThenElse(hn::Le(x, hn::Zero(d)), power, linear);
#else
  // The larger one, since exp(x) >= 1 + x; 2^n comes from the bits of `rounded`.
  const hn::RebindToSigned<Tag> di;
  const auto bits = hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, rounded)));
  return math::at_least(d, hn::BitCast(d, bits), linear);
#endif
}

template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec mapped(Tag d, Vec x) {
  if constexpr (kMap == ElementMap::kElu1) {
    return elu1(d, x);
  } else if constexpr (kMap == ElementMap::kRelu) {
    return math::at_least(d, hn::Zero(d), x);
  } else {
    return x;
  }
}

// Stores keys that are read (q) and written (k) into the keyed array at `out`.
template <bool kRead, bool kWrite, class D, class Vec = hn::Vec<D>>
HWY_INLINE void store_keyed(D d, Vec q, Vec k, float* out) {
#if HWY_TARGET == HWY_AVX3
  // Two blocks of 8. Stores of halves: joining q and k would take a port from the arithmetic.
  const hn::Half<D> dh;
  float* next = out + kKeyedBlockPitch;
  if constexpr (kRead) {
    hn::Store(hn::LowerHalf(dh, q), dh, out);
    hn::Store(hn::UpperHalf(dh, q), dh, next);
  }
  if constexpr (kWrite) {
    hn::Store(hn::LowerHalf(dh, k), dh, out + kKeyBlock);
    hn::Store(hn::UpperHalf(dh, k), dh, next + kKeyBlock);
  }
#else
  if constexpr (kRead) hn::Store(q, d, out);
  if constexpr (kWrite) hn::Store(k, d, out + kKeyBlock);
#endif
}

// The next piece of a chunk that is packed meanwhile.
template <ElementMap kMap>
HWY_INLINE void pack_piece(const PackAhead& p, std::int64_t token, std::int64_t piece) {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  constexpr std::int64_t kLanes = HWY_LANES(float);
  constexpr std::int64_t kStoreLead = 2;  // tokens
  const D d;
  const std::int64_t later = HWY_MIN(token + p.prefetch_rows, p.last_row);
  if (piece < p.key_pieces) {
    const std::int64_t key = piece * kKeyedPitch;
    const float* q = p.q + token * p.q_stride + key;
    const float* k = p.k + token * p.k_stride + key;
    __builtin_prefetch(p.q + later * p.q_stride + key, 0, 2);
    __builtin_prefetch(p.k + later * p.k_stride + key, 0, 2);
    float* out = p.keyed + piece * 2 * kKeyedBlockPitch + token * kKeyedPitch;
    // Stores wait for their lines one by one: 2 % of the time.
    __builtin_prefetch(out + kStoreLead * kKeyedPitch, 0, 3);
    __builtin_prefetch(out + kStoreLead * kKeyedPitch + kKeyedBlockPitch, 0, 3);
    OUZEL_UNROLL
    for (std::int64_t i = 0; i < kKeyedPitch; i += kLanes) {
      const V x = mapped<kMap>(d, hn::LoadU(d, q + i));
      V y = mapped<kMap>(d, hn::LoadU(d, k + i));
      if (p.k_factor != nullptr) y = hn::Mul(y, hn::Set(d, p.k_factor[token]));
      store_keyed<true, true>(d, x, y, out + i / kKeyBlock * kKeyedBlockPitch + i % kKeyBlock);
      if (p.z != nullptr) {
        float* residue = p.z_residue + key + i;
        float* part = p.den_parts + token * kLanes;
        const V recent = hn::Add(hn::Load(d, residue), y);
        hn::Store(recent, d, residue);
        const V z = hn::Add(hn::Load(d, p.z + key + i), recent);
        hn::Store(hn::MulAdd(x, z, hn::Load(d, part)), d, part);
      }
    }
  } else {
    const std::int64_t slab = piece - p.key_pieces;
    const float* v = p.v + token * p.v_stride + slab * kSlab;
    const float* after = p.v + later * p.v_stride + slab * kSlab;
    __builtin_prefetch(after, 0, 2);
    __builtin_prefetch(after + kSlab / 2, 0, 2);
    float* out = p.slabbed + slab * kSlabPitch + token * kSlab;
    __builtin_prefetch(out + kStoreLead * kSlab, 0, 3);
    __builtin_prefetch(out + kStoreLead * kSlab + kSlab / 2, 0, 3);
    OUZEL_UNROLL
    for (std::int64_t i = 0; i < kSlab; i += kLanes) {
      hn::Store(hn::LoadU(d, v + i), d, out + i);
    }
  }
}

// What is done beside the arithmetic.
enum class Beside { kPrefetch, kPack, kPackElu1, kPackRelu };

// Packs a piece, and goes on to the next.
template <Beside kBeside>
HWY_INLINE void pack_next(const PackAhead& p, std::int64_t& token, std::int64_t& piece) {
  pack_piece<kBeside == Beside::kPackElu1   ? ElementMap::kElu1
             : kBeside == Beside::kPackRelu ? ElementMap::kRelu
                                            : ElementMap::kIdentity>(p, token, piece);
  if (++piece == p.key_pieces + p.value_pieces) {
    piece = 0;
    ++token;
  }
}

// Calls tile.operator()<Beside>() with what is left to do.
template <class Tile>
HWY_INLINE void with_beside(const Meanwhile* m, const Tile& tile) {
  if (m == nullptr || m->pack.token == m->pack.tokens) {
    return tile.template operator()<Beside::kPrefetch>();
  }
  switch (m->pack.map) {
    case ElementMap::kIdentity:
      return tile.template operator()<Beside::kPack>();
    case ElementMap::kElu1:
      return tile.template operator()<Beside::kPackElu1>();
    case ElementMap::kRelu:
      return tile.template operator()<Beside::kPackRelu>();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
