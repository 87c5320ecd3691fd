#include "src/kernels/traffic.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/traffic.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void Traffic(std::span<const float* const> inputs, std::span<float* const> outputs, int64_t n) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto sum = hn::Zero(d);
    for (const float* in : inputs) sum = hn::Add(sum, hn::LoadU(d, in + i));
    for (float* out : outputs) hn::Stream(sum, d, out + i);
  }
  hwy::FlushStream();
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Traffic);

void memory_traffic(Isa isa, std::span<const float* const> inputs, std::span<float* const> outputs,
                    std::int64_t n) {
  OUZEL_DISPATCH(isa, Traffic)(inputs, outputs, n);
}

}  // namespace ouzel
#endif
