// 16-bit floats: exact conversion to float32, and from float32 with round to nearest, ties to even.
// Overflow gives infinity, NaN stays NaN (quiet), denormals are kept whatever MXCSR says: the work
// is done on bits.
#pragma once

#include <bit>
#include <cstdint>

#include "ouzel/tensor.h"

namespace ouzel {

constexpr bool is_half(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

float to_float(Float16 x);
BFloat16 to_bf16(float x);
Float16 to_f16(float x);

}  // namespace ouzel
