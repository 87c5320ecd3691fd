#include "src/kernels/convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/convert.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/typed-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

template <class From, class To>
void convert_as(const void* from, void* to, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* x = static_cast<const From*>(from);
  auto* y = static_cast<To*>(to);
  for (int64_t i = 0; i < n; i += lanes) {
    StoreFirst(d, LoadFirst(d, x + i, n - i), y + i, n - i);
  }
}

}  // namespace

void Convert(DType from_type, const void* from, DType to_type, void* to, int64_t n) {
  if (from_type == DType::kBF16) return convert_as<BFloat16, float>(from, to, n);
  if (from_type == DType::kF16) return convert_as<Float16, float>(from, to, n);
  if (to_type == DType::kBF16) return convert_as<float, BFloat16>(from, to, n);
  convert_as<float, Float16>(from, to, n);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(Convert);
void convert(Isa isa, DType from_type, const void* from, DType to_type, void* to, std::int64_t n) {
  OUZEL_DISPATCH(isa, Convert)(from_type, from, to_type, to, n);
}
}  // namespace ouzel
#endif
