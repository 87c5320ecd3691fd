#include "src/ops/widened.h"

#include <array>

#include "src/ops/copy_tensor.h"

namespace ouzel {

bool has_narrow(const RecurrenceInputs& inputs, const ConstTensor& other) {
  return is_narrow(inputs.q) || is_narrow(inputs.k) || is_narrow(inputs.v) || is_narrow(other);
}

// Of arrays [B, T, H, D].
Tensor Widened::memory_like(const ConstTensor& x) {
  buffers_.emplace_back(static_cast<std::size_t>(x.size()) * sizeof(float));
  const std::array<std::int64_t, 4> shape = {x.extent[0], x.extent[1], x.extent[2], x.extent[3]};
  return Tensor(buffers_.back().as<float>(), shape);
}

ConstTensor Widened::in(const ConstTensor& x) {
  if (!is_narrow(x)) return x;
  const Tensor wide = memory_like(x);
  copy_tensor(context_, x, wide);
  return wide;
}

RecurrenceInputs Widened::in(const RecurrenceInputs& inputs) {
  RecurrenceInputs wide = inputs;
  wide.q = in(inputs.q);
  wide.k = in(inputs.k);
  wide.v = in(inputs.v);
  return wide;
}

Tensor Widened::out(const Tensor& x) {
  if (!is_narrow(x)) return x;
  back_.emplace_back(memory_like(x), x);
  return back_.back().first;
}

void Widened::finish() {
  for (const auto& [from, to] : back_) copy_tensor(context_, from, to);
}

}  // namespace ouzel
