#include "src/ops/adamw.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/adamw.h"

namespace ouzel {
namespace {

// Elements of one task, and of one partial sum: 64 KiB of each array.
constexpr std::int64_t kBlock = 1 << 14;

std::int64_t blocks_of(std::int64_t n) { return (n + kBlock - 1) / kBlock; }

}  // namespace

void adamw_step(Context& context, const AdamWOptions& options, std::int64_t step,
                std::span<float> p, std::span<const float> g, std::span<float> m,
                std::span<float> v) {
  if (g.size() != p.size() || m.size() != p.size() || v.size() != p.size() || step < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("adamw_step: expected a step from 1 on and gradients and moments as "
                            "long as the {} parameters; found step {}, {} gradients, {} and {} "
                            "moments",
                            p.size(), step, g.size(), m.size(), v.size()));
  }
  // (m / c1) / (sqrt(v / c2) + epsilon) with the bias corrections c = 1 - beta^t folded into
  // constants.
  const double t = static_cast<double>(step);
  const double c1 = -std::expm1(t * std::log(options.beta1));
  const double c2 = -std::expm1(t * std::log(options.beta2));
  AdamWStep constants;
  constants.gradient_scale = static_cast<float>(options.gradient_scale);
  constants.rate1 = static_cast<float>(1 - options.beta1);
  constants.rate2 = static_cast<float>(1 - options.beta2);
  constants.decay = static_cast<float>(options.learning_rate * options.weight_decay);
  constants.size = static_cast<float>(options.learning_rate / c1);
  constants.root = static_cast<float>(1 / std::sqrt(c2));
  constants.epsilon = static_cast<float>(options.epsilon);
  const auto n = static_cast<std::int64_t>(p.size());
  context.impl().run(blocks_of(n), [&](std::int64_t block, Scratch&) {
    const std::int64_t i = block * kBlock;
    adamw_elements(context.isa(), constants, p.data() + i, g.data() + i, m.data() + i, v.data() + i,
                   std::min(kBlock, n - i));
  });
}

double sum_of_squares(Context& context, std::span<const float> x) {
  const auto n = static_cast<std::int64_t>(x.size());
  const std::int64_t blocks = blocks_of(n);
  double* partial = context.impl().shared<double>(blocks);
  context.impl().run(blocks, [&](std::int64_t block, Scratch&) {
    const std::int64_t i = block * kBlock;
    partial[block] = sum_of_squares_block(context.isa(), x.data() + i, std::min(kBlock, n - i));
  });
  double sum = 0;
  for (std::int64_t block = 0; block < blocks; ++block) sum += partial[block];
  return sum;
}

}  // namespace ouzel
