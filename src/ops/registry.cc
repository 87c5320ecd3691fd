#include "src/ops/registry.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/text.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"

namespace ouzel {
namespace {

// More sequences than this only occur in files made to exhaust memory: each costs some though it
// holds no token.
constexpr std::int64_t kMaxSequences = 1 << 22;

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, sentence);
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(separator));
    if (!part.empty()) parts.emplace_back(part);
    text.remove_prefix(std::min(text.size(), part.size() + 1));
  }
  return parts;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// The whole of `text` as a number, or none.
template <class T>
std::optional<T> parsed(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "[0, 17, 52]", the brackets may be left out.
std::optional<std::vector<std::int64_t>> parsed_list(std::string_view text) {
  if (text.starts_with('[') != text.ends_with(']')) return std::nullopt;
  if (text.starts_with('[')) text = text.substr(1, text.size() - 2);
  std::vector<std::int64_t> list;
  for (const std::string& part : split(text, ',')) {
    const auto value = parsed<std::int64_t>(trimmed(part));
    if (!value) return std::nullopt;
    list.push_back(*value);
  }
  return list;
}

// `text` in plain form if it is a value of the attribute, else a sentence's end: what was expected.
struct Checked {
  bool good;
  std::string text;
};
Checked checked(const AttributeInfo& info, std::string_view text) {
  switch (info.kind) {
    case AttributeKind::kFlag:
      if (text == "true" || text == "1") return {true, "true"};
      if (text == "false" || text == "0") return {true, "false"};
      return {false, "true or false"};
    case AttributeKind::kInteger:
      if (const auto value = parsed<std::int64_t>(text)) return {true, std::to_string(*value)};
      return {false, "a whole number"};
    case AttributeKind::kNumber:
      if (const auto value = parsed<double>(text); value && std::isfinite(*value)) {
        return {true, fmt::format("{}", *value)};
      }
      return {false, "a number"};
    case AttributeKind::kIntegers:
      if (const auto list = parsed_list(text)) {
        return {true, fmt::format("[{}]", fmt::join(*list, ", "))};
      }
      return {false, "a list of whole numbers like [0, 17, 52]"};
    case AttributeKind::kText:
      if (text.size() >= 2 && text.starts_with('"') && text.ends_with('"')) {
        text = text.substr(1, text.size() - 2);
      }
      if (info.choices.empty() || std::count(info.choices.begin(), info.choices.end(), text) != 0) {
        return {true, std::string(text)};
      }
      return {false, "one of " + joined(info.choices) + did_you_mean(text, info.choices)};
  }
  return {false, "a value"};
}

std::string describe(const ConstTensor& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype), shape_string(tensor));
}

bool is_half(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// Whether a row of the table can work on it as it is.
bool is_plain(const ConstTensor& tensor, DType dtype) {
  const auto last = static_cast<std::size_t>(std::max(tensor.rank - 1, 0));
  return tensor.dtype == dtype && (tensor.extent[last] <= 1 || tensor.stride[last] == 1) &&
         reinterpret_cast<std::uintptr_t>(tensor.data) %
                 static_cast<std::uintptr_t>(size_of(dtype)) ==
             0;
}

std::vector<std::int64_t> shape_vector(const ConstTensor& tensor) {
  return {tensor.extent.begin(), tensor.extent.begin() + tensor.rank};
}

// Numbers of tokens may be 0; numbers of heads, features and sequences may not.
bool counts_tokens(const std::string& letter) { return letter.starts_with('T'); }

}  // namespace

const AttributeInfo* OperatorInfo::find_attribute(std::string_view attribute) const {
  for (const AttributeInfo& info : attributes) {
    if (info.name == attribute) return &info;
  }
  return nullptr;
}

std::vector<std::string> OperatorInfo::attribute_names() const {
  std::vector<std::string> names;
  for (const AttributeInfo& info : attributes) names.push_back(info.name);
  return names;
}

