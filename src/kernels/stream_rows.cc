#include "src/kernels/stream_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/stream_rows.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void StreamRows(const StreamRowsArgs& a) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < a.rows; ++row) {
    const float* from = a.from + row * a.from_pitch;
    float* to = a.to + row * a.to_stride;
    for (std::int64_t i = 0; i < a.size; i += lanes) hn::Stream(hn::Load(d, from + i), d, to + i);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(StreamRows);
void stream_rows(Isa isa, const StreamRowsArgs& args) { OUZEL_DISPATCH(isa, StreamRows)(args); }
}  // namespace ouzel
#endif
