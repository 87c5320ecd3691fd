// `ouzel attend`: any operator of the table, run on the tensors of a file.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/compare.h"
#include "apps/ouzel/program.h"
#include "apps/ouzel/signature.h"
#include "ouzel/error.h"
#include "src/base/text.h"
#include "src/formats/safetensors.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry.h"

namespace ouzel::app {
namespace {

struct Options {
  std::string input, output, op, dtype = "f32";
  std::map<std::string, std::string> attributes;  // given as flags; empty: not given
  bool backward = false, compare = false, list = false, ignore_metadata = false;
  CommonOptions common;
};

const char* value_name(AttributeKind kind) {
  switch (kind) {
    case AttributeKind::kInteger:
      return "N";
    case AttributeKind::kNumber:
      return "X";
    case AttributeKind::kIntegers:
      return "N,N,...";
    case AttributeKind::kText:
    case AttributeKind::kFlag:
      break;
  }
  return "NAME";
}

// Notes of whoever wrote a file, which are no attributes: the documented ones of docs/laws.md.
bool is_note(const std::string& key) {
  static const std::set<std::string> kNotes = {"op",
                                               "case",
                                               "formula",
                                               "source",
                                               "reference",
                                               "inputs",
                                               "outputs",
                                               "upstream",
                                               "grads",
                                               "loss",
                                               "tags",
                                               "seed",
                                               "scale_is_default",
                                               "attributes",
                                               "explicit_attributes",
                                               "opset",
                                               "onnx_test",
                                               "dtype",
                                               "no_state_means",
                                               "license",
                                               "format",
                                               "note"};
  return kNotes.contains(key) || key.starts_with("check_");
}

// Metadata are attributes of the operator, notes, or mistakes. Mistakes are errors, because a
// result without them would be wrong in silence; so is an attribute of another operator, unless it
// is off.
void check_metadata(const std::string& path, const OperatorInfo& info, const std::string& key,
                    const std::string& value) {
  const bool elsewhere =
      std::any_of(operators().begin(), operators().end(),
                  [&](const OperatorInfo& other) { return other.find_attribute(key) != nullptr; });
  const bool off = value == "false" || value == "null" || value == "0";
  if (is_note(key) || (elsewhere && off)) return;
  const std::vector<std::string> names = info.attribute_names();
  const std::string near = did_you_mean(key, names);
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("{}: {} has no attribute '{}', which the metadata set to '{}'{}{} It takes "
                  "{}; --ignore-metadata reads attributes from flags alone",
                  path, info.name, printable(key), printable(value, 60), near,
                  near.empty() ? "." : "", joined(names)));
}

std::map<std::string, std::string> attributes_of(const SafetensorsReader& file,
                                                 const OperatorInfo& info, const Options& options) {
  std::map<std::string, std::string> attributes;
  for (const auto& [key, value] : file.metadata()) {
    if (options.ignore_metadata) break;
    if (info.find_attribute(key) != nullptr) {
      attributes[key] = value;
    } else {
      check_metadata(file.path(), info, key, value);
    }
  }
  for (const auto& [key, value] : options.attributes) {
    if (!value.empty()) attributes[key] = value;
  }
  return attributes;
}

// Throws Error(kInvalidArgument) for a flag that the operator does not take, or its value.
void check_flags(const OperatorInfo& info, const std::map<std::string, std::string>& flags) {
  std::map<std::string, std::string> given;
  for (const auto& [key, value] : flags) {
    if (!value.empty()) given[key] = value;
  }
  const Attributes checked(info, given);
}

// Names of what the operator gives: tensors of these names in the input are expected values.
std::vector<std::string> result_names(const OperatorInfo& info) {
  std::vector<std::string> names;
  for (const TensorInfo& output : info.outputs) names.push_back(output.name);
  for (const TensorInfo& input : info.inputs) {
    if (!input.gradient.empty()) names.push_back(input.gradient);
  }
  return names;
}

struct Inputs {
  std::map<std::string, Array> memory;
  std::map<std::string, ConstTensor> tensors;
  bool narrow = false;   // some were 16-bit floats
  bool rounded = false;  // to them, and are no more the numbers of the file
};

Inputs read_inputs(const SafetensorsReader& file, const OperatorInfo& info, bool backward) {
  Inputs inputs;
  const std::vector<std::string> results = result_names(info);
  const auto row_of = [](const std::vector<TensorInfo>& rows, auto&& test) {
    const auto found = std::find_if(rows.begin(), rows.end(), test);
    return found == rows.end() ? nullptr : &*found;
  };
  for (const NamedTensor& tensor : file.tensors()) {
    const TensorInfo* input =
        row_of(info.inputs, [&](const TensorInfo& row) { return row.name == tensor.name; });
    const TensorInfo* upstream =
        row_of(info.outputs, [&](const TensorInfo& row) { return row.gradient == tensor.name; });
    const bool expected = std::count(results.begin(), results.end(), tensor.name) != 0;
    if (input == nullptr && (expected || (upstream != nullptr && !backward))) continue;
    if (tensor.shape.size() > static_cast<std::size_t>(kMaxRank)) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("{}: {} has shape {}; no tensor of an operator has more than {} "
                      "extents",
                      info.name, printable(tensor.name), shape_string(tensor.shape), kMaxRank));
    }
    if (!tensor.is_float()) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{}: {} is of type {}; F32, F64, BF16 or F16 was expected", info.name,
                              printable(tensor.name), printable(tensor.type, 16)));
    }
    const DType dtype = input != nullptr ? input->dtype : DType::kF32;
    Array array(tensor.shape, dtype);
    if (dtype == DType::kF64) {
      file.read_f64(tensor, array.memory.as<double>());
    } else {
      file.read_f32(tensor, array.memory.f32());
    }
    inputs.narrow |= tensor.dtype == DType::kF16 || tensor.dtype == DType::kBF16;
    inputs.tensors[tensor.name] = array.tensor;
    inputs.memory[tensor.name] = std::move(array);
  }
  return inputs;
}