const OperatorInfo& find_operator(const std::string& name) {
  std::vector<std::string> names, all;
  for (const OperatorInfo& info : operators()) {
    if (info.name == name || std::count(info.aliases.begin(), info.aliases.end(), name) != 0) {
      return info;
    }
    names.push_back(info.name);
    all.push_back(info.name);
    all.insert(all.end(), info.aliases.begin(), info.aliases.end());
  }
  refuse(fmt::format("there is no operator '{}'{}{} The operators are {}", printable(name),
                     did_you_mean(name, all), nearest(name, all) ? "" : ".", joined(names)));
}

Attributes::Attributes(const OperatorInfo& info, const std::map<std::string, std::string>& given) {
  for (const AttributeInfo& attribute : info.attributes) {
    if (!attribute.fallback.empty()) values_[attribute.name] = attribute.fallback;
  }
  for (const auto& [name, text] : given) {
    const AttributeInfo* attribute = info.find_attribute(name);
    if (attribute == nullptr) {
      const std::vector<std::string> names = info.attribute_names();
      const std::string near = did_you_mean(name, names);
      refuse(fmt::format("{} has no attribute '{}'{}{} It takes {}", info.name, printable(name),
                         near, near.empty() ? "." : "", joined(names)));
    }
    const std::string_view value = trimmed(text);
    if (value == "null" || value.empty()) continue;
    Checked result = checked(*attribute, value);
    if (!result.good) {
      refuse(
          fmt::format("{}: {} '{}' is not {}", info.name, name, printable(text, 60), result.text));
    }
    values_[name] = std::move(result.text);
  }
}

std::string Attributes::text(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? "" : found->second;
}
bool Attributes::flag(const std::string& name) const { return text(name) == "true"; }
std::optional<std::int64_t> Attributes::integer(const std::string& name) const {
  return parsed<std::int64_t>(text(name));
}
std::optional<double> Attributes::number(const std::string& name) const {
  return parsed<double>(text(name));
}
std::optional<std::vector<std::int64_t>> Attributes::integers(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::nullopt : parsed_list(found->second);
}

bool Attributes::hold(const std::string& conditions) const {
  for (const std::string& condition : split(conditions, ' ')) {
    const std::size_t equals = condition.find('=');
    const bool negated = condition[equals - 1] == '!';
    const std::string name = condition.substr(0, equals - (negated ? 1 : 0));
    const std::vector<std::string> values = split(condition.substr(equals + 1), '|');
    if ((std::count(values.begin(), values.end(), text(name)) != 0) == negated) return false;
  }
  return true;
}

Array::Array(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t count = 1;
  bool fits = true;
  for (std::int64_t extent : shape) fits = fits && !__builtin_mul_overflow(count, extent, &count);
  std::int64_t bytes = 0;
  if (!fits || __builtin_mul_overflow(count, size_of(dtype), &bytes)) {
    throw Error(
        ErrorKind::kOutOfMemory,
        fmt::format("a result of shape [{}] is larger than memory can be", fmt::join(shape, ", ")));
  }
  memory = Buffer::zeros(static_cast<std::size_t>(bytes));
  tensor.data = memory.data();
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor.extent[i] = shape[i];
    tensor.stride[i] = step;
    step *= shape[i];
  }
}

OperatorCall::OperatorCall(const OperatorInfo& info, const Attributes& attributes,
                           const std::map<std::string, ConstTensor>& tensors, bool backward,
                           const Segments* segments)
    : info_(info), attributes_(attributes), backward_(backward) {
  check_names(tensors);
  if (segments != nullptr) {
    segments_ = *segments;
  } else if (const auto cu_seqlens = attributes.integers("cu_seqlens")) {
    segments_ = Segments::packed(*cu_seqlens);
  }
  const auto given = [&](const std::string& name) { return get(tensors, name); };
  for (const TensorInfo& input : info.inputs) {
    const ConstTensor tensor = given(input.name);
    if (tensor.present()) {
      take(input, input.name, tensor);
    } else if (!input.optional && attributes.hold(input.when)) {
      refuse(fmt::format("{}: tensor '{}' {} is missing", info.name, input.name, expected(input)));
    }
  }
  if (segments_ && segments == nullptr) check_packing();
  if (info.set_extents != nullptr) info.set_extents(*this);
  list_results();
  if (!backward) return;
  bool any = false;
  for (const TensorInfo& output : info.outputs) {
    const ConstTensor tensor = given(output.gradient);
    if (!tensor.present()) continue;
    take(output, output.gradient, tensor);
    any = true;
  }
  const TensorInfo& first = info.outputs.front();
  if (!any) {
    refuse(
        fmt::format("{}: the backward pass needs '{}' {}, the gradient of '{}', or that of "
                    "another output",
                    info.name, first.gradient, expected(first), first.name));
  }
  if (in(first.gradient).present()) return;
  no_gradient_ = Array(shape_of(first), first.dtype);
  in_[first.gradient] = {no_gradient_.tensor, first.dtype};
}

