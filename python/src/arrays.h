// Arrays of Python as tensors, without copies, and results as arrays of the caller's framework.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "ouzel/tensor.h"
#include "src/ops/registry.h"

namespace ouzel::python {

namespace nb = nanobind;

// NumPy's, anything with __dlpack__ on the CPU, or a DLPack capsule. Keeps the array alive.
class GivenArray {
 public:
  // `call` and `name` say in errors what it is: "retention: q". Throws TypeError,
  // Error(kInvalidArgument), or what the array's own export throws.
  GivenArray(nb::handle object, std::string_view call, std::string_view name);
  const ConstTensor& tensor() const { return tensor_; }
  // Throws Error(kInvalidArgument) for an array that says of itself that it is read-only, and for
  // those of JAX.
  static void check_writable(nb::handle object, std::string_view call, std::string_view name);

 private:
  nb::ndarray<nb::ro> array_;
  ConstTensor tensor_;
};

// Memory that becomes an array.
class ResultArray {
 public:
  ResultArray(const std::vector<std::int64_t>& shape, DType dtype);
  const Tensor& tensor() const { return tensor_; }
  // Of the kind of `like`: PyTorch, JAX, a DLPack capsule, else NumPy. Gives the memory away.
  nb::object release(nb::handle like);

 private:
  Buffer memory_;
  Tensor tensor_;
};

}  // namespace ouzel::python
