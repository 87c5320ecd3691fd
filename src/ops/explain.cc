#include "src/ops/explain.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/kernels/softmax_tile.h"

namespace ouzel {
namespace {

constexpr double kFloat = sizeof(float);

// Numbers of a tensor; `per_token` tells whether it has a row for every token.
struct Count {
  double numbers = 1;
  bool per_token = false;
};

Count count(const TensorInfo& tensor, const ExplainSizes& sizes) {
  Count c;
  std::istringstream letters(tensor.shape.substr(0, tensor.shape.find('|')));
  for (std::string letter; letters >> letter;) {
    if (letter.starts_with('T')) {
      c.per_token = true;
    } else if (letter == "D") {
      c.numbers *= static_cast<double>(sizes.heads * sizes.values);
    } else if (std::isdigit(static_cast<unsigned char>(letter[0])) != 0) {
      c.numbers *= std::stod(letter);
    } else if (letter.starts_with('H')) {
      c.numbers *= static_cast<double>(sizes.heads);
    } else if (letter == "V") {
      c.numbers *= static_cast<double>(sizes.values);
    } else if (letter != "B" && letter != "N") {
      c.numbers *= static_cast<double>(sizes.keys);
    }
  }
  return c;
}

// Of what a call with default attributes has.
Count sum(const std::vector<TensorInfo>& tensors, const Attributes& defaults,
          const ExplainSizes& sizes, bool per_token, bool differentiable) {
  Count total{0, per_token};
  for (const TensorInfo& tensor : tensors) {
    if (tensor.optional || !defaults.hold(tensor.when)) continue;
    if (differentiable && tensor.gradient.empty()) continue;
    const Count c = count(tensor, sizes);
    if (c.per_token == per_token) total.numbers += c.numbers;
  }
  return total;
}

std::string why_not_counted(const OperatorInfo& law) {
  if (law.source.starts_with("ONNX")) return "has no costs of its own, it is " + law.formula;
  return std::ranges::any_of(law.outputs, &TensorInfo::is_state)
             ? "does not cost a fixed number of operations per token and number of its state: "
               "nothing is counted"
             : "keeps no state of a fixed size that costs could be counted for";
}

}  // namespace

Explanation explain(const OperatorInfo& law, const ExplainSizes& sizes) {
  if (law.cost.forward == 0) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("{} {}", law.name, why_not_counted(law)));
  }
  if (sizes.tokens < 1 || sizes.keys < 1 || sizes.values < 1 || sizes.heads < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: T = {}, K = {}, V = {}, H = {}: all must be at least 1", law.name,
                            sizes.tokens, sizes.keys, sizes.values, sizes.heads));
  }
  const Attributes defaults(law, {});
  const auto numbers = [&](const std::vector<TensorInfo>& tensors, bool per_token,
                           bool differentiable) {
    return sum(tensors, defaults, sizes, per_token, differentiable).numbers;
  };
  const double T = static_cast<double>(sizes.tokens), K = static_cast<double>(sizes.keys),
               V = static_cast<double>(sizes.values), H = static_cast<double>(sizes.heads);
  const double state = numbers(law.outputs, false, false);
  const double in = numbers(law.inputs, true, false), out = numbers(law.outputs, true, false);
  const double in_grads = numbers(law.inputs, true, true);
  const double projections = 2 * H * V * (2 * H * K + 2 * H * V);

  Explanation e;
  e.state_bytes = kFloat * state;
  e.law.prefill = {projections, law.cost.forward * state, kFloat * (in + out)};
  // Backward reads what forward read and the output's gradient.
  e.law.training = {3 * projections, (law.cost.forward + law.cost.backward) * state,
                    kFloat * (in + out + in + out + in_grads)};
  e.law.decode = {projections, law.cost.forward * state, kFloat * (in + out + 2 * state)};

  // A causal query sees half of the keys on average: 2 T (K + V) / 2 forward, and backward 5/2 as
  // many (scores again, and the gradients of weights, values, queries and keys).
  const double rows = H * (2 * K + 2 * V);
  const double pair = H * (K + V);
  e.softmax.prefill = {projections, pair * T, kFloat * rows};
  e.softmax.training = {3 * projections, 3.5 * pair * T, kFloat * (3 * rows)};
  e.softmax.decode = {projections, 2 * pair * T, kFloat * (rows + pair * T)};
  e.naive_bytes = kFloat * H * T * T;
  e.online_bytes = kFloat * static_cast<double>(kSoftmaxWidestTile * kSoftmaxBlock);
  e.cache_bytes = kFloat * pair * T;

  e.prefill_crossing = e.law.prefill.mixing / pair;
  e.training_crossing = e.law.training.mixing / (3.5 * pair);
  e.decode_crossing = 2 * state / pair;
  e.memory_crossing = state / pair;
  return e;
}

}  // namespace ouzel
