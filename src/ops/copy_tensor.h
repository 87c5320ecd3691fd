// Copies a tensor of floats into another of the same shape, whatever the strides and types.
#pragma once

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// float32, bfloat16 or float16 on both sides, float64 also; 16-bit results are rounded to nearest,
// ties to even. Addresses need no alignment. Memory must not overlap.
void copy_tensor(Context& context, const ConstTensor& from, const Tensor& to);

// Zeros into rows without gaps between their elements.
void clear_rows(Context& context, const Tensor& x);

// Into such rows; zeros where `from` is absent, nothing where it is the same memory.
void copy_or_clear(Context& context, const ConstTensor& from, const Tensor& to);

// The same memory as one that may be written.
inline Tensor writable(const ConstTensor& x) {
  Tensor tensor;
  tensor.data = const_cast<void*>(x.data);
  tensor.dtype = x.dtype;
  tensor.rank = x.rank;
  tensor.extent = x.extent;
  tensor.stride = x.stride;
  return tensor;
}

}  // namespace ouzel
