// The rows of the laws of ouzel/laws.h, from the table of laws.
#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ouzel/laws.h"
#include "src/ops/law.h"
#include "src/ops/registry_recurrence.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

const Law& law_of(const OperatorCall& call) {
  return **std::ranges::find_if(matrix_laws(),
                                [&](const Law* law) { return call.name() == law->name; });
}

void run_matrix_law(OperatorCall& call) {
  const Law& row = law_of(call);
  const MatrixLaw law(row);
  const Attributes& attributes = call.attributes();
  const LawOptions options = {.scale = attributes.number("scale"),
                              .use_qk_l2norm = attributes.flag("use_qk_l2norm"),
                              .l2norm_eps = attributes.number("l2norm_eps").value_or(1e-6),
                              .reverse = attributes.flag("reverse"),
                              .num_householder = attributes.integer("num_householder").value_or(1),
                              .form = form_of(attributes)};
  RecurrenceInputs inputs;
  RecurrenceInputGrads grads;
  for (const LawInput& input : row.inputs) {
    if (input.name == nullptr) break;
    inputs.*input.tensor = call.in(input.name);
    grads.*input.gradient = call.out(std::string("d") + input.name);
  }
  run_law(
      call,
      {.saved_bytes = [&](const auto& in) { return law.saved_bytes(options, in); },
       .forward = [&](const auto& in, const auto& out) { law(call.context(), options, in, out); },
       .backward =
           [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
             law.backward(call.context(), options, in, saved, d_out, d_in);
           },
       .step = [&](const auto& in, const auto& state,
                   const auto& o) { law.step(call.context(), options, in, state, o); }},
      inputs, grads);
}

OperatorInfo row_of(const Law& law) {
  OperatorInfo info;
  info.name = law.name;
  info.formula = law.formula;
  info.source = law.source;
  for (const LawInput& input : law.inputs) {
    if (input.name == nullptr) break;
    info.inputs.push_back({input.name, input.shape, std::string("d") + input.name, input.optional});
  }
  info.inputs.push_back(kInitialStateTensor);
  info.outputs = {
      kOutputTensor,
      kFinalStateTensor,
      {"weights", law.many_rows() ? "B HO T TN" : "B HO T T", "", false, "form=parallel"}};
  AttributeInfo scale = kScaleAttribute;
  scale.meaning = fmt::format("Factor on {} (default: {})", info.inputs.front().name,
                              law.unit_scale ? "1" : "K^-0.5");
  info.attributes = {scale, kReverseAttribute, kCuSeqlensAttribute, kFormAttribute};
  if (law.erase == EraseKind::kCollinear) {
    info.attributes.push_back({"use_qk_l2norm", kFlag,
                               std::string("q, k") + (law.has(LawRole::kEraseKey) ? " and p" : "") +
                                   " are x / sqrt(x . x + l2norm_eps)",
                               "false"});
    info.attributes.push_back(
        {"l2norm_eps", kNumber, "Added to the square of the length", "1e-6", {}, kNotNegative});
  }
  if (law.many_rows()) {
    info.attributes.push_back({"num_householder",
                               kInteger,
                               "Rows of k, v and beta for each token (TN = T times it)",
                               "1",
                               {},
                               {1, 1 << 20}});
  }
  info.run = run_matrix_law;
  for (TensorInfo& input : info.inputs) input.takes_half = !input.is_state();
  // Useful operations a token and number of the state: a gradient of log decays costs 2 more.
  const double decays = law.decay == DecayKind::kNone ? 0 : 2;
  switch (law.erase) {
    case EraseKind::kNone:
      info.cost = {4, 10 + decays};
      break;
    case EraseKind::kCollinear:
      info.cost = {6, 14 + decays};
      break;
    case EraseKind::kGeneral:
      info.cost = {8, 20 + decays};
      break;
  }
  return info;
}

}  // namespace

std::vector<OperatorInfo> matrix_law_rows() {
  std::vector<OperatorInfo> rows;
  for (const Law* law : matrix_laws()) rows.push_back(row_of(*law));
  return rows;
}

}  // namespace ouzel
