// Dispatch: every kernel is compiled once per instruction set (Highway's foreach_target) and chosen
// by the context's Isa, an index of Highway's table, never by process-global state.
//
// A kernel file looks like this (see hwy/examples/skeleton.cc for the idiom):
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "src/kernels/NAME.cc"
//   #include "src/kernels/targets.h"       // which sets; before foreach_target.h
//   #include "hwy/foreach_target.h"
//   #include "hwy/highway.h"
//   HWY_BEFORE_NAMESPACE();
//   namespace ouzel::HWY_NAMESPACE { void NameKernel(const NameArgs& args) { ... } }
//   HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   #include "src/kernels/dispatch.h"
//   namespace ouzel {
//   HWY_EXPORT(NameKernel);
//   void name(Isa isa, const NameArgs& args) { OUZEL_DISPATCH(isa, NameKernel)(args); }
//   }
//   #endif
#pragma once

#include "hwy/highway.h"
#include "ouzel/context.h"

namespace ouzel {

// Position of an instruction set in the tables that HWY_EXPORT makes: entry 0 is Highway's own
// start-up function, then the targets from their lowest bit on, the fallback last.
inline constexpr int dispatch_index(Isa isa) {
  constexpr auto index_of = [](long long target) {
    int bit = 0;
    while ((HWY_CHOSEN_TARGET_SHIFT(target) >> bit & 1) == 0) ++bit;
    return bit;
  };
  switch (isa) {
    case Isa::kAvx512:
      return index_of(HWY_AVX3);
    case Isa::kAvx2:
      return index_of(HWY_AVX2);
    case Isa::kPortable:
      break;
  }
  return HWY_MAX_DYNAMIC_TARGETS + 1;
}

}  // namespace ouzel

#define OUZEL_DISPATCH(isa, FUNC) (*(HWY_DISPATCH_TABLE(FUNC)[::ouzel::dispatch_index(isa)]))
