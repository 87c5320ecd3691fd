#include "tests/law_calls.h"

#include <algorithm>
#include <cstdint>
#include <list>

#include "src/ops/registry.h"
#include "tests/by_name.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

const ouzel::Law& find_law(const std::string& name) {
  const auto laws = matrix_laws();
  return **std::ranges::find(laws, name, [](const ouzel::Law* law) { return law->name; });
}

}  // namespace

LawInFloat::LawInFloat(const Call& call, const ByName& a)
    : law(find_law(a.op)), op(law), arguments(a) {
  const Attributes attributes(find_operator(a.op), a.attributes);
  options = {.scale = attributes.number("scale"),
             .use_qk_l2norm = attributes.flag("use_qk_l2norm"),
             .reverse = attributes.flag("reverse"),
             .num_householder = attributes.integer("num_householder").value_or(1),
             .form = call.form};
  for (const LawInput& input : law.inputs) {
    const auto given = a.inputs.find(input.name == nullptr ? "" : input.name);
    if (given == a.inputs.end()) continue;
    const bool is_token = given->second.rank() >= 3;
    memory.push_back({&input, Operand::input(given->second, call.strided && is_token)});
    inputs.*input.tensor = memory.back().operand.tensor();
    if (input.role == LawRole::kQuery) query = given->second.shape;
    if (input.role == LawRole::kValue) value = given->second.shape;
  }
  const auto s0 = a.inputs.find("initial_state");
  if (s0 != a.inputs.end()) initial = state_of(s0->second, {});
  if (call.residue) initial.add_residue(*call.residue);
  inputs.initial_state = initial.view();
  inputs.segments = &a.segments;
}

bool is_matrix_law(const std::string& op) {
  return std::ranges::any_of(matrix_laws(), [&](const ouzel::Law* law) { return law->name == op; });
}

bool is_log_decay(const Call& call, const Slot& slot) {
  const auto* a = std::get_if<ByName>(&call.arguments);
  if (a == nullptr || !is_matrix_law(a->op)) return false;
  return std::ranges::any_of(find_law(a->op).inputs, [&](const LawInput& input) {
    return input.name != nullptr && input.name == slot.name &&
           (input.role == LawRole::kDecay || input.role == LawRole::kValueDecay);
  });
}

Results<float> run_law(Context& context, const Call& call, const ByName& a) {
  LawInFloat in(call, a);
  Operand o = in.output(call.strided), weights;
  StateOperands final;
  RecurrenceOutputs outputs;
  outputs.o = o.tensor();
  if (call.form == Form::kParallel) {
    weights = Operand::output({o.extent(0), o.extent(2), o.extent(1), o.extent(1)});
    outputs.weights = weights.tensor();
  } else {
    final = in.state(a.segments.count());
    if (call.residue) final.add_residue({});
    outputs.final_state = final.view();
  }
  Buffer saved;
  if (call.saved && call.backward()) {
    saved = Buffer(in.op.saved_bytes(in.options, in.inputs));
    outputs.saved = saved.data();
  }
  in.op(context, in.options, in.inputs, outputs);
  Results<float> results;
  results.outputs.push_back({"o", Role::kToken, o.floats()});
  if (weights.present()) results.outputs.push_back({"weights", Role::kWeights, weights.floats()});
  if (final.s.present()) {
    results.outputs.push_back({"final_state", Role::kSequence, final.s.floats()});
  }
  if (call.residue) {
    results.outputs.push_back({"s_residue", Role::kSequence, final.s_residue.floats()});
  }
  if (!call.backward()) return results;

  Operand d_o = Operand::input(call.up("do"), call.strided);
  StateOperands d_final = state_of(call.up("dht"), {});
  StateOperands d_initial{Operand::output_like(in.initial.s), {}, {}, {}, 0, {}};
  RecurrenceInputGrads grads;
  std::list<LawInFloat::Memory> memory;
  for (const auto& [input, operand] : in.memory) {
    memory.push_back({input, operand.rank() >= 3 ? Operand::output_like(operand)
                                                 : Operand::zeros_like(operand)});
    grads.*input->gradient = memory.back().operand.tensor();
  }
  grads.initial_state = d_initial.view();
  in.op.backward(context, in.options, in.inputs, outputs.saved, {d_o.tensor(), d_final.view()},
                 grads);
  for (auto& [input, operand] : memory) {
    const bool is_token = operand.rank() >= 3;
    const Int rows = is_token && o.extent(1) > 0 ? operand.extent(1) / o.extent(1) : 1;
    results.gradients.push_back({std::string("d") + input->name,
                                 is_token ? Role::kToken : Role::kParameter, operand.floats(),
                                 rows});
  }
  if (d_initial.s.present()) {
    results.gradients.push_back({"dh0", Role::kSequence, d_initial.s.floats()});
  }
  return results;
}

Results<float> run_law_steps(Context& context, const Call& call, const ByName& a) {
  LawInFloat in(call, a);
  Operand o = in.output(call.strided);
  StateOperands state = in.initial;
  if (!state.s.present()) state.s = Operand::zeros_like(in.state(o.extent(0)).s);
  const StateView view = state.view();
  for (Int t = 0; t < o.extent(1); ++t) {
    RecurrenceInputs inputs;
    for (auto& [input, operand] : in.memory) {
      const bool is_token = operand.rank() >= 3;
      const Int rows = is_token ? operand.extent(1) / o.extent(1) : 1;
      inputs.*input->tensor = is_token ? operand.tokens(t * rows, rows) : operand.tensor();
    }
    in.op.step(context, in.options, inputs, view, o.tokens(t, 1));
  }
  return {{{"o", Role::kToken, o.floats()}, {"final_state", Role::kSequence, state.s.floats()}},
          {}};
}

}  // namespace ouzel::test
