#include "src/ops/rows64.h"

#include <fmt/format.h>

namespace ouzel {

void read(const AnyRows<const void>& row, std::int64_t n, double* to) {
  if (row.dtype == DType::kF32) return read(static_cast<const float*>(row.first), n, to);
  const auto widen = [&](const auto* x) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(to_float(x[i]));
  };
  row.dtype == DType::kBF16 ? widen(static_cast<const BFloat16*>(row.first))
                            : widen(static_cast<const Float16*>(row.first));
}

void write(const double* from, std::int64_t n, const AnyRows<void>& row) {
  if (row.dtype == DType::kF32) return write(from, n, static_cast<float*>(row.first));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<float>(from[i]);
    if (row.dtype == DType::kBF16) {
      static_cast<BFloat16*>(row.first)[i] = to_bf16(x);
    } else {
      static_cast<Float16*>(row.first)[i] = to_f16(x);
    }
  }
}

std::int64_t group_of(const char* op, const char* many_name, std::int64_t many,
                      const char* few_name, std::int64_t few) {
  if (few > 0 && many % few == 0) return many / few;
  refuse(op, fmt::format("{} has {} heads and {} has {}; the first should be a multiple of the "
                         "second",
                         many_name, many, few_name, few));
}

}  // namespace ouzel
