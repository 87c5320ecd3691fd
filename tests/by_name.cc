#include "tests/by_name.h"

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>

#include "src/ops/reference/laws.h"
#include "src/ops/reference/named.h"
#include "src/ops/registry.h"
#include "tests/law_calls.h"
#include "tests/operand.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

Role role_of(const TensorInfo& info) {
  if (info.shape.find("T T") != std::string::npos) return Role::kWeights;
  if (info.shape.starts_with("B ")) return Role::kToken;
  return info.shape.starts_with("N ") ? Role::kSequence : Role::kParameter;
}

// The first input has a row a token.
const Doubles& first_input(const OperatorInfo& info, const ByName& a) {
  return a.inputs.at(info.inputs.front().name);
}
Int rows_of(const OperatorInfo& info, const ByName& a, Role role, const Doubles& array) {
  const Int tokens = first_input(info, a).extent(1);
  return role == Role::kToken && tokens > 0 ? array.extent(1) / tokens : 1;
}

// What an operator assumes when it is given none.
bool is_whole(const Segments& segments, const Doubles& x) {
  if (segments.count() != x.extent(0)) return false;
  Int b = 0;
  return std::ranges::all_of(segments.list, [&](const Segment& s) {
    return s.batch == b++ && s.begin == 0 && s.length == x.extent(1);
  });
}

template <class Real>
Named<Real> named(const OperatorInfo& info, const ByName& a, const std::string& name,
                  reference::Array<Real> array) {
  for (const TensorInfo& output : info.outputs) {
    if (output.name == name) return {name, role_of(output), std::move(array)};
  }
  for (const TensorInfo& input : info.inputs) {
    if (input.gradient != name) continue;
    const Role role = role_of(input);
    return {name, role, std::move(array), rows_of(info, a, role, a.inputs.at(input.name))};
  }
  ADD_FAILURE() << info.name << " gives no " << name;
  return {name, Role::kParameter, std::move(array)};
}

}  // namespace

bool is_operator(const std::string& name) {
  return std::ranges::any_of(operators(), [&](const OperatorInfo& info) {
    return info.name == name || std::ranges::count(info.aliases, name) != 0;
  });
}

bool is_law(const std::string& op) { return std::ranges::count(reference::law_names(), op) != 0; }

void add_slots(std::vector<Slot>& list, ByName& a) {
  const OperatorInfo& info = find_operator(a.op);
  for (const TensorInfo& input : info.inputs) {
    const auto found = a.inputs.find(input.name);
    if (found == a.inputs.end() || !found->second.present()) continue;
    const Role role = role_of(input);
    list.push_back({input.name, role, &found->second, rows_of(info, a, role, found->second)});
  }
}

Results<float> run(Context& context, const Call& call, const ByName& a) {
  return is_matrix_law(a.op) ? run_law(context, call, a) : run_by_table(context, call);
}

Results<float> run_by_table(Context& context, const Call& call) {
  const auto& a = std::get<ByName>(call.arguments);
  const OperatorInfo& info = find_operator(a.op);
  std::map<std::string, std::string> attributes = a.attributes;
  if (call.form != Form::kAuto) {
    attributes["form"] = call.form == Form::kScan ? "scan" : "parallel";
  }
  std::list<Operand> memory;
  std::map<std::string, ConstTensor> tensors;
  const auto add = [&](const std::string& name, const Doubles& array, Role role) {
    if (!array.present()) return;
    memory.push_back(Operand::input(array, call.strided && role == Role::kToken));
    tensors[name] = memory.back().tensor();
  };
  for (const auto& [name, array] : a.inputs) {
    const auto input = std::ranges::find(info.inputs, name, &TensorInfo::name);
    add(name, array, input == info.inputs.end() ? Role::kParameter : role_of(*input));
  }
  for (const auto& [name, array] : call.upstream) {
    add(name, array, name == "do" ? Role::kToken : Role::kSequence);
  }
  const bool whole =
      info.find_attribute("cu_seqlens") == nullptr || is_whole(a.segments, first_input(info, a));
  const Segments* segments = whole ? nullptr : &a.segments;
  Results<float> results;
  for (const NamedArray& x : run_operator(context, info, Attributes(info, attributes), tensors,
                                          call.backward(), segments)) {
    const Tensor& t = x.array.tensor;
    Floats array(std::vector<Int>(t.extent.begin(), t.extent.begin() + t.rank));
    std::copy_n(static_cast<const float*>(t.data), array.data.size(), array.data.begin());
    (x.is_gradient ? results.gradients : results.outputs)
        .push_back(named(info, a, x.name, std::move(array)));
  }
  return results;
}

