// The instruction sets that kernels are compiled for: AVX-512 (HWY_AVX3: F, BW, CD, DQ, VL), AVX2
// with FMA, and Highway's emulated 128-bit vectors as the portable fallback.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
