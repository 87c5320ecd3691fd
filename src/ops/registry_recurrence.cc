#include "src/ops/registry_recurrence.h"

#include <cstdint>
#include <string>
#include <vector>

#include "src/ops/copy_tensor.h"

namespace ouzel {
namespace {

// A state view of two tensors of the call, and what it points to. With a normaliser a state is both
// S and z: one that was not given is zeros.
class CallState {
 public:
  CallState(const OperatorCall& call, Tensor s, Tensor z, bool normalized) {
    if (!s.present() && !z.present()) return;
    const std::int64_t n = call.extent("N"), h = call.extent("HV");
    if (!s.present()) {
      s_ = Array({n, h, call.extent("F"), call.extent("V")});
      s = s_.tensor;
    }
    if (!z.present() && normalized) {
      z_ = Array({n, h, call.extent("F")});
      z = z_.tensor;
    }
    view_ = state_view(s, z, storage_);
  }
  const StateView& view() const { return view_; }

 private:
  Array s_, z_;
  std::vector<SequenceState> storage_;
  StateView view_;
};

}  // namespace

Form form_of(const Attributes& attributes) {
  const std::string form = attributes.text("form");
  return form == "scan" ? Form::kScan : form == "parallel" ? Form::kParallel : Form::kAuto;
}

void run_law(OperatorCall& call, const BoundLaw& law, bool normalized) {
  run_law(call, law, {.q = call.in("q"), .k = call.in("k"), .v = call.in("v")},
          {.q = call.out("dq"), .k = call.out("dk"), .v = call.out("dv")}, normalized);
}

void run_law(OperatorCall& call, const BoundLaw& law, RecurrenceInputs inputs,
             RecurrenceInputGrads grads, bool normalized) {
  const auto state = [&](const Tensor& s, const Tensor& z) {
    return CallState(call, s, z, normalized);
  };
  const CallState initial =
      state(writable(call.in("initial_state")), writable(call.in("initial_z")));
  const CallState final = state(call.out("final_state"), call.out("z"));
  if (call.steps()) {
    call.begin_states();
    law.step(inputs, final.view(), call.out("o"));
    return;
  }
  inputs.initial_state = initial.view();
  inputs.segments = call.segments();
  Buffer own;
  Buffer& saved = call.saved() != nullptr ? *call.saved() : own;
  if (call.wants_outputs()) {
    if (call.backward() || call.saved() != nullptr) saved = Buffer(law.saved_bytes(inputs));
    law.forward(inputs, {.o = call.out("o"),
                         .final_state = final.view(),
                         .weights = call.out("weights"),
                         .saved = saved.data()});
  }
  if (!call.backward()) return;
  const CallState final_grad = state(writable(call.in("dht")), writable(call.in("dzt")));
  const CallState initial_grad = state(call.out("dh0"), call.out("dz0"));
  grads.initial_state = initial_grad.view();
  law.backward(inputs, saved.data(), {.o = call.in("do"), .final_state = final_grad.view()}, grads);
}

}  // namespace ouzel
