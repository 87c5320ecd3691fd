#include "src/kernels/law_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/law_rows.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/typed-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows that are fetched ahead: rows of a head are pages apart, where the processor foresees nothing
// (3 times slower); more than eight would evict each other from the first-level cache.
constexpr int64_t kRowsAhead = 8;
// Vectors of a cache line of floats.
constexpr int kLineVectors = HWY_MAX(16 / HWY_LANES(float), 1);

// body(i, count) for the vectors of a row, of `count` lanes; line(i) before those of a line.
template <class Line, class Body>
HWY_INLINE void ForVectors(int64_t size, Line line, Body body) {
  constexpr int64_t kLanes = HWY_LANES(float), kLine = kLineVectors * kLanes;
  int64_t i = 0;
  for (; i + kLine <= size; i += kLine) {
    line(i);
    OUZEL_UNROLL
    for (int j = 0; j < kLineVectors; ++j) body(i + j * kLanes, kLanes);
  }
  if (i == size) return;
  line(i);
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, size - i);
}

template <class Element>
HWY_INLINE void LoadRowsOf(const LoadRowsArgs& a) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  const auto factor = hn::Set(d, a.factor);
  const auto* from = static_cast<const Element*>(a.from);
  // What is stored might change the arguments.
  const int64_t size = a.size, pitch = a.pitch;
  for (int64_t r = 0; r < a.rows; ++r) {
    const Element* x = from + r * a.stride;
    const Element* ahead = from + HWY_MIN(r + kRowsAhead, a.rows - 1) * a.stride;
    float* to = a.to + r * a.every * pitch;
    if (pitch == 1) {
      if constexpr (sizeof(Element) == sizeof(float)) {
        *to = a.factor * *x;
      } else {
        *to = hn::GetLane(hn::Mul(factor, LoadFirst(d, x, 1)));
      }
      continue;
    }
    ForVectors(
        size, [&](int64_t i) HWY_ATTR { __builtin_prefetch(ahead + i); },
        [&](int64_t i, int64_t count)
            HWY_ATTR { hn::StoreU(hn::Mul(factor, LoadFirst(d, x + i, count)), d, to + i); });
    for (int64_t i = (size + kLanes - 1) / kLanes * kLanes; i < pitch; i += kLanes) {
      hn::StoreU(hn::Zero(d), d, to + i);
    }
  }
}

template <bool kAdd, class Element>
HWY_INLINE void StoreRowsOf(const StoreRowsArgs& a) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  const auto factor = hn::Set(d, a.factor);
  const int64_t size = a.size;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.from + r * a.every * a.pitch;
    Element* to = static_cast<Element*>(a.to) + r * a.stride;
    if constexpr (sizeof(Element) == sizeof(float) && !kAdd) {
      if (a.stream) {
        for (int64_t i = 0; i < size; i += kLanes) {
          hn::Stream(hn::Mul(factor, hn::LoadU(d, x + i)), d, to + i);
        }
        continue;
      }
    }
    const Element* ahead =
        static_cast<Element*>(a.to) + HWY_MIN(r + kRowsAhead, a.rows - 1) * a.stride;
    ForVectors(
        size, [&](int64_t i) HWY_ATTR { __builtin_prefetch(ahead + i, 1); },
        [&](int64_t i, int64_t count) HWY_ATTR {
          auto y = hn::Mul(factor, load_first(d, x + i, count));
          if constexpr (kAdd) y = hn::Add(LoadFirst(d, to + i, count), y);
          StoreFirst(d, y, to + i, count);
        });
  }
}

template <class Element>
void StoreRowsOf(const StoreRowsArgs& a) {
  a.add ? StoreRowsOf<true, Element>(a) : StoreRowsOf<false, Element>(a);
}

void LoadRows(const LoadRowsArgs& a) {
  switch (a.dtype) {
    case DType::kBF16:
      return LoadRowsOf<BFloat16>(a);
    case DType::kF16:
      return LoadRowsOf<Float16>(a);
    default:
      return LoadRowsOf<float>(a);
  }
}

void StoreRows(const StoreRowsArgs& a) {
  switch (a.dtype) {
    case DType::kBF16:
      return StoreRowsOf<BFloat16>(a);
    case DType::kF16:
      return StoreRowsOf<Float16>(a);
    default:
      return StoreRowsOf<float>(a);
  }
}

