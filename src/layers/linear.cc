#include "src/layers/linear.h"

#include <algorithm>

#include "src/base/context_impl.h"

namespace ouzel {
namespace {

constexpr std::int64_t kRowBlock = 64, kColumnBlock = 64;

void add_bias(Context& context, const float* bias, Matrix y) {
  const std::int64_t rows = y.extent[0];
  context.impl().run((rows + kRowBlock - 1) / kRowBlock, [&](std::int64_t block, Scratch&) {
    const std::int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t r = block * kRowBlock; r < end; ++r) {
      float* row = y(r);
      for (std::int64_t c = 0; c < y.extent[1]; ++c) row[c] += bias[c];
    }
  });
}

void add_bias_gradient(Context& context, Matrix dy, float* dbias) {
  const std::int64_t width = dy.extent[1];
  context.impl().run((width + kColumnBlock - 1) / kColumnBlock, [&](std::int64_t block, Scratch&) {
    const std::int64_t end = std::min(width, (block + 1) * kColumnBlock);
    for (std::int64_t r = 0; r < dy.extent[0]; ++r) {
      const float* row = dy(r);
      for (std::int64_t c = block * kColumnBlock; c < end; ++c) {
        dbias[c] += row[c];
      }
    }
  });
}

}  // namespace

Linear::Linear(const Builder& builder, const std::vector<Part>& parts, std::int64_t inputs,
               bool bias)
    : weight_(builder.table.size()), inputs_(inputs) {
  ParameterTable& table = builder.table;
  builder.linears.push_back(this);
  for (const Part& part : parts) {
    table.add(part.name + ".weight", {part.outputs, inputs}, Init::kNormal);
    outputs_ += part.outputs;
  }
  if (!bias) return;
  bias_ = table.size();
  for (const Part& part : parts) table.add(part.name + ".bias", {part.outputs}, Init::kZeros);
}

Linear::Linear(const Builder& builder, std::int64_t offset, std::int64_t outputs,
               std::int64_t inputs)
    : weight_(offset), outputs_(outputs), inputs_(inputs) {
  builder.linears.push_back(this);
}

void Linear::pack(Context& context, const float* weights) {
  packed_.pack(context, {weights + weight_, {outputs_, inputs_}});
}

std::size_t Linear::scratch_bytes() const {
  return std::max(PackedMatrix::bytes(inputs_, outputs_),
                  linear_backward_weight_bytes(outputs_, inputs_));
}

void Linear::forward(Run& run, Matrix x, Matrix y, bool accumulate) const {
  run.compute([&] {
    linear(run.context, x, packed_, y, accumulate);
    if (bias_ >= 0) add_bias(run.context, run.weights + bias_, y);
  });
}

void Linear::backward(Run& run, Matrix x, Matrix dy, Matrix dx) const {
  run.compute([&] {
    linear_backward_input(run.context, dy, {run.weights + weight_, {outputs_, inputs_}}, dx);
    linear_backward_weight(run.context, dy, x, {run.gradients + weight_, {outputs_, inputs_}});
    if (bias_ >= 0) add_bias_gradient(run.context, dy, run.gradients + bias_);
  });
}

}  // namespace ouzel
