// The table of operators, and calls of it. The functions that users see are written from the table
// by ouzel/_operators.py; they end here.
#include "python/src/operators.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/feature_map.h"
#include "python/src/arguments.h"
#include "python/src/arrays.h"
#include "python/src/context.h"
#include "src/base/dense_tensor.h"
#include "src/base/text.h"
#include "src/ops/explain.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry.h"

namespace ouzel::python {
namespace {

const char* name_of(AttributeKind kind) {
  switch (kind) {
    case AttributeKind::kFlag:
      return "bool";
    case AttributeKind::kInteger:
      return "int";
    case AttributeKind::kNumber:
      return "float";
    case AttributeKind::kText:
      return "str";
    case AttributeKind::kIntegers:
      return "Sequence[int]";
  }
  return "";
}

nb::list table_of(const std::vector<TensorInfo>& tensors) {
  nb::list list;
  for (const TensorInfo& tensor : tensors) {
    list.append(nb::make_tuple(tensor.name, tensor.shape, tensor.gradient, tensor.optional,
                               tensor.when, tensor.dtype == DType::kF64 ? "float64" : "float32",
                               tensor.is_state(), tensor.gradient_when));
  }
  return list;
}

nb::list table() {
  nb::list list;
  for (const OperatorInfo& info : operators()) {
    nb::list attributes;
    for (const AttributeInfo& attribute : info.attributes) {
      attributes.append(nb::make_tuple(attribute.name, name_of(attribute.kind), attribute.meaning,
                                       attribute.fallback, attribute.choices));
    }
    list.append(nb::make_tuple(info.name, info.aliases, info.formula, info.source,
                               table_of(info.inputs), table_of(info.outputs), attributes));
  }
  return list;
}

// A value of Python as the text of an attribute. Throws what Python's conversion throws.
std::string text_of(AttributeKind kind, nb::handle value) {
  const auto integer = [](nb::handle x) { return nb::cast<std::string>(nb::str(index_of(x))); };
  switch (kind) {
    case AttributeKind::kText: {
      const nb::str text(value);
      const char* utf8 = PyUnicode_AsUTF8(text.ptr());  // null: it has surrogates
      if (utf8 == nullptr) throw nb::python_error();
      return utf8;
    }
    case AttributeKind::kFlag:
      return printable(nb::str(value).attr("lower")());  // True of Python and of NumPy
    case AttributeKind::kInteger:
      return integer(value);
    case AttributeKind::kNumber: {
      const double number = PyFloat_AsDouble(value.ptr());
      if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
      return fmt::format("{}", number);
    }
    case AttributeKind::kIntegers: {
      std::string text;
      for (const nb::handle x : nb::iter(value)) text += (text.empty() ? "" : ",") + integer(x);
      return "[" + text + "]";
    }
  }
  return "";
}

// Whether a value of Python is its attribute's default, as a signature has it: told without text,
// which would cost a call of a few microseconds a tenth of its time.
bool is_default(const AttributeInfo& attribute, nb::handle value) {
  const std::string& fallback = attribute.fallback;
  if (fallback.empty()) return false;
  if (PyBool_Check(value.ptr())) {
    return attribute.kind == AttributeKind::kFlag && (fallback == "true") == value.is(Py_True);
  }
  if (PyUnicode_CheckExact(value.ptr())) {
    return attribute.kind == AttributeKind::kText &&
           PyUnicode_CompareWithASCIIString(value.ptr(), fallback.c_str()) == 0;
  }
  return attribute.kind == AttributeKind::kNumber && PyFloat_CheckExact(value.ptr()) &&
         parsed<double>(fallback) == PyFloat_AS_DOUBLE(value.ptr());
}

// Whether it is of a type that no array is.
bool is_scalar(nb::handle value) {
  return PyBool_Check(value.ptr()) || PyUnicode_CheckExact(value.ptr()) ||
         PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr());
}

// Those values of Python, in the order of the table, that are not the defaults.
Attributes attributes_of(const OperatorInfo& info, const nb::tuple& values) {
  std::map<std::string, std::string> map;
  for (std::size_t i = 0; i < info.attributes.size(); ++i) {
    const nb::handle value = values[i];
    const AttributeInfo& attribute = info.attributes[i];
    if (value.is_none() || is_default(attribute, value)) continue;
    if (attribute.kind != AttributeKind::kIntegers && !is_scalar(value) &&
        nb::hasattr(value, "ndim") && nb::cast<std::int64_t>(value.attr("ndim")) > 0) {
      throw nb::type_error(
          fmt::format("{}: {} is of type {}, not an array; optional tensors, and gradients from "
                      "above, are given by name: {}=...",
                      info.name, attribute.name, name_of(attribute.kind),
                      info.outputs.front().gradient)
              .c_str());
    }
    map.emplace(attribute.name, converted(info.name, attribute.name, name_of(attribute.kind),
                                          [&] { return text_of(attribute.kind, value); }));
  }
  return {info, map};
}

// What a forward call saves for its backward call.
struct Saved {
  Buffer memory;
};

// One call from Python: its arrays in the order of the table, those of gradients from above last.
class Call {
 public:
  Call(std::size_t index, const nb::tuple& arrays, const nb::tuple& attributes, bool backward)
      : info_(operators()[index]), arrays_(arrays), attributes_(attributes_of(info_, attributes)) {
    std::vector<const std::string*> names;
    std::vector<const TensorInfo*> rows;
    const auto list = [&](const std::string& name, const TensorInfo& row) {
      names.push_back(&name);
      rows.push_back(&row);
    };
    for (const TensorInfo& input : info_.inputs) list(input.name, input);
    if (backward) {
      for (const TensorInfo& output : info_.outputs) {
        if (!output.gradient.empty()) list(output.gradient, output);
      }
    }
    given_.reserve(names.size());
    std::map<std::string, ConstTensor> tensors;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const nb::handle array = arrays[i];
      if (array.is_none()) continue;
      given_.emplace_back(array, info_.name, *names[i]);
      check_type(*rows[i], *names[i], array);
      tensors.emplace(*names[i], given_.back().tensor());
      if (!like_.is_valid()) like_ = array;
    }
    call_.emplace(info_, attributes_, tensors, backward);
  }

