// The parameters of a network: names and shapes of tensors that stand one after the other, without
// gaps, in one flat array. Weights, gradients and moments are arrays of that layout, so that layers
// hold offsets only. Tensors of equal width that are added one after the other are one taller
// matrix.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ouzel {

enum class Init { kNormal, kOnes, kZeros };

struct ParameterInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0, size = 0;
  Init init = Init::kNormal;

  // Weight decay is for matrices: not for norms and biases (nor, later, for decay gates).
  bool decays() const { return init == Init::kNormal; }
};

class ParameterTable {
 public:
  // Returns the tensor's offset.
  std::int64_t add(std::string name, std::vector<std::int64_t> shape, Init init) {
    ParameterInfo info{std::move(name), std::move(shape), size_, 1, init};
    for (std::int64_t extent : info.shape) info.size *= extent;
    size_ += info.size;
    list_.push_back(std::move(info));
    return list_.back().offset;
  }
  // Another name that files may hold for a tensor that shares its memory with one of the table.
  void add_alias(std::string name) { aliases_.push_back(std::move(name)); }

  std::int64_t size() const { return size_; }  // floats of the flat array
  const std::vector<ParameterInfo>& list() const { return list_; }
  const std::vector<std::string>& aliases() const { return aliases_; }

 private:
  std::int64_t size_ = 0;
  std::vector<ParameterInfo> list_;
  std::vector<std::string> aliases_;
};

}  // namespace ouzel
