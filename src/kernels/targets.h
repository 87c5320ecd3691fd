// The instruction sets that kernels are compiled for: AVX-512 (HWY_AVX3: F, BW, CD, DQ, VL), AVX2
// with FMA, and Highway's fallback, which is plain C++: emulated 128-bit vectors, but single floats
// with GCC before 12.3, whose optimiser miscompiles the former (GCC's bug 106322). Kernels must
// stand both. Sanitizers do without AVX-512: its unrolled tiles take most of their build.
#pragma once

#ifdef OUZEL_WITHOUT_AVX512
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