void ScaleRows(int64_t rows, int64_t pitch, const float* factor, float* x) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t r = 0; r < rows; ++r, x += pitch) {
    const auto f = hn::Set(d, factor[r]);
    for (int64_t i = 0; i < pitch; i += lanes) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, x + i)), d, x + i);
    }
  }
}

void AddScaledRows(int64_t rows, int64_t pitch, const float* factor, const float* x, float* y) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t r = 0; r < rows; ++r, x += pitch, y += pitch) {
    const auto f = hn::Set(d, factor[r]);
    for (int64_t i = 0; i < pitch; i += lanes) {
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
    }
  }
}

void RowDots(int64_t rows, int64_t size, int64_t pitch, const float* x, const float* y,
             float* out) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t r = 0; r < rows; ++r, x += pitch, y += pitch) {
    auto sum = hn::Zero(d);
    for (int64_t i = 0; i < size; i += lanes) {
      sum = hn::MulAdd(load_first(d, x + i, size - i), load_first(d, y + i, size - i), sum);
    }
    out[r] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void MultiplyRows(int64_t rows, int64_t pitch, const float* x, const float* y, bool add, float* z) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows * pitch; i += lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, y + i);
    hn::StoreU(add ? hn::MulAdd(a, b, hn::LoadU(d, z + i)) : hn::Mul(a, b), d, z + i);
  }
}

float ClampLogDecays(int64_t n, float* g) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d);
  auto largest = zero;
  for (int64_t i = 0; i < n; i += lanes) {
    const auto x = load_first(d, g + i, n - i);
    const auto above = hn::Gt(x, zero);
    largest = hn::IfThenElse(hn::Gt(x, largest), x, largest);
    store_first(d, hn::IfThenElse(above, zero, x), g + i, n - i);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

void OneMinusExp(int64_t rows, int64_t pitch, const float* g, float* k) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows * pitch; i += lanes) {
    hn::StoreU(hn::Neg(math::expm1(d, hn::LoadU(d, g + i))), d, k + i);
  }
}

void OneMinusExpAdjoint(int64_t rows, int64_t pitch, const float* g, const float* dk, float* dg) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows * pitch; i += lanes) {
    const auto slope = math::exp(d, hn::LoadU(d, g + i));
    hn::StoreU(hn::NegMulAdd(slope, hn::LoadU(d, dk + i), hn::LoadU(d, dg + i)), d, dg + i);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(LoadRows);
HWY_EXPORT(StoreRows);
HWY_EXPORT(ScaleRows);
HWY_EXPORT(AddScaledRows);
HWY_EXPORT(RowDots);
HWY_EXPORT(MultiplyRows);
HWY_EXPORT(ClampLogDecays);
HWY_EXPORT(OneMinusExp);
HWY_EXPORT(OneMinusExpAdjoint);

void load_rows(Isa isa, const LoadRowsArgs& args) { OUZEL_DISPATCH(isa, LoadRows)(args); }
void store_rows(Isa isa, const StoreRowsArgs& args) { OUZEL_DISPATCH(isa, StoreRows)(args); }
void scale_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* factor, float* x) {
  OUZEL_DISPATCH(isa, ScaleRows)(rows, pitch, factor, x);
}
void add_scaled_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* factor,
                     const float* x, float* y) {
  OUZEL_DISPATCH(isa, AddScaledRows)(rows, pitch, factor, x, y);
}
void row_dots(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, const float* x,
              const float* y, float* out) {
  OUZEL_DISPATCH(isa, RowDots)(rows, size, pitch, x, y, out);
}
void multiply_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* x, const float* y,
                   bool add, float* z) {
  OUZEL_DISPATCH(isa, MultiplyRows)(rows, pitch, x, y, add, z);
}
float clamp_log_decays(Isa isa, std::int64_t n, float* g) {
  return OUZEL_DISPATCH(isa, ClampLogDecays)(n, g);
}
void one_minus_exp(Isa isa, std::int64_t rows, std::int64_t pitch, const float* g, float* k) {
  OUZEL_DISPATCH(isa, OneMinusExp)(rows, pitch, g, k);
}
void one_minus_exp_adjoint(Isa isa, std::int64_t rows, std::int64_t pitch, const float* g,
                           const float* dk, float* dg) {
  OUZEL_DISPATCH(isa, OneMinusExpAdjoint)(rows, pitch, g, dk, dg);
}

}  // namespace ouzel
#endif
