// Numbers from one type of floats to another.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// float32, bfloat16 or float16 on both sides, of which one is float32; to nearest, ties to even.
// Any alignment.
void convert(Isa isa, DType from_type, const void* from, DType to_type, void* to, std::int64_t n);

}  // namespace ouzel
