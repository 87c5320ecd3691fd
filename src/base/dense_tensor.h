// Tensors without gaps, of shapes known at run time.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "ouzel/tensor.h"

namespace ouzel {

// Constness of the memory is the tensor's.
template <class Memory>
auto dense_tensor(Memory* data, DType dtype, const std::vector<std::int64_t>& shape) {
  BasicTensor<std::is_const_v<Memory>> tensor;
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

// "F32 [2, 19]", "missing": for messages.
std::string described(const ConstTensor& tensor);

}  // namespace ouzel
