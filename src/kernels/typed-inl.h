// Vectors of float32 from and to memory of any type of floats.

// Per-target include guard.
#if defined(OUZEL_KERNELS_TYPED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_TYPED_INL_H_
#undef OUZEL_KERNELS_TYPED_INL_H_
#else
#define OUZEL_KERNELS_TYPED_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "src/base/half.h"
#include "src/kernels/partial-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The first n of a vector of floats as float32, zeros beyond them. Highway's own conversion of
// float16, where the processor has none, knows no infinities and loses the sign of zeros.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LoadFirst(D d, const float* p, int64_t n) {
  return load_first(d, p, n);
}
// Apart: what has few numbers is rare, and its loop would be unrolled wherever it stands.
template <class From, class To>
HWY_NOINLINE void CopyFew(const From* from, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}
#if HWY_TARGET != HWY_AVX3 && HWY_TARGET != HWY_AVX2
inline HWY_NOINLINE void WidenFew(const Float16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
inline HWY_NOINLINE void NarrowFew(const float* from, int64_t n, Float16* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_f16(from[i]);
}
#endif
template <class D, class Element>
HWY_INLINE auto LoadBits(D d, const Element* p, int64_t n) {
  const hn::Rebind<uint16_t, D> d16;
  if (n >= static_cast<int64_t>(hn::Lanes(d))) return hn::LoadU(d16, &p->bits);
  HWY_ALIGN uint16_t bits[HWY_MAX_BYTES / sizeof(float)] = {};
  CopyFew(&p->bits, n, bits);
  return hn::Load(d16, bits);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LoadFirst(D d, const BFloat16* p, int64_t n) {
  const hn::Rebind<uint32_t, D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, LoadBits(d, p, n))));
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LoadFirst(D d, const Float16* p, int64_t n) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), LoadBits(d, p, n)));
#else
  HWY_ALIGN float lane[HWY_MAX_BYTES / sizeof(float)] = {};
  WidenFew(p, HWY_MIN(n, static_cast<int64_t>(hn::Lanes(d))), lane);
  return hn::Load(d, lane);
#endif
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreFirst(D d, V x, float* p, int64_t n) {
  store_first(d, x, p, n);
}
template <class D, class V16, class Element>
HWY_INLINE void StoreBits(D d, V16 x, Element* p, int64_t n) {
  const hn::Rebind<uint16_t, D> d16;
  if (n >= static_cast<int64_t>(hn::Lanes(d))) return hn::StoreU(x, d16, &p->bits);
  HWY_ALIGN uint16_t bits[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(x, d16, bits);
  CopyFew(bits, n, &p->bits);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreFirst(D d, V x, BFloat16* p, int64_t n) {
  const hn::Rebind<uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, x);
  // To nearest, ties to even: half of the last place kept, less one where that is even.
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(hn::Set(d32, 0x7fffu), odd));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000u));
  const auto nan = hn::RebindMask(d32, hn::Not(hn::Eq(x, x)));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
  StoreBits(d, hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::BitCast(hn::RebindToSigned<D>(), upper)),
            p, n);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreFirst(D d, V x, Float16* p, int64_t n) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  const auto half = hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), x);
  StoreBits(d, hn::BitCast(hn::Rebind<uint16_t, D>(), half), p, n);
#else
  HWY_ALIGN float lane[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(x, d, lane);
  NarrowFew(lane, HWY_MIN(n, static_cast<int64_t>(hn::Lanes(d))), p);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // OUZEL_KERNELS_TYPED_INL_H_