void OperatorCall::set_extent(const std::string& letter, std::int64_t value,
                              const std::string& from) {
  const auto [known, is_new] = extents_.try_emplace(letter, Extent{value, from});
  if (is_new || known->second.value == value) return;
  refuse(fmt::format("{}: {} has {} = {}; {} makes it {}", info_.name, known->second.from, letter,
                     known->second.value, from, value));
}

// Packed sequences cover one row of the batch: what they left out would be zeros in silence.
void OperatorCall::check_packing() {
  const std::int64_t tokens = resolve("T").value_or(resolve("TQ").value_or(0));
  const std::int64_t end =
      segments_->list.empty() ? 0 : segments_->list.back().begin + segments_->list.back().length;
  if (resolve("B") != 1 || end != tokens) {
    refuse(
        fmt::format("{}: cu_seqlens ends at {} and packs one batch row; the tensors have {} of {} "
                    "tokens",
                    info_.name, end, resolve("B").value_or(0), tokens));
  }
}

// Every tensor must be one that this call takes.
void OperatorCall::check_names(const std::map<std::string, ConstTensor>& tensors) const {
  for (const auto& [name, tensor] : tensors) check_name(name);
}

void OperatorCall::check_name(const std::string& name) const {
  std::vector<std::pair<const std::string*, const TensorInfo*>> rows;
  for (const TensorInfo& input : info_.inputs) rows.emplace_back(&input.name, &input);
  if (backward_) {
    for (const TensorInfo& output : info_.outputs) rows.emplace_back(&output.gradient, &output);
  }
  for (const auto& [own, row] : rows) {
    if (*own != name) continue;
    if (attributes_.hold(row->when)) return;
    refuse(fmt::format("{}: tensor '{}' is only taken with {}", info_.name, name, row->when));
  }
  std::vector<std::string> names;
  for (const auto& [own, row] : rows) {
    if (!own->empty() && attributes_.hold(row->when)) names.push_back(*own);
  }
  const std::string near = did_you_mean(name, names);
  refuse(fmt::format("{} takes no tensor '{}'{}{} It takes {}", info_.name, printable(name), near,
                     near.empty() ? "." : "", joined(names)));
}

std::optional<std::int64_t> OperatorCall::resolve(const std::string& letter) {
  if (const auto digit = parsed<std::int64_t>(letter)) return digit;
  const auto found = extents_.find(letter);
  if (found != extents_.end()) return found->second.value;
  if (letter == "N" && segments_) {
    extents_[letter] = {segments_->count(), "cu_seqlens"};
  } else if (letter == "N" && extents_.contains("B")) {
    extents_[letter] = extents_["B"];
  } else if (letter == "F" && extents_.contains("K")) {
    extents_[letter] = extents_["K"];
    if (info_.features != nullptr) {
      Letters seen;
      for (const auto& [name, extent] : extents_) seen[name] = extent.value;
      extents_[letter] = {info_.features(attributes_, seen), "the feature map"};
    }
  } else if (letter == "R" && extents_.contains("M")) {
    extents_[letter] = {2 * extents_["M"].value, extents_["M"].from};
  } else if (letter == "HO" && extents_.contains("HQ") && extents_.contains("HV")) {
    const Extent &q = extents_["HQ"], &v = extents_["HV"];
    extents_[letter] = q.value > v.value ? q : v;
  } else {
    return std::nullopt;
  }
  return extents_[letter].value;
}

