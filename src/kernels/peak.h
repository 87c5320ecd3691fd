// The floating-point peak of one core, measured: the yardstick of every efficiency that is printed.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

// FLOP/s (a fused multiply-add is 2) of one core in its present state, with the vectors of `isa`,
// which the machine must support: the best of five bursts of about a millisecond. Portable:
// multiplications and additions of 128-bit vectors, the most that a compiler makes of the fallback.
double fma_peak_flops(Isa isa);

// One burst of `iterations` (at most 2^24) rounds of 12 independent multiply-adds. Every
// accumulator lane adds 1 * 1 each round, so the sum of all lanes, which is returned, counts the
// multiply-adds done.
std::int64_t fma_burst(Isa isa, std::int64_t iterations);

// Whether this machine multiplies pairs of bfloat16 numbers (AVX512-BF16), and a burst of rounds of
// 12 such instructions, 16 pairs each; every pair counts once in the sum that is returned.
bool has_bf16_dot();
std::int64_t bf16_dot_burst(std::int64_t iterations);

}  // namespace ouzel
