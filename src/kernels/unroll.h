// OUZEL_UNROLL before a loop of constant trip count: its vectors live in registers only if the
// whole loop disappears, which -O2 does not do by itself.
#pragma once

#if defined(__clang__)
#define OUZEL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OUZEL_UNROLL _Pragma("GCC unroll 32")
#endif

// Of a lambda after its parameters: called, its constants would be loaded anew for every vector.
#define OUZEL_ALWAYS_INLINE __attribute__((always_inline))