// "[B, T, HK, K] with B = 2, T = 19, K = 8 as in q".
std::string OperatorCall::expected(const TensorInfo& info) {
  std::vector<std::string> shapes;
  std::vector<std::pair<std::string, std::vector<std::string>>>
      known;  // by the tensor they are from
  std::vector<std::string> seen;
  for (const std::string& alternative : split(info.shape, '|')) {
    const std::vector<std::string> letters = split(alternative, ' ');
    shapes.push_back("[" + joined(letters) + "]");
    for (const std::string& letter : letters) {
      const auto value = resolve(letter);
      if (!value || !extents_.contains(letter)) continue;
      if (std::count(seen.begin(), seen.end(), letter) != 0) continue;
      seen.push_back(letter);
      const std::string& from = extents_[letter].from;
      auto row = std::find_if(known.begin(), known.end(),
                              [&](const auto& entry) { return entry.first == from; });
      if (row == known.end()) row = known.insert(known.end(), {from, {}});
      row->second.push_back(fmt::format("{} = {}", letter, *value));
    }
  }
  std::vector<std::string> parts;
  for (const auto& [from, values] : known) parts.push_back(joined(values) + " as in " + from);
  return joined(shapes, " or ") + (parts.empty() ? "" : " with " + joined(parts, " and "));
}

void OperatorCall::take(const TensorInfo& info, const std::string& name,
                        const ConstTensor& tensor) {
  const bool wide = info.dtype == DType::kF64;
  if (tensor.dtype != info.dtype && !(wide ? tensor.dtype == DType::kF32 : is_half(tensor.dtype))) {
    refuse(fmt::format("{}: {} is {}; {} was expected", info_.name, name, describe(tensor),
                       wide ? "F64 or F32" : "F32, BF16 or F16"));
  }
  std::vector<std::pair<std::string, std::int64_t>>
      fixed;  // letters that this tensor is the first to have
  const auto fits = [&](const std::vector<std::string>& letters) {
    fixed.clear();
    if (static_cast<int>(letters.size()) != tensor.rank) return false;
    for (std::size_t i = 0; i < letters.size(); ++i) {
      const std::int64_t extent = tensor.extent[i];
      auto known = resolve(letters[i]);
      for (const auto& [letter, value] : fixed) {
        if (letter == letters[i]) known = value;
      }
      if (known ? *known != extent : extent == 0 && !counts_tokens(letters[i])) return false;
      if (!known) fixed.emplace_back(letters[i], extent);
    }
    for (const auto& [letter, value] : fixed) extents_[letter] = {value, name};
    return true;
  };
  for (const std::string& alternative : split(info.shape, '|')) {
    if (!fits(split(alternative, ' '))) continue;
    if (const auto n = resolve("N"); n && *n > kMaxSequences) {
      refuse(fmt::format("{}: {} sequences are more than the {} that one call takes", info_.name,
                         *n, kMaxSequences));
    }
    const bool half = info_.takes_half && is_half(tensor.dtype) && !info.is_state();
    in_[name] = {tensor, half ? tensor.dtype : info.dtype};
    return;
  }
  refuse(fmt::format("{}: {} has shape {}; expected {}", info_.name, name, shape_string(tensor),
                     expected(info)));
}

std::vector<std::int64_t> OperatorCall::shape_of(const TensorInfo& info) {
  std::vector<std::int64_t> shape;
  for (const std::string& letter : split(split(info.shape, '|').front(), ' ')) {
    shape.push_back(resolve(letter).value());
  }
  return shape;
}

