// Reading of state files, and dense tensors of shapes known at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ouzel/model.h"

namespace ouzel {

// The position that the metadata of the state file `path` give as `text`. Throws Error(kBadFile).
std::int64_t position_in_file(const std::string& path, const std::string& text);

// See Model::load_state.
State load_state_file(const Network& network, const std::string& path, std::int64_t capacity);

inline ConstTensor dense_tensor(const void* data, DType dtype,
                                const std::vector<std::int64_t>& shape) {
  ConstTensor tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor.extent[i] = shape[i];
    tensor.stride[i] = step;
    step *= shape[i];
  }
  return tensor;
}

}  // namespace ouzel
