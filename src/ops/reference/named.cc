#include "src/ops/reference/named.h"

#include <cstddef>

#include "src/ops/reference/averages.h"
#include "src/ops/reference/learners.h"
#include "src/ops/reference/normalized.h"
#include "src/ops/reference/scans.h"
#include "src/ops/reference/slots.h"
#include "src/ops/reference/traced.h"

namespace ouzel::reference {
namespace {

using Reference = Tensors<Var> (*)(const Tensors<Var>&, const Setting&);

const std::map<std::string, Reference>& table() {
  static const std::map<std::string, Reference> references = {
      {"abc", abc},
      {"efficient_attention", efficient_attention},
      {"gated_oja_rule", gated_oja_rule},
      {"gsa", gsa},
      {"hgrn", hgrn},
      {"lambda_layer", lambda_layer},
      {"log_linear_attention", log_linear_attention},
      {"mlstm", mlstm},
      {"nadaraya_watson", nadaraya_watson},
      {"rfa_gate", rfa_gate},
      {"rg_lru", rg_lru},
      {"rwkv4", rwkv4},
      {"selective_scan", selective_scan},
      {"ttt_linear", ttt_linear},
  };
  return references;
}

}  // namespace

std::vector<std::string> named_references() {
  std::vector<std::string> names;
  for (const auto& [name, reference] : table()) names.push_back(name);
  return names;
}

NamedResults evaluate(const std::string& op, const Tensors<double>& inputs, const Setting& setting,
                      const Tensors<double>& upstream) {
  Tape<double> tape;
  Tensors<Var> in;
  for (const auto& [name, array] : inputs) {
    Vars& vars = in[name] = Vars(array.shape);
    for (std::size_t i = 0; i < array.data.size(); ++i) {
      vars.data[i] = {array.data[i], upstream.empty() ? 0 : tape.variable()};
    }
  }
  const Tensors<Var> out = table().at(op)(in, setting);
  NamedResults results;
  for (const auto& [name, vars] : out) {
    Array<double>& array = results.outputs[name] = Array<double>(vars.shape);
    for (std::size_t i = 0; i < vars.data.size(); ++i) array.data[i] = vars.data[i].value;
  }
  if (upstream.empty()) return results;
  std::vector<double> seed(tape.size());
  for (const auto& [name, array] : upstream) {
    const Vars& vars = out.at(name);
    for (std::size_t i = 0; i < array.data.size(); ++i) seed[vars.data[i].node] += array.data[i];
  }
  const std::vector<double> gradients = tape.gradients(std::move(seed));
  for (const auto& [name, vars] : in) {
    Array<double>& array = results.gradients[name] = Array<double>(vars.shape);
    for (std::size_t i = 0; i < vars.data.size(); ++i) {
      array.data[i] = gradients[vars.data[i].node];
    }
  }
  return results;
}

}  // namespace ouzel::reference