// Rounds to 16 bits what may have them: not states, and not what the table has in float64.
void round_inputs(Context& context, const OperatorInfo& info, DType dtype, Inputs& inputs) {
  const auto round = [&](const std::string& name, const TensorInfo& row) {
    const auto found = inputs.tensors.find(name);
    if (found == inputs.tensors.end() || row.is_state() || row.dtype != DType::kF32) return;
    const ConstTensor& wide = found->second;
    const std::vector<std::int64_t> shape(wide.extent.begin(), wide.extent.begin() + wide.rank);
    Array narrow(shape, dtype), back(shape);
    copy_tensor(context, wide, narrow.tensor);
    copy_tensor(context, narrow.tensor, back.tensor);
    const auto bytes = static_cast<std::size_t>(4 * wide.size());
    inputs.rounded |= bytes != 0 && std::memcmp(back.tensor.data, wide.data, bytes) != 0;
    found->second = narrow.tensor;
    inputs.memory[name] = std::move(narrow);
  };
  for (const TensorInfo& row : info.inputs) round(row.name, row);
  for (const TensorInfo& row : info.outputs) round(row.gradient, row);
  inputs.narrow = true;
}

// What the file expects belongs to its numbers: once they are rounded, no bound holds.
Bounds bounds_of(const Inputs& inputs, Isa isa) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (inputs.rounded) return {kNone, kNone};
  return bounds_on(isa, inputs.narrow ? kHalf : kFloat32);
}

std::vector<NamedArray> results_of(Context& context, const OperatorInfo& info,
                                   const Attributes& attributes, const Inputs& inputs,
                                   bool backward) {
  OperatorCall call(info, attributes, inputs.tensors, backward);
  std::vector<NamedArray> results;
  for (const ResultInfo& result : call.results()) {
    results.push_back({result.name, result.is_gradient, Array(result.shape, result.dtype)});
    call.put(result.name, results.back().array.tensor);
  }
  call.run(context);
  return results;
}

std::vector<NamedArray> in_float32(Context& context, std::vector<NamedArray> results) {
  for (NamedArray& result : results) {
    const Tensor& narrow = result.array.tensor;
    Array wide({narrow.extent.begin(), narrow.extent.begin() + narrow.rank});
    copy_tensor(context, narrow, wide.tensor);
    result.array = std::move(wide);
  }
  return results;
}

// What an attribute means, may be and is if it is not given.
std::string explained(const AttributeInfo& attribute) {
  std::string text = attribute.meaning;
  const NumberRange& range = attribute.range;
  const bool is_open = !std::isfinite(range.least) && !std::isfinite(range.above);
  if (!attribute.choices.empty()) text += ": " + joined(attribute.choices);
  if (!is_open) text += ", " + attribute.domain();
  if (!attribute.fallback.empty()) text += " [default: " + attribute.fallback + "]";
  return text;
}

Json to_json(const std::vector<TensorInfo>& tensors) {
  Json list = Json::array();
  for (const TensorInfo& info : tensors) {
    list.push_back({{"name", info.name},
                    {"shape", info.shape},
                    {"gradient", info.gradient},
                    {"optional", info.optional},
                    {"when", info.when}});
  }
  return list;
}

Json to_json(const OperatorInfo& info) {
  Json attributes = Json::array();
  for (const AttributeInfo& attribute : info.attributes) {
    attributes.push_back({{"name", attribute.name},
                          {"meaning", attribute.meaning},
                          {"domain", attribute.domain()},
                          {"default", attribute.fallback},
                          {"choices", attribute.choices}});
  }
  return {{"name", info.name},
          {"aliases", info.aliases},
          {"formula", info.formula},
          {"source", info.source},
          {"inputs", to_json(info.inputs)},
          {"outputs", to_json(info.outputs)},
          {"attributes", attributes}};
}

