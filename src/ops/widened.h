// What a call gives as bfloat16 or float16, as float32 for kernels that take nothing else.
#pragma once

#include <utility>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/recurrence.h"
#include "ouzel/tensor.h"

namespace ouzel {

class Widened {
 public:
  explicit Widened(Context& context) : context_(context) {}
  // The tensor itself, where it is float32 or absent.
  ConstTensor in(const ConstTensor& x);
  RecurrenceInputs in(const RecurrenceInputs& inputs);
  // What is written there is rounded by finish() to where it belongs.
  Tensor out(const Tensor& x);
  void finish();

 private:
  Tensor memory_like(const ConstTensor& x);

  Context& context_;
  std::vector<Buffer> buffers_;
  std::vector<std::pair<Tensor, Tensor>> back_;
};

inline bool is_narrow(const ConstTensor& x) { return x.present() && x.dtype != DType::kF32; }
// Whether q, k, v or the other tensor are.
bool has_narrow(const RecurrenceInputs& inputs, const ConstTensor& other);
inline bool have_one_type(const RecurrenceInputs& inputs) {
  return inputs.q.dtype == inputs.v.dtype && inputs.k.dtype == inputs.v.dtype;
}

}  // namespace ouzel