  void share(Saved* saved) {
    if (saved != nullptr) call_->share(saved->memory);
  }
  const OperatorInfo& info() const { return info_; }
  const std::vector<ResultInfo>& results() const { return call_->results(); }

  // Computes the wanted results.
  template <class Wanted>
  void run(PyContext& context, Wanted&& wanted) {
    for (const ResultInfo& result : results()) {
      if (!wanted(result)) continue;
      const auto place =
          memory_.emplace(result.name, ResultArray(result.shape, result.dtype)).first;
      call_->put(result.name, place->second.tensor());
    }
    context.run([&](Context& with, Workspace&) { call_->run(with); });
  }
  // Computes the first output, and updates the states that were given.
  void step(PyContext& context) {
    for (std::size_t i = 0; i < info_.inputs.size(); ++i) {
      const TensorInfo& input = info_.inputs[i];
      if (!input.is_state() || arrays_[i].is_none()) continue;
      GivenArray::check_writable(arrays_[i], info_.name, input.name);
    }
    call_->update_states();
    run(context,
        [this](const ResultInfo& result) { return result.name == results().front().name; });
  }
  // None if it was not wanted.
  nb::object take(const std::string& result) {
    const auto found = memory_.find(result);
    return found == memory_.end() ? nb::none() : found->second.release(like_);
  }

 private:
  // Of the array that was taken last.
  void check_type(const TensorInfo& row, const std::string& name, nb::handle array) const {
    const ConstTensor& tensor = given_.back().tensor();
    const std::string wanted = wanted_type(row, tensor.dtype);
    if (wanted.empty()) return;
    // ouzel.torch hands its tensors over as capsules.
    const bool numpy = nb::hasattr(array, "astype"), wide = row.dtype == DType::kF64;
    const char* const remedy = numpy ? (wide ? ".astype(np.float64)" : ".astype(np.float32)")
                                     : (wide ? ".double()" : ".float()");
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: {} is {}; {} was expected: convert it first, as by {}{}",
                            info_.name, name, described(tensor), wanted, name, remedy));
  }

  const OperatorInfo& info_;
  nb::tuple arrays_;
  Attributes attributes_;
  std::vector<GivenArray> given_;
  nb::handle like_;
  std::optional<OperatorCall> call_;
  std::map<std::string, ResultArray> memory_;
};

// Throws Error(kInvalidArgument) if the attributes leave no state to return.
void check_state(const Call& call) {
  const auto is_final = [](const ResultInfo& r) { return r.is_state && !r.is_gradient; };
  if (std::ranges::any_of(call.results(), is_final)) return;
  const auto& outputs = call.info().outputs;
  const auto state = std::ranges::find_if(outputs, &TensorInfo::is_state);
  if (state == outputs.end()) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: output_final_state asks for {}, which is only given with {}; leave "
                          "it out",
                          call.info().name, state->name, joined(split(state->when, ' '))));
}