void write_operator(const OperatorInfo& info) {
  write_out(fmt::format("{}{}\n  {}\n  {}\n  in   {}\n  out  {}\n", info.name,
                        info.aliases.empty() ? "" : " (" + joined(info.aliases) + ")", info.formula,
                        info.source, signature(info.inputs, false), signature(info.outputs, true)));
  for (const AttributeInfo& attribute : info.attributes) {
    write_out(fmt::format("  {:<18} {}\n", flag_of(attribute.name), explained(attribute)));
  }
  write_out("\n");
}

// The operators of this name or alias, else those whose names have `text` in them; all for "".
std::vector<const OperatorInfo*> operators_like(const std::string& text) {
  std::vector<const OperatorInfo*> exact, like;
  for (const OperatorInfo& info : operators()) {
    std::vector<std::string> names = info.aliases;
    names.push_back(info.name);
    if (std::ranges::count(names, text) != 0) exact.push_back(&info);
    const auto has_text = [&](const std::string& name) {
      return name.find(text) != std::string::npos;
    };
    if (std::ranges::any_of(names, has_text)) like.push_back(&info);
  }
  if (like.empty()) as_usage([&] { like.push_back(&find_operator(text)); });
  return exact.empty() ? like : exact;
}

void list_operators(const std::string& text, bool json) {
  const std::vector<const OperatorInfo*> list = operators_like(text);
  std::set<std::string> letters;
  Json all = Json::array(), meanings = Json::object();
  for (const OperatorInfo* info : list) {
    json ? all.push_back(to_json(*info)) : write_operator(*info);
    for (const auto* tensors : {&info->inputs, &info->outputs}) {
      for (const TensorInfo& tensor : *tensors) letters.merge(letters_of(tensor));
    }
  }
  for (const std::string& letter : letters) {
    const std::string meaning = meaning_of_letter(letter);
    if (meaning.empty()) continue;  // a digit
    json ? void(meanings[letter] = meaning)
         : write_out(fmt::format("  {:<3} {}\n", letter, meaning));
  }
  if (json) write_json({{"operators", all}, {"letters", meanings}});
}

void write_results(const Options& options, const OperatorInfo& info, const Attributes& attributes,
                   const std::vector<NamedArray>& results) {
  std::vector<TensorToWrite> tensors;
  for (const NamedArray& result : results) tensors.push_back({result.name, result.array.tensor});
  std::map<std::string, std::string> metadata = attributes.values();
  metadata["op"] = info.name;
  write_safetensors(options.output, tensors, metadata);
}

int run(const Options& options) {
  if (options.list) {
    list_operators(options.op.empty() ? options.input : options.op, options.common.json);
    return 0;
  }
  if (!options.op.empty()) {
    as_usage([&] { check_flags(find_operator(options.op), options.attributes); });
  }
  if (options.input.empty()) throw UsageError("name the file that holds the operator's inputs");
  refuse_to_overwrite("-o", options.output, {options.input});
  const SafetensorsReader file(options.input);
  if (options.output.empty() && !options.compare) {
    throw UsageError("say where the results should go: -o FILE, or --compare");
  }
  const auto op = file.metadata().find("op");
  if (options.op.empty() && (options.ignore_metadata || op == file.metadata().end())) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("{}: the metadata do not name an 'op'; name one with --op (--list shows "
                    "all)",
                    options.input));
  }
  const OperatorInfo& info = find_operator(options.op.empty() ? op->second : options.op);
  if (options.op.empty()) as_usage([&] { check_flags(info, options.attributes); });
  const Attributes attributes(info, attributes_of(file, info, options));
  Inputs inputs = read_inputs(file, info, options.backward);
  Context context = options.common.context();
  if (options.dtype != "f32") {
    round_inputs(context, info, options.dtype == "bf16" ? DType::kBF16 : DType::kF16, inputs);
  }

  const auto start = std::chrono::steady_clock::now();
  std::vector<NamedArray> results = results_of(context, info, attributes, inputs, options.backward);
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;

  if (!options.output.empty()) write_results(options, info, attributes, results);
  options.common.note("{}{} in {:.2f} ms ({}, {} threads){}", info.name,
                      options.backward ? " forward and backward" : "", elapsed.count(),
                      name_of(context.isa()), context.threads(),
                      options.output.empty() ? "" : ": results in " + options.output);
  Json report = {{"op", info.name},
                 {"attributes", attributes.values()},
                 {"dtype", options.dtype},
                 {"milliseconds", elapsed.count()},
                 {"isa", name_of(context.isa())},
                 {"threads", context.threads()}};
  bool within = true;
  if (options.compare) {
    const std::vector<Comparison> comparisons =
        compare(file, in_float32(context, std::move(results)), bounds_of(inputs, context.isa()));
    if (comparisons.empty()) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{} holds no expected tensor of floats to compare with: none is "
                              "named {}{}",
                              options.input, joined(result_names(info)),
                              options.backward ? "" : " (gradients need --backward)"));
    }
    for (const TensorInfo& output : info.outputs) {
      if (file.find(output.name) == nullptr || attributes.hold(output.when)) continue;
      options.common.note("{} is not compared: it is only given with {}", output.name, output.when);
    }
    for (const Comparison& c : comparisons) {
      within = within && c.within();
      if (!options.common.json) write_out(describe(c) + "\n");
      report["comparisons"].push_back(
          {{"tensor", c.name}, {"error", c.error}, {"bound", c.bound}, {"within", c.within()}});
    }
    report["within"] = within;
  }
  if (options.common.json) write_json(report);
  return within ? 0 : 1;
}

