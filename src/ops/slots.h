// Slot memories, in float64: what gsa (given gates) and abc (gates that keep averages) share.
#pragma once

#include <cstdint>
#include <optional>

#include "ouzel/context.h"
#include "ouzel/tensor.h"
#include "src/ops/arguments.h"

namespace ouzel {

// The tensors of a call; abc has lse and no g.
template <bool Const>
struct SlotTensors {
  BasicTensor<Const> q, k, v, s, g, hk, hv, lse;
};

void slots_forward(Context& context, const char* op, std::optional<double> scale,
                   const SlotTensors<true>& inputs, const Segments* segments, const Tensor& o,
                   const SlotTensors<false>& final);

// `upstream` holds the gradients of hk and hv.
void slots_backward(Context& context, const char* op, std::optional<double> scale,
                    const SlotTensors<true>& inputs, const Segments* segments,
                    const ConstTensor& d_o, const SlotTensors<true>& upstream,
                    const SlotTensors<false>& grads);

}  // namespace ouzel
