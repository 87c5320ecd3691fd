#include "src/kernels/pointwise.h"

#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/pointwise.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void AddTo(const float* x, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    lanes.Store(hn::Add(lanes.Load(d, y + i), lanes.Load(d, x + i)), d, y + i);
  });
}

void SwigluRow(const float* gate, const float* up, float* y, int64_t n) {
  const hn::ScalableTag<float> d;
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    lanes.Store(hn::Mul(math::silu(d, lanes.Load(d, gate + i)), lanes.Load(d, up + i)), d, y + i);
  });
}

void SwigluBackwardRow(const float* gate, const float* up, const float* dy, float* dgate,
                       float* dup, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto one = hn::Set(d, 1.0f);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    const auto g = lanes.Load(d, gate + i), u = lanes.Load(d, up + i), t = lanes.Load(d, dy + i);
    const auto s = math::sigmoid(d, g);
    const auto gs = hn::Mul(g, s);
    // silu'(g) = s + g s (1 - s)
    const auto slope = hn::MulAdd(gs, hn::Sub(one, s), s);
    lanes.Store(hn::Mul(hn::Mul(t, u), slope), d, dgate + i);
    lanes.Store(hn::Mul(t, gs), d, dup + i);
  });
}

void RotaryRows(const View<float, 3>& x, const int64_t* positions, const double* frequency,
                bool inverse, int64_t begin, int64_t end, float* HWY_RESTRICT angles) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, hn::ScalableTag<double>> dh;
  const int64_t half = x.extent[2] / 2;
  const int64_t padded = (half + kAngleBlock - 1) / kAngleBlock * kAngleBlock;
  float* HWY_RESTRICT cosines = angles;
  float* HWY_RESTRICT sines = angles + padded;
  for (int64_t row = begin; row < end; ++row) {
    if (row == begin || positions[row] != positions[row - 1]) {
      const auto position = hn::Set(dd, static_cast<double>(positions[row]));
      for (int64_t i = 0; i < half; i += static_cast<int64_t>(hn::Lanes(dd))) {
        hn::Vec<decltype(dd)> c, s;
        math::cos_sin(dd, hn::Mul(position, hn::LoadU(dd, frequency + i)), c, s);
        hn::StoreU(hn::DemoteTo(dh, c), dh, cosines + i);
        hn::StoreU(hn::DemoteTo(dh, inverse ? hn::Neg(s) : s), dh, sines + i);
      }
    }
    for (int64_t head = 0; head < x.extent[1]; ++head) {
      float* a = x(row, head);
      float* b = a + half;
      ForVectors(d, half, [&](int64_t i, auto lanes) HWY_ATTR {
        const auto c = lanes.Load(d, cosines + i), s = lanes.Load(d, sines + i);
        const auto va = lanes.Load(d, a + i), vb = lanes.Load(d, b + i);
        lanes.Store(hn::NegMulAdd(vb, s, hn::Mul(va, c)), d, a + i);
        lanes.Store(hn::MulAdd(va, s, hn::Mul(vb, c)), d, b + i);
      });
    }
  }
}

float CrossEntropyRow(const float* logits, int64_t n, int64_t target, float weight,
                      float* dlogits) {
  const hn::ScalableTag<float> d;
  const float lowest = -std::numeric_limits<float>::infinity();
  auto max = hn::Set(d, lowest);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    auto v = lanes.Load(d, logits + i);
    if constexpr (std::is_same_v<decltype(lanes), FirstLanes>) {
      v = hn::IfThenElse(hn::FirstN(d, lanes.count), v, hn::Set(d, lowest));
    }
    max = hn::Max(max, v);
  });
  const auto top = hn::MaxOfLanes(d, max);
  const float at_target = logits[target];
  auto sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    auto e = math::exp(d, hn::Sub(lanes.Load(d, logits + i), top));
    if (dlogits != nullptr) lanes.Store(e, d, dlogits + i);
    if constexpr (std::is_same_v<decltype(lanes), FirstLanes>) {
      e = hn::IfThenElseZero(hn::FirstN(d, lanes.count), e);
    }
    sum = hn::Add(sum, e);
  });
  const float total = hn::GetLane(hn::SumOfLanes(d, sum));
  if (dlogits != nullptr) {
    const auto scale = hn::Set(d, weight / total);
    ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
      lanes.Store(hn::Mul(lanes.Load(d, dlogits + i), scale), d, dlogits + i);
    });
    dlogits[target] -= weight;
  }
  return static_cast<float>(std::log(static_cast<double>(total)) + hn::GetLane(top) - at_target);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(AddTo);
HWY_EXPORT(SwigluRow);
HWY_EXPORT(SwigluBackwardRow);
HWY_EXPORT(RotaryRows);
HWY_EXPORT(CrossEntropyRow);

void add_to(Isa isa, const float* x, float* y, std::int64_t n) {
  OUZEL_DISPATCH(isa, AddTo)(x, y, n);
}
void swiglu_row(Isa isa, const float* gate, const float* up, float* y, std::int64_t n) {
  OUZEL_DISPATCH(isa, SwigluRow)(gate, up, y, n);
}
void swiglu_backward_row(Isa isa, const float* gate, const float* up, const float* dy, float* dgate,
                         float* dup, std::int64_t n) {
  OUZEL_DISPATCH(isa, SwigluBackwardRow)(gate, up, dy, dgate, dup, n);
}
void rotary_rows(Isa isa, const View<float, 3>& x, const std::int64_t* positions,
                 const double* frequency, bool inverse, std::int64_t begin, std::int64_t end,
                 float* angles) {
  OUZEL_DISPATCH(isa, RotaryRows)(x, positions, frequency, inverse, begin, end, angles);
}
float cross_entropy_row(Isa isa, const float* logits, std::int64_t n, std::int64_t target,
                        float weight, float* dlogits) {
  return OUZEL_DISPATCH(isa, CrossEntropyRow)(logits, n, target, weight, dlogits);
}

}  // namespace ouzel
#endif
