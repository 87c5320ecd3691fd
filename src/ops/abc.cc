#include "ouzel/abc.h"

#include "src/ops/slots.h"

namespace ouzel {
namespace {

SlotTensors<true> tensors_of(const char* op, const AbcInputs& in) {
  if (in.hk0.present() != in.hv0.present() || in.hk0.present() != in.lse0.present()) {
    refuse(op, "hk0, hv0 and lse0 are one state: give all three or none");
  }
  return {in.q, in.k, in.v, in.s, {}, in.hk0, in.hv0, in.lse0};
}

}  // namespace

void abc(Context& context, const AbcOptions& options, const AbcInputs& inputs,
         const AbcOutputs& outputs) {
  slots_forward(context, "abc", options.scale, tensors_of("abc", inputs), inputs.segments,
                outputs.o, {.hk = outputs.hkt, .hv = outputs.hvt, .lse = outputs.lset});
}

void abc_backward(Context& context, const AbcOptions& options, const AbcInputs& inputs,
                  const AbcOutputGrads& output_grads, const AbcInputGrads& grads) {
  const char* op = "abc_backward";
  slots_backward(context, op, options.scale, tensors_of(op, inputs), inputs.segments,
                 output_grads.o, {.hk = output_grads.hkt, .hv = output_grads.hvt},
                 {grads.q, grads.k, grads.v, grads.s, {}, grads.hk0, grads.hv0, grads.lse0});
}

void abc_step(Context& context, const AbcOptions& options, const AbcInputs& inputs,
              const Tensor& hk, const Tensor& hv, const Tensor& lse, const Tensor& o) {
  check_step("abc_step", "q", inputs.q, hk);
  AbcInputs token = inputs;
  token.hk0 = hk;
  token.hv0 = hv;
  token.lse0 = lse;
  token.segments = nullptr;
  abc(context, options, token, {o, hk, hv, lse});
}

}  // namespace ouzel