void OperatorCall::list_results() {
  const auto narrowed = [](const ConstTensor& like, DType dtype) {
    return like.present() && is_half(like.dtype) ? like.dtype : dtype;
  };
  for (const TensorInfo& output : info_.outputs) {
    if (!attributes_.hold(output.when)) continue;
    const bool first = &output == &info_.outputs.front();
    results_.push_back(
        {.name = output.name,
         .is_state = output.is_state(),
         .dtype = first ? narrowed(in(info_.inputs.front().name), output.dtype) : output.dtype,
         .shape = shape_of(output)});
  }
  if (!backward_) return;
  for (const TensorInfo& input : info_.inputs) {
    const ConstTensor given = in(input.name);
    if (input.gradient.empty() || !given.present()) continue;
    if (!attributes_.hold(input.gradient_when)) continue;
    results_.push_back({.name = input.gradient,
                        .is_gradient = true,
                        .is_weight = input.shape.find_first_of("BN") == std::string::npos,
                        .is_state = input.is_state(),
                        .dtype = narrowed(given, input.dtype),
                        .shape = shape_vector(given)});
  }
}

const ResultInfo& OperatorCall::result(const std::string& name) const {
  const auto found = std::ranges::find(results_, name, &ResultInfo::name);
  if (found != results_.end()) return *found;
  std::vector<std::string> names;
  for (const ResultInfo& info : results_) names.push_back(info.name);
  const std::string near = did_you_mean(name, names);
  refuse(fmt::format("this call of {} does not give '{}'{}{} It gives {}", info_.name,
                     printable(name), near, near.empty() ? "." : "", joined(names)));
}

void OperatorCall::put(const std::string& name, const Tensor& memory) {
  const ResultInfo& wanted = result(name);
  if (shape_vector(memory) != wanted.shape ||
      (memory.dtype != DType::kF32 && !is_half(memory.dtype))) {
    refuse(fmt::format("{}: the memory for {} is {}; F32, BF16 or F16 [{}] was expected",
                       info_.name, name, describe(memory), fmt::join(wanted.shape, ", ")));
  }
  for (std::size_t i = 0; i < wanted.shape.size(); ++i) {
    if (memory.size() > 0 && wanted.shape[i] > 1 && memory.stride[i] == 0) {
      refuse(
          fmt::format("{}: the memory for {} has stride 0 along axis {}: its elements would "
                      "overwrite each other",
                      info_.name, name, i));
    }
  }
  out_[name] = memory;
}

void OperatorCall::run(Context& context) {
  context_ = &context;
  std::vector<Array> converted;
  for (auto& [name, taken] : in_) {
    if (is_plain(taken.tensor, taken.dtype)) continue;
    converted.emplace_back(shape_vector(taken.tensor), taken.dtype);
    copy_tensor(context, taken.tensor, converted.back().tensor);
    taken.tensor = converted.back().tensor;
  }
  // What is not written straight. Gradients of weights are added to, so they begin at zero.
  std::vector<std::pair<Tensor, Tensor>> back;
  for (const ResultInfo& result : results_) {
    const Tensor wanted = out(result.name);
    const bool first = &result == &results_.front();
    if (!wanted.present() && !first) continue;
    const bool half = info_.takes_half && !result.is_state && (first || result.is_gradient) &&
                      is_half(wanted.dtype);
    if (wanted.present() && !result.is_weight &&
        is_plain(wanted, half ? wanted.dtype : DType::kF32)) {
      continue;
    }
    converted.emplace_back(result.shape);
    out_[result.name] = converted.back().tensor;
    if (wanted.present()) back.emplace_back(out_[result.name], wanted);
  }
  info_.run(*this);
  for (const auto& [from, to] : back) copy_tensor(context, from, to);
}

std::vector<NamedArray> run_operator(Context& context, const OperatorInfo& info,
                                     const Attributes& attributes,
                                     const std::map<std::string, ConstTensor>& tensors,
                                     bool backward, const Segments* segments) {
  OperatorCall call(info, attributes, tensors, backward, segments);
  std::vector<NamedArray> results;
  for (const ResultInfo& result : call.results()) {
    results.push_back({result.name, result.is_gradient, Array(result.shape)});
    call.put(result.name, results.back().array.tensor);
  }
  call.run(context);
  return results;
}

}  // namespace ouzel
