#include "src/ops/arguments.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <fmt/format.h>

namespace ouzel {

void refuse(const char* op, const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", op, sentence));
}

double checked(const char* op, const char* name, double option, double least) {
  if (std::abs(option) <= std::numeric_limits<float>::max() && option >= least) return option;
  const std::string range = std::isfinite(least) ? fmt::format(" of at least {}", least) : "";
  refuse(op, fmt::format("{} should be a finite number{}, not {}", name, range, option));
}

double scale_of(const char* op, const std::optional<double>& given, std::int64_t size) {
  return checked(op, "scale", given.value_or(1 / std::sqrt(static_cast<double>(size))));
}

namespace {

void zero(char* data, const Tensor& shape, int axis) {
  const auto d = static_cast<std::size_t>(axis);
  const std::int64_t size = size_of(shape.dtype);
  if (axis == shape.rank - 1) {
    std::memset(data, 0, static_cast<std::size_t>(shape.extent[d] * size));
    return;
  }
  for (std::int64_t i = 0; i < shape.extent[d]; ++i) {
    zero(data + i * shape.stride[d] * size, shape, axis + 1);
  }
}

}  // namespace

void Sequences::zero_padding(const Tensor& rows) const {
  if (given_ == nullptr || !rows.present()) return;
  std::vector<std::int64_t> done(static_cast<std::size_t>(batch_));
  const auto zero_until = [&](std::int64_t b, std::int64_t end) {
    std::int64_t& t = done[static_cast<std::size_t>(b)];
    for (; t < end; ++t) {
      zero(static_cast<char*>(rows.data) +
               (b * rows.stride[0] + t * rows.stride[1]) * size_of(rows.dtype),
           rows, 2);
    }
  };
  for (const Segment& s : given_->list) {  // increasing within a batch row
    zero_until(s.batch, s.begin);
    done[static_cast<std::size_t>(s.batch)] = s.begin + s.length;
  }
  for (std::int64_t b = 0; b < batch_; ++b) zero_until(b, tokens_);
}

void LargestDecay::see(const AnyRows<const void>& g, std::int64_t n) {
  float top = 0;
  const auto widest = [&](const auto* x, auto wide) {
    for (std::int64_t i = 0; i < n; ++i) top = std::max(top, wide(x[i]));  // NaN is passed over
  };
  const auto wide = [](auto x) { return to_float(x); };
  if (g.dtype == DType::kF32) {
    widest(static_cast<const float*>(g.first), [](float x) { return x; });
  } else if (g.dtype == DType::kBF16) {
    widest(static_cast<const BFloat16*>(g.first), wide);
  } else {
    widest(static_cast<const Float16*>(g.first), wide);
  }
  see(top);
}

void LargestDecay::check(const char* op, const char* name) const {
  const float top = top_.load(std::memory_order_relaxed);
  if (top <= kMax) return;
  refuse(op, fmt::format("{} holds {}; log decays should be at most 0 (the logarithm of a factor "
                         "in [0, 1])",
                         name, top));
}

void check_step(const char* op, const char* name, const ConstTensor& x, const Tensor& state) {
  if (!state.present()) refuse(op, "the state must be given");
  if (x.rank >= 2 && x.extent[1] == 1) return;
  refuse(op, fmt::format("{} should be one token of each sequence, [sequences, 1, ...], not {}",
                         name, shape_string(x)));
}

}  // namespace ouzel
