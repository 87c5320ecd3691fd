#include "src/base/half.h"

namespace ouzel {
namespace {

// value / 2^shift, rounded to nearest, ties to even; 1 <= shift <= 31.
std::uint32_t shift_right_rounded(std::uint32_t value, int shift) {
  const std::uint32_t half = std::uint32_t{1} << (shift - 1);
  const std::uint32_t odd = (value >> shift) & 1;
  return (value + (half - 1 + odd)) >> shift;
}

}  // namespace

float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1f;
  std::uint32_t mantissa = x.bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // A denormal, mantissa * 2^-24, is a normal float: shift its leading bit into place.
  const int lead = std::countl_zero(mantissa) - 21;
  mantissa = (mantissa << lead) & 0x3ff;
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(113 - lead) << 23 | mantissa << 13);
}

BFloat16 to_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<std::uint16_t>(bits >> 16 | 0x40)};
  // The carry of the rounding runs into the exponent, up to infinity: as it should.
  return {static_cast<std::uint16_t>((bits + (0x7fff + (bits >> 16 & 1))) >> 16)};
}

Float16 to_f16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520, halfway from the largest half to 2^16
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal half
    half = shift_right_rounded(magnitude - (112u << 23), 13);
  } else if (magnitude >= 0x33000000) {  // 2^-25, half of the smallest denormal; a tie goes to 0
    const std::uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    half = shift_right_rounded(mantissa, 126 - static_cast<int>(magnitude >> 23));
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace ouzel
