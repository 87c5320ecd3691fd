// A loop over n numbers in vectors whose tail runs the same body on its first lanes only: nothing
// beyond n is read or written.
#if defined(OUZEL_KERNELS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_LANES_INL_H_
#undef OUZEL_KERNELS_LANES_INL_H_
#else
#define OUZEL_KERNELS_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"

#include "src/kernels/typed-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Memory holds the vectors' own type, or (of float32) bfloat16 or float16.
struct AllLanes {
  template <class D, class Element>
  HWY_INLINE hn::Vec<D> Load(D d, const Element* p) const {
    if constexpr (std::is_same_v<Element, hn::TFromD<D>>) {
      return hn::LoadU(d, p);
    } else {
      return LoadFirst(d, p, static_cast<int64_t>(hn::Lanes(d)));
    }
  }
  template <class D, class Element>
  HWY_INLINE void Store(hn::Vec<D> v, D d, Element* p) const {
    if constexpr (std::is_same_v<Element, hn::TFromD<D>>) {
      hn::StoreU(v, d, p);
    } else {
      StoreFirst(d, v, p, static_cast<int64_t>(hn::Lanes(d)));
    }
  }
  // Vectors side by side; past the caches if `stream`, where p then begins a cache line, and they
  // fill lines. Half a line leaves its write-combining buffer as soon as loads need one, and costs
  // four times a whole one (measured on Zen 3), so nothing else may come between its stores.
  template <class D, std::size_t kCount, class Element>
  HWY_INLINE void Output(const hn::Vec<D> (&v)[kCount], D d, Element* p, bool stream) const {
    constexpr std::size_t kLanes = hn::MaxLanes(D());
    constexpr bool kWholeLines = kCount * kLanes * sizeof(Element) % 64 == 0;
    if constexpr (kWholeLines && std::is_same_v<Element, hn::TFromD<D>>) {
      if (stream) {
        OUZEL_UNROLL
        for (std::size_t j = 0; j < kCount; ++j) hn::Stream(v[j], d, p + j * kLanes);
        return;
      }
    }
    OUZEL_UNROLL
    for (std::size_t j = 0; j < kCount; ++j) Store(v[j], d, p + j * kLanes);
  }
  template <class D, class Element>
  HWY_INLINE void Output(hn::Vec<D> v, D d, Element* p, bool stream) const {
    const hn::Vec<D> one[1] = {v};
    Output(one, d, p, stream);
  }
};

// Lanes from `count` on are loaded as 0.
struct FirstLanes {
  size_t count;
  template <class D, class Element>
  HWY_INLINE hn::Vec<D> Load(D d, const Element* p) const {
    if constexpr (std::is_same_v<Element, hn::TFromD<D>>) {
      return hn::MaskedLoad(hn::FirstN(d, count), d, p);
    } else {
      return LoadFirst(d, p, static_cast<int64_t>(count));
    }
  }
  template <class D, class Element>
  HWY_INLINE void Store(hn::Vec<D> v, D d, Element* p) const {
    if constexpr (std::is_same_v<Element, hn::TFromD<D>>) {
      hn::BlendedStore(v, hn::FirstN(d, count), d, p);
    } else {
      StoreFirst(d, v, p, static_cast<int64_t>(count));
    }
  }
  template <class D, class Element>
  HWY_INLINE void Output(hn::Vec<D> v, D d, Element* p, bool) const {
    Store(v, d, p);
  }
  template <class D, class Element>
  HWY_INLINE void Output(const hn::Vec<D> (&v)[1], D d, Element* p, bool) const {
    Store(v[0], d, p);
  }
};

// body(i, lanes) for i = 0, L, 2L, ... of vectors of L lanes.
template <class D, class Body>
HWY_INLINE void ForVectors(D d, int64_t n, Body body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, AllLanes());
  if (i < n) body(i, FirstLanes{static_cast<size_t>(n - i)});
}

// The same of kCount vectors at a time, and of single ones where fewer are left: body(i, lanes,
// count), count a constant.
template <int kCount, class D, class Body>
HWY_INLINE void ForGroups(D d, int64_t n, Body body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + kCount * lanes <= n; i += kCount * lanes) {
    body(i, AllLanes(), std::integral_constant<int, kCount>());
  }
  constexpr std::integral_constant<int, 1> kOne;
  for (; i + lanes <= n; i += lanes) body(i, AllLanes(), kOne);
  if (i < n) body(i, FirstLanes{static_cast<size_t>(n - i)}, kOne);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
