#include "src/layers/embedding.h"

#include "src/ops/pointwise.h"

namespace ouzel {

Embedding::Embedding(ParameterTable& table, const std::string& name, std::int64_t vocab,
                     std::int64_t size)
    : weight_(table.add(name + ".weight", {vocab, size}, Init::kNormal)),
      vocab_(vocab),
      size_(size) {}

void Embedding::forward(Run& run, std::span<const std::int32_t> tokens, Matrix y) const {
  run.compute([&] { embed(run.context, tokens, {run.weights + weight_, {vocab_, size_}}, y); });
}

void Embedding::backward(Run& run, std::span<const std::int32_t> tokens, Matrix dy) const {
  run.compute([&] {
    embed_backward(run.context, tokens, dy, {run.gradients + weight_, {vocab_, size_}});
  });
}

}  // namespace ouzel
