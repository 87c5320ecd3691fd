// One group of D features at a time: a pass for the sum, a pass for the result, the second from the
// first-level cache.
#include "src/kernels/norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/norm.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <bool kWeight, bool kGate>
void Forward(const RmsNorm& n, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const int64_t groups = n.x.extent[1], size = n.x.extent[2];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const float* x = n.x(row, group);
      const float* gate = kGate ? n.gate(row, group) : nullptr;
      float* y = n.y(row, group);
      auto sum = hn::Zero(d);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        const auto v = lanes.Load(d, x + i);
        sum = hn::MulAdd(v, v, sum);
      });
      const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(size);
      const float rstd = 1.0f / std::sqrt(mean + n.eps);
      if (n.rstd != nullptr) n.rstd[row * groups + group] = rstd;
      const auto scale = hn::Set(d, rstd);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        auto v = hn::Mul(lanes.Load(d, x + i), scale);
        if constexpr (kWeight) v = hn::Mul(v, lanes.Load(d, n.weight + i));
        if constexpr (kGate) v = hn::Mul(v, math::silu(d, lanes.Load(d, gate + i)));
        lanes.Store(v, d, y + i);
      });
    }
  }
}

void RmsNormRows(const RmsNorm& n, int64_t begin, int64_t end) {
  const bool gate = n.gate.data != nullptr;
  if (n.weight != nullptr) {
    gate ? Forward<true, true>(n, begin, end) : Forward<true, false>(n, begin, end);
  } else {
    gate ? Forward<false, true>(n, begin, end) : Forward<false, false>(n, begin, end);
  }
}

// With u = x rstd and s = silu(g): t = dy w s, dx = rstd (t - u mean(t u)), dw = sum dy s u,
// dg = dy w u silu'(g). t is kept in dx between the passes.
template <bool kWeight, bool kGate>
void Backward(const RmsNormBackward& n, int64_t begin, int64_t end, float* HWY_RESTRICT dweight) {
  const hn::ScalableTag<float> d;
  const auto one = hn::Set(d, 1.0f);
  const int64_t groups = n.x.extent[1], size = n.x.extent[2];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const float* x = n.x(row, group);
      const float* gate = kGate ? n.gate(row, group) : nullptr;
      const float* dy = n.dy(row, group);
      float* dx = n.dx(row, group);
      float* dgate = kGate ? n.dgate(row, group) : nullptr;
      const float rstd = n.rstd[row * groups + group];
      const auto scale = hn::Set(d, rstd);
      auto dot = hn::Zero(d);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        const auto u = hn::Mul(lanes.Load(d, x + i), scale);
        auto t = lanes.Load(d, dy + i);
        if constexpr (kGate) {
          const auto g = lanes.Load(d, gate + i);
          const auto s = math::sigmoid(d, g);
          const auto gs = hn::Mul(g, s);
          // silu'(g) = s + g s (1 - s)
          auto dg = hn::Mul(hn::Mul(t, u), hn::MulAdd(gs, hn::Sub(one, s), s));
          if constexpr (kWeight) dg = hn::Mul(dg, lanes.Load(d, n.weight + i));
          lanes.Store(dg, d, dgate + i);
          t = hn::Mul(t, gs);
        }
        if constexpr (kWeight) {
          if (dweight != nullptr) {
            lanes.Store(hn::MulAdd(t, u, lanes.Load(d, dweight + i)), d, dweight + i);
          }
          t = hn::Mul(t, lanes.Load(d, n.weight + i));
        }
        dot = hn::MulAdd(t, u, dot);
        lanes.Store(t, d, dx + i);
      });
      const float mean = hn::GetLane(hn::SumOfLanes(d, dot)) / static_cast<float>(size);
      const auto back = hn::Set(d, -mean * rstd);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        const auto t = hn::MulAdd(lanes.Load(d, x + i), back, lanes.Load(d, dx + i));
        lanes.Store(hn::Mul(t, scale), d, dx + i);
      });
    }
  }
}

void RmsNormBackwardRows(const RmsNormBackward& n, int64_t begin, int64_t end, float* dweight) {
  const bool gate = n.gate.data != nullptr;
  if (n.weight != nullptr) {
    gate ? Backward<true, true>(n, begin, end, dweight)
         : Backward<true, false>(n, begin, end, dweight);
  } else {
    gate ? Backward<false, true>(n, begin, end, dweight)
         : Backward<false, false>(n, begin, end, dweight);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(RmsNormRows);
HWY_EXPORT(RmsNormBackwardRows);

void rms_norm_rows(Isa isa, const RmsNorm& norm, std::int64_t begin, std::int64_t end) {
  OUZEL_DISPATCH(isa, RmsNormRows)(norm, begin, end);
}
void rms_norm_backward_rows(Isa isa, const RmsNormBackward& norm, std::int64_t begin,
                            std::int64_t end, float* dweight) {
  OUZEL_DISPATCH(isa, RmsNormBackwardRows)(norm, begin, end, dweight);
}

}  // namespace ouzel
#endif