// The outputs by name: the first, the final state (None if not asked for) and what else the
// attributes call for.
nb::dict outputs(std::size_t index, const nb::tuple& arrays, const nb::tuple& attributes,
                 nb::handle output_final_state, nb::handle context, Saved* saved) {
  const std::string& name = operators()[index].name;
  const bool states = flag_of(name, "output_final_state", output_final_state);
  PyContext& with = context_of(name, context);
  Call call(index, arrays, attributes, /*backward=*/false);
  if (states) check_state(call);
  call.share(saved);
  call.run(with, [&](const ResultInfo& result) { return states || !result.is_state; });
  nb::dict named;
  bool first_state = true;
  for (const TensorInfo& output : call.info().outputs) {
    const bool given =
        std::ranges::find(call.results(), output.name, &ResultInfo::name) != call.results().end();
    if (given || (output.is_state() && first_state)) {
      named[output.name.c_str()] = call.take(output.name);
    }
    first_state = first_state && !output.is_state();
  }
  return named;
}

// The outputs in order: the first alone if there is no other, else a tuple.
nb::object forward(std::size_t index, const nb::tuple& arrays, const nb::tuple& attributes,
                   nb::handle output_final_state, nb::handle context) {
  const nb::list results =
      outputs(index, arrays, attributes, output_final_state, context, nullptr).values();
  return results.size() == 1 ? nb::object(results[0]) : nb::object(nb::tuple(results));
}

// The first output; the states that were given are updated.
nb::object step(std::size_t index, const nb::tuple& arrays, const nb::tuple& attributes,
                nb::handle context) {
  PyContext& with = context_of(operators()[index].name, context);
  Call call(index, arrays, attributes, /*backward=*/false);
  call.step(with);
  return call.take(call.results().front().name);
}

constexpr std::pair<const char*, DType> kTypes[] = {{"float32", DType::kF32},
                                                    {"float64", DType::kF64},
                                                    {"bfloat16", DType::kBF16},
                                                    {"float16", DType::kF16}};

// (name, type, shape) of the outputs that a call gives, states among them, from the (type, shape)
// of its tensors.
nb::list infer(std::size_t index, const nb::tuple& tensors, const nb::tuple& attributes) {
  const OperatorInfo& info = operators()[index];
  const Attributes values = attributes_of(info, attributes);
  std::map<std::string, ConstTensor> given;
  for (std::size_t i = 0; i < info.inputs.size(); ++i) {
    if (tensors[i].is_none()) continue;
    const std::string& name = info.inputs[i].name;
    const auto type = nb::cast<std::string>(tensors[i][0]);
    const auto shape = nb::cast<std::vector<std::int64_t>>(tensors[i][1]);
    const auto* const known =
        std::ranges::find(kTypes, type, [](const auto& x) { return std::string_view(x.first); });
    if (known == std::end(kTypes) || shape.size() > static_cast<std::size_t>(kMaxRank)) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{}: {} is {} of {} axes; float32, bfloat16 or float16 of at most {} "
                              "was expected",
                              info.name, name, type, shape.size(), kMaxRank));
    }
    ConstTensor tensor;
    tensor.dtype = known->second;
    tensor.rank = static_cast<int>(shape.size());
    std::ranges::copy(shape, tensor.extent.begin());
    given.emplace(name, tensor);
  }
  nb::list results;
  const OperatorCall call(info, values, given, /*backward=*/false);
  for (const ResultInfo& result : call.results()) {
    const auto* const type =
        std::ranges::find(kTypes, result.dtype, &std::pair<const char*, DType>::second);
    results.append(nb::make_tuple(result.name, type->first, result.shape));
  }
  return results;
}

// The gradients of all inputs that were given, by name; with `wanted`, a bool for each input, of
// those only.
nb::dict vjp(std::size_t index, const nb::tuple& arrays, const nb::tuple& attributes,
             nb::handle context, const std::optional<std::vector<bool>>& wanted, Saved* saved) {
  PyContext& with = context_of(operators()[index].name, context);
  Call call(index, arrays, attributes, /*backward=*/true);
  call.share(saved);
  const std::vector<TensorInfo>& inputs = call.info().inputs;
  const auto is_wanted = [&](const ResultInfo& result) {
    if (!result.is_gradient || !wanted) return result.is_gradient;
    const auto input = std::ranges::find(inputs, result.name, &TensorInfo::gradient);
    return wanted->at(static_cast<std::size_t>(input - inputs.begin())) != 0;
  };
  call.run(with, is_wanted);
  nb::dict gradients;
  for (const ResultInfo& result : call.results()) {
    if (is_wanted(result)) gradients[result.name.c_str()] = call.take(result.name);
  }
  return gradients;
}

