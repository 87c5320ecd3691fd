#include "ouzel/gsa.h"

#include "src/ops/slots.h"

namespace ouzel {
namespace {

// Absent gates would make the slots averages.
SlotTensors<true> tensors_of(const char* op, const GsaInputs& in) {
  if (!in.g.present()) refuse(op, "g must be given");
  return {in.q, in.k, in.v, in.s, in.g, in.hk0, in.hv0, {}};
}

}  // namespace

void gsa(Context& context, const GsaOptions& options, const GsaInputs& inputs,
         const GsaOutputs& outputs) {
  slots_forward(context, "gsa", options.scale, tensors_of("gsa", inputs), inputs.segments,
                outputs.o, {.hk = outputs.hkt, .hv = outputs.hvt});
}

void gsa_backward(Context& context, const GsaOptions& options, const GsaInputs& inputs,
                  const GsaOutputGrads& output_grads, const GsaInputGrads& grads) {
  const char* op = "gsa_backward";
  slots_backward(context, op, options.scale, tensors_of(op, inputs), inputs.segments,
                 output_grads.o, {.hk = output_grads.hkt, .hv = output_grads.hvt},
                 {grads.q, grads.k, grads.v, grads.s, grads.g, grads.hk0, grads.hv0, {}});
}

void gsa_step(Context& context, const GsaOptions& options, const GsaInputs& inputs,
              const Tensor& hk, const Tensor& hv, const Tensor& o) {
  check_step("gsa_step", "q", inputs.q, hk);
  GsaInputs token = inputs;
  token.hk0 = hk;
  token.hv0 = hv;
  token.segments = nullptr;
  gsa(context, options, token, {o, hk, hv});
}

}  // namespace ouzel
