// Memory traffic and nothing else: the yardstick of operators that are as fast as memory.
#pragma once

#include <cstdint>
#include <span>

#include "ouzel/context.h"

namespace ouzel {

// Reads n floats of each input and writes n floats of each output, past the caches, in order. n is
// a multiple of 16 and outputs begin on cache lines.
void memory_traffic(Isa isa, std::span<const float* const> inputs, std::span<float* const> outputs,
                    std::int64_t n);

}  // namespace ouzel