nb::object draw_projection(nb::handle given_seed, nb::handle given_rows, nb::handle given_keys,
                           nb::handle given_norms) {
  constexpr const char* kCall = "draw_orthogonal_projection";
  const auto seed = whole_of<std::uint64_t>(kCall, "seed", given_seed);
  const auto rows = whole_of<std::int64_t>(kCall, "rows", given_rows);
  const auto keys = whole_of<std::int64_t>(kCall, "keys", given_keys);
  const std::string norms = string_of(kCall, "norms", given_norms);
  if (norms != "chi" && norms != "sqrt") {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: norms '{}' is not one of chi, sqrt", kCall, norms));
  }
  // Checked before there is memory.
  const bool empty = rows < 1 || keys < 1;
  ResultArray w(empty ? std::vector<std::int64_t>{0, 0} : std::vector<std::int64_t>{rows, keys},
                DType::kF32);
  const Tensor memory = w.tensor();
  draw_orthogonal_projection(seed, norms == "chi" ? ProjectionNorms::kChi : ProjectionNorms::kSqrt,
                             View<float, 2>(static_cast<float*>(memory.data), {rows, keys}));
  return w.release(nb::none());
}

nb::dict dict_of(const TokenCost& cost) {
  nb::dict dict;
  dict["projections"] = cost.projections;
  dict["mixing"] = cost.mixing;
  dict["bytes"] = cost.bytes;
  return dict;
}

nb::dict dict_of(const MechanismCost& cost) {
  nb::dict dict;
  dict["training"] = dict_of(cost.training);
  dict["prefill"] = dict_of(cost.prefill);
  dict["decode"] = dict_of(cost.decode);
  return dict;
}

nb::dict explain_law(nb::handle law, nb::handle tokens, nb::handle keys, nb::handle values,
                     nb::handle heads) {
  const auto size = [](const char* name, nb::handle value) {
    return whole_of<std::int64_t>("explain", name, value);
  };
  const OperatorInfo& info = find_operator(string_of("explain", "law", law));
  const Explanation e = explain(info, {.tokens = size("T", tokens),
                                       .keys = size("K", keys),
                                       .values = size("V", values),
                                       .heads = size("H", heads)});
  nb::dict dict;
  dict["law"] = info.name;
  dict["formula"] = info.formula;
  dict["source"] = info.source;
  dict["costs"] = dict_of(e.law);
  dict["softmax_costs"] = dict_of(e.softmax);
  dict["state_bytes"] = e.state_bytes;
  dict["softmax_naive_bytes"] = e.naive_bytes;
  dict["softmax_online_bytes"] = e.online_bytes;
  dict["softmax_cache_bytes"] = e.cache_bytes;
  dict["training_crossing"] = e.training_crossing;
  dict["prefill_crossing"] = e.prefill_crossing;
  dict["decode_crossing"] = e.decode_crossing;
  dict["memory_crossing"] = e.memory_crossing;
  return dict;
}

}  // namespace

void bind_operators(nb::module_& module) {
  module.def("table", table);
  module.def("meaning_of_letter", &meaning_of_letter);
  nb::class_<Saved>(module, "Saved").def(nb::init<>());
  module.def("outputs", outputs, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none(), nb::arg("saved") = nb::none());
  module.def("infer", infer);
  module.def("forward", forward, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none());
  module.def("step", step, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("vjp", vjp, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg("wanted") = nb::none(), nb::arg("saved") = nb::none());
  module.def(
      "draw_orthogonal_projection", draw_projection, nb::arg("seed").none(), nb::arg("rows").none(),
      nb::arg("keys").none(), nb::arg("norms").none() = "chi",
      "The random projection of FAVOR+, W of the feature maps favor_...: float32 [rows, keys], "
      "Gaussian\nrows, orthogonal to each other within blocks of `keys`, of the lengths of "
      "Gaussian rows (norms\n'chi': unbiased) or all keys^0.5 ('sqrt'). The same numbers for "
      "the same seed, anywhere.");
  module.def("explain", explain_law, nb::arg("law").none(), nb::arg("T").none(),
             nb::arg("K").none(), nb::arg("V").none(), nb::arg("H").none());
}

}  // namespace ouzel::python