// What a flag means to the operators that have it, with their names where it means several things;
// what it means to more than three of them last.
std::string explained(const std::vector<const OperatorInfo*>& having, const std::string& name) {
  std::map<std::string, std::vector<std::string>> meanings;
  for (const OperatorInfo* info : having) {
    meanings[explained(*info->find_attribute(name))].push_back(info->name);
  }
  const auto most = std::ranges::max_element(
      meanings, {}, [](const auto& meaning) { return meaning.second.size(); });
  if (meanings.size() == 1) return most->first;
  const bool named = most->second.size() <= 3;
  std::string text;
  for (const auto& [meaning, names] : meanings) {
    if (meaning != most->first || named) text += fmt::format("of {}: {}; ", joined(names), meaning);
  }
  return named ? text.substr(0, text.size() - 2) : text + "of the others: " + most->first;
}

// One flag for each attribute of any operator.
void declare_attributes(CLI::App& parser, const std::shared_ptr<Options>& options) {
  std::map<std::string, std::vector<const OperatorInfo*>> attributes;
  for (const OperatorInfo& info : operators()) {
    for (const AttributeInfo& attribute : info.attributes)
      attributes[attribute.name].push_back(&info);
  }
  for (const auto& [name, having] : attributes) {
    const std::string flag = flag_of(name), meaning = explained(having, name);
    const AttributeKind kind = having.front()->find_attribute(name)->kind;
    std::string& value = options->attributes[name];
    CLI::Option* option =
        kind == AttributeKind::kFlag
            ? parser.add_flag(flag + ",!--no-" + flag.substr(2), value, meaning)
            : parser.add_option(flag, value, meaning)->type_name(value_name(kind));
    option->group("Attributes");
  }
}

Action declare(CLI::App& parser) {
  auto options = std::make_shared<Options>();
  parser.add_option("IN", options->input,
                    "A safetensors file with the operator's inputs; its metadata may name the "
                    "operator ('op') and its attributes. With --list: (a part of) a name");
  parser.add_option("-o,--output", options->output, "Write the results to this file")
      ->type_name("FILE");
  parser.add_option("--op", options->op, "The operator, over that of the metadata")
      ->type_name("NAME");
  parser
      .add_option("--dtype", options->dtype,
                  "The type of inputs, outputs and gradients; that of states stays f32")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->type_name("TYPE")
      ->capture_default_str();
  parser.add_flag("--backward", options->backward,
                  "Also compute the gradients of all inputs, from 'do' and others in the file");
  parser.add_flag(
      "--compare", options->compare,
      "Print the error of each result of which the file holds the expected value; exit 1 "
      "beyond the bounds (none holds where --dtype rounds the file's numbers)");
  parser.add_flag("--ignore-metadata", options->ignore_metadata,
                  "Read the operator and its attributes from flags alone");
  parser.add_flag(
      "--list", options->list,
      "Print operators with their formulas, tensors and the flags that each takes: all, "
      "or those that IN names");
  declare_attributes(parser, options);
  options->common.declare_compute(parser);
  options->common.declare_json(parser);
  options->common.declare_quiet(parser);
  return [options] { return run(*options); };
}

std::vector<std::string> words(std::string_view option) {
  std::vector<std::string> names;
  if (option != "--op" && option != "--list") return names;
  for (const OperatorInfo& info : operators()) names.push_back(info.name);
  return names;
}

}  // namespace

extern const Verb kAttendVerb = {"attend", "Run an operator on the tensors of a file",
                                 "ouzel attend --list\n"
                                 "ouzel attend --list gated_delta_rule\n"
                                 "ouzel attend in.safetensors -o out.safetensors --op retention\n"
                                 "ouzel attend in.safetensors --backward --compare",
                                 declare, words};

}  // namespace ouzel::app
