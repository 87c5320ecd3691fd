// The embedding of tokens: rows of a table.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "src/layers/layer.h"

namespace ouzel {

class Embedding {
 public:
  Embedding(ParameterTable& table, const std::string& name, std::int64_t vocab, std::int64_t size);

  std::int64_t offset() const { return weight_; }
  void forward(Run& run, std::span<const std::int32_t> tokens, Matrix y) const;
  void backward(Run& run, std::span<const std::int32_t> tokens, Matrix dy) const;

 private:
  std::int64_t weight_, vocab_, size_;
};

}  // namespace ouzel