Results<float> run_steps(Context& context, const Call& call, const ByName& a) {
  return run_law_steps(context, call, a);
}

namespace {

// Of an operator among reference::named_references().
Results<double> evaluate(const Call& call, const OperatorInfo& info, const ByName& a) {
  const Attributes attributes(info, a.attributes);
  reference::Setting setting;
  setting.segments = a.segments;
  for (const AttributeInfo& attribute : info.attributes) {
    const std::string& name = attribute.name;
    if (attribute.kind == AttributeKind::kFlag) {
      setting.numbers[name] = attributes.flag(name) ? 1 : 0;
    } else if (const auto number = attributes.number(name)) {
      setting.numbers[name] = *number;
    } else {
      setting.texts[name] = attributes.text(name);
    }
  }
  reference::Tensors<double> upstream;  // by the names of the outputs
  for (const TensorInfo& output : info.outputs) {
    if (call.up(output.gradient).present()) upstream[output.name] = call.up(output.gradient);
  }
  const reference::NamedResults r = reference::evaluate(info.name, a.inputs, setting, upstream);
  Results<double> results;
  for (const TensorInfo& output : info.outputs) {
    const auto found = r.outputs.find(output.name);
    if (found == r.outputs.end()) continue;
    results.outputs.push_back(named(info, a, output.name, found->second));
  }
  for (const TensorInfo& input : info.inputs) {
    const auto found = r.gradients.find(input.name);
    if (found == r.gradients.end() || input.gradient.empty()) continue;
    results.gradients.push_back(named(info, a, input.gradient, found->second));
  }
  return results;
}

}  // namespace

bool has_named_reference(const std::string& op) {
  return is_operator(op) &&
         std::ranges::count(reference::named_references(), find_operator(op).name) != 0;
}

Results<double> run_reference(const Call& call, const ByName& a) {
  if (has_named_reference(a.op)) return evaluate(call, find_operator(a.op), a);
  const Attributes attributes(find_operator(a.op), a.attributes);
  reference::LawArguments<double> law;
  law.law = a.op;
  law.inputs = a.inputs;
  law.segments = a.segments;
  law.scale = attributes.number("scale");
  law.reverse = attributes.flag("reverse");
  law.l2norm = attributes.flag("use_qk_l2norm");
  return run_reference(call, law);
}

Results<double> run_reference(const Call& call, const reference::LawArguments<double>& law) {
  const bool parallel = call.form == Form::kParallel;
  Results<double> results;
  reference::Tensors<double> outputs = reference::law(law);
  const Int tokens = outputs.at("o").extent(1);
  results.outputs.push_back({"o", Role::kToken, outputs.at("o")});
  if (parallel) {
    results.outputs.push_back({"weights", Role::kWeights, reference::law_weights(law)});
  } else {
    results.outputs.push_back({"final_state", Role::kSequence, outputs.at("final_state")});
  }
  if (!call.backward()) return results;
  for (auto& [name, array] : reference::law_backward(law, call.upstream)) {
    if (name == "dh0") {
      if (law.inputs.contains("initial_state")) {
        results.gradients.push_back({name, Role::kSequence, array});
      }
    } else {
      const Role role = array.rank() >= 3 ? Role::kToken : Role::kParameter;
      const Int rows = role == Role::kToken && tokens > 0 ? array.extent(1) / tokens : 1;
      results.gradients.push_back({name, role, array, rows});
    }
  }
  return results;
}

}  // namespace ouzel::test
