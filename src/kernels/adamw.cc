#include "src/kernels/adamw.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/adamw.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void AdamWElements(const AdamWStep& step, float* HWY_RESTRICT p, const float* HWY_RESTRICT g,
                   float* HWY_RESTRICT m, float* HWY_RESTRICT v, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto gradient_scale = hn::Set(d, step.gradient_scale), rate1 = hn::Set(d, step.rate1),
             rate2 = hn::Set(d, step.rate2), decay = hn::Set(d, step.decay),
             size = hn::Set(d, step.size), root = hn::Set(d, step.root),
             epsilon = hn::Set(d, step.epsilon);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    const auto gradient = hn::Mul(lanes.Load(d, g + i), gradient_scale);
    auto first = lanes.Load(d, m + i), second = lanes.Load(d, v + i);
    first = hn::MulAdd(hn::Sub(gradient, first), rate1, first);
    second = hn::MulAdd(hn::MulSub(gradient, gradient, second), rate2, second);
    lanes.Store(first, d, m + i);
    lanes.Store(second, d, v + i);
    const auto update = hn::Div(hn::Mul(first, size), hn::MulAdd(hn::Sqrt(second), root, epsilon));
    const auto parameter = lanes.Load(d, p + i);
    lanes.Store(hn::Sub(hn::NegMulAdd(parameter, decay, parameter), update), d, p + i);
  });
}

double SumOfSquaresBlock(const float* x, int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, hn::ScalableTag<double>> df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // Four chains cover the latency of the multiply-add.
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  const auto square = [&](int64_t i, auto sum) HWY_ATTR {
    const auto v = hn::PromoteTo(d, hn::LoadU(df, x + i));
    return hn::MulAdd(v, v, sum);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = square(i, s0);
    s1 = square(i + lanes, s1);
    s2 = square(i + 2 * lanes, s2);
    s3 = square(i + 3 * lanes, s3);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(AdamWElements);
HWY_EXPORT(SumOfSquaresBlock);

void adamw_elements(Isa isa, const AdamWStep& step, float* p, const float* g, float* m, float* v,
                    std::int64_t n) {
  OUZEL_DISPATCH(isa, AdamWElements)(step, p, g, m, v, n);
}
double sum_of_squares_block(Isa isa, const float* x, std::int64_t n) {
  return OUZEL_DISPATCH(isa, SumOfSquaresBlock)(x, n);
}

}  // namespace ouzel
#endif
