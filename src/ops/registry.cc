#include "src/ops/registry.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"
#include "src/base/text.h"
#include "src/ops/operator_call.h"

namespace ouzel {
namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, sentence);
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// "[0, 17, 52]", the brackets may be left out.
std::optional<std::vector<std::int64_t>> parsed_list(std::string_view text) {
  if (text.starts_with('[') != text.ends_with(']')) return std::nullopt;
  if (text.starts_with('[')) text = text.substr(1, text.size() - 2);
  std::vector<std::int64_t> list;
  bool more = !trimmed(text).empty();
  while (more) {
    const std::size_t comma = text.find(',');
    const auto value = parsed<std::int64_t>(trimmed(text.substr(0, comma)));
    if (!value) return std::nullopt;
    list.push_back(*value);
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
  }
  return list;
}

bool is_within(const NumberRange& range, double value) {
  return value >= range.least && value <= range.most && value > range.above;
}

// `text` in plain form if it is a value of the attribute.
std::optional<std::string> plain(const AttributeInfo& info, std::string_view text) {
  switch (info.kind) {
    case AttributeKind::kFlag:
      if (text == "true" || text == "1") return "true";
      if (text == "false" || text == "0") return "false";
      return std::nullopt;
    case AttributeKind::kInteger: {
      const auto value = parsed<std::int64_t>(text);
      if (!value || !is_within(info.range, static_cast<double>(*value))) return std::nullopt;
      return std::to_string(*value);
    }
    case AttributeKind::kNumber: {
      const auto value = parsed<double>(text);
      constexpr double kMost = std::numeric_limits<float>::max();
      if (!value || !(std::abs(*value) <= kMost)) return std::nullopt;
      if (!is_within(info.range, static_cast<double>(static_cast<float>(*value)))) {
        return std::nullopt;
      }
      return fmt::format("{}", *value);
    }
    case AttributeKind::kIntegers:
      if (const auto list = parsed_list(text)) return fmt::format("[{}]", fmt::join(*list, ", "));
      return std::nullopt;
    case AttributeKind::kText:
      if (text.size() >= 2 && text.starts_with('"') && text.ends_with('"')) {
        text = text.substr(1, text.size() - 2);
      }
      if (!info.choices.empty() && std::ranges::count(info.choices, text) == 0) return std::nullopt;
      return std::string(text);
  }
  return std::nullopt;
}

}  // namespace

std::string AttributeInfo::domain() const {
  const std::string number = kind == AttributeKind::kInteger ? "a whole number" : "a number";
  switch (kind) {
    case AttributeKind::kFlag:
      return "true or false";
    case AttributeKind::kInteger:
    case AttributeKind::kNumber:
      if (std::isfinite(range.above)) return fmt::format("{} above {}", number, range.above);
      if (std::isfinite(range.most)) {
        return fmt::format("{} from {:.0f} to {:.0f}", number, range.least, range.most);
      }
      if (std::isfinite(range.least)) return fmt::format("{} of at least {}", number, range.least);
      return number;
    case AttributeKind::kIntegers:
      return "a list of whole numbers like [0, 17, 52]";
    case AttributeKind::kText:
      return choices.empty() ? "a text" : "one of " + joined(choices);
  }
  return "a value";
}

std::string meaning_of_letter(std::string_view letter) {
  static const std::map<std::string_view, std::string> meanings = {
      {"B", "batch rows"},
      {"T", "tokens"},
      {"TQ", "tokens of the queries"},
      {"TK", "tokens of the keys, or points"},
      {"TN", "T times the rows of a token"},
      {"TP", "W - 1, the inputs before the first token"},
      {"N", "sequences: B, or those that cu_seqlens packs into one row"},
      {"H", "heads"},
      {"HQ", "query heads, a multiple of HV or a divisor"},
      {"HK", "key heads, a divisor of HV"},
      {"HV", "value heads"},
      {"HO", "output heads, the larger of HQ and HV"},
      {"K", "size of a key"},
      {"V", "size of a value"},
      {"F", "features of a key: K, or what the feature map makes of it"},
      {"M", "rows of a projection; slots; numbers that a channel keeps"},
      {"R", "2 M, cosines and sines"},
      {"D", "channels; size of a point or of a row"},
      {"W", "width of the window"},
      {"L", "levels; luna: channels"},
      {"J", "hidden channels of luna"},
      {"U", "memories of a token"},
      {"QD", "query heads times K"},
      {"KD", "key heads times K"},
      {"VD", "value heads times V"},
      {"OD", "query heads times V"},
      {"GD", "value heads, or value heads times K"},
      {"BD", "value heads, or 1"},
  };
  const auto found = meanings.find(letter);
  return found == meanings.end() ? "" : found->second;
}

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

namespace {

// The name as people write it anywhere: small letters and digits alone.
std::string folded(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (c >= 'A' && c <= 'Z') text += static_cast<char>(c - 'A' + 'a');
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) text += c;
  }
  return text;
}

// Names of published models, folded, and the operator that each is built on.
std::string_view operator_of_model(std::string_view model) {
  static const std::map<std::string_view, std::string_view> models = {
      {"abcattention", "abc"},
      {"deltanet", "delta_rule"},
      {"deltaproduct", "gated_delta_product"},
      {"eagle", "rwkv5"},
      {"finch", "rwkv6"},
      {"gateddeltanet", "gated_delta_rule"},
      {"gateddeltaproduct", "gated_delta_product"},
      {"gatedlinearattention", "gla"},
      {"gatedslotattention", "gsa"},
      {"gdn", "gated_delta_rule"},
      {"goose", "rwkv7"},
      {"griffin", "rg_lru"},
      {"hawk", "rg_lru"},
      {"kimideltaattention", "kda"},
      {"kimilinear", "kda"},
      {"lambdanetworks", "lambda_layer"},
      {"lightningattention2", "lightning_attention"},
      {"loglinear", "log_linear_attention"},
      {"mamba", "selective_scan"},
      {"mamba2", "mamba2_ssd"},
      {"qwen3next", "gated_delta_rule"},
      {"retnet", "retention"},
      {"s6", "selective_scan"},
      {"ssd", "mamba2_ssd"},
      {"transformer", "softmax_attention"},
      {"ttt", "ttt_linear"},
      {"xlstm", "mlstm"},
  };
  const auto found = models.find(model);
  return found == models.end() ? "" : found->second;
}

// The operator of a published model's name, or of a name or alias in other letters and dashes; null
// if that is none or not one alone.
const OperatorInfo* published_operator(const std::string& name) {
  const std::string wanted = folded(name);
  const std::string_view model = operator_of_model(wanted);
  const OperatorInfo* found = nullptr;
  for (const OperatorInfo& info : operators()) {
    const bool same = folded(info.name) == wanted ||
                      std::ranges::any_of(info.aliases, [&](const std::string& alias) {
                        return folded(alias) == wanted;
                      });
    if (info.name == model) return &info;
    if (same && found != nullptr) return nullptr;
    if (same) found = &info;
  }
  return found;
}

}  // namespace

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
  if (const OperatorInfo* info = published_operator(name)) return *info;
  refuse(fmt::format("there is no operator '{}'{}{} The operators are {}", printable(name),
                     did_you_mean(name, all), nearest(name, all) ? "" : ".", joined(names)));
}

Attributes::Attributes(const OperatorInfo& info, const std::map<std::string, std::string>& given)
    : info_(info) {
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
    const std::optional<std::string> checked = plain(*attribute, value);
    if (!checked) {
      const std::string near = did_you_mean(value, attribute->choices);
      const std::string remedy = attribute->fallback.empty()
                                     ? "; leave it out for its default"
                                     : "; leave it out for " + attribute->fallback;
      refuse(fmt::format("{}: {} '{}' is not {}{}", info.name, name, printable(text, 60),
                         attribute->domain(), near.empty() ? remedy : near));
    }
    given_[name] = *checked;
  }
}

const std::string& Attributes::text(std::string_view name) const {
  static const std::string none;
  if (const auto found = given_.find(name); found != given_.end()) return found->second;
  const AttributeInfo* attribute = info_.find_attribute(name);
  return attribute == nullptr ? none : attribute->fallback;
}
std::map<std::string, std::string> Attributes::values() const {
  std::map<std::string, std::string> all(given_.begin(), given_.end());
  for (const AttributeInfo& attribute : info_.attributes) {
    if (!attribute.fallback.empty()) all.emplace(attribute.name, attribute.fallback);
  }
  return all;
}
std::optional<std::int64_t> Attributes::integer(std::string_view name) const {
  return parsed<std::int64_t>(text(name));
}
std::optional<double> Attributes::number(std::string_view name) const {
  return parsed<double>(text(name));
}
std::optional<std::vector<std::int64_t>> Attributes::integers(std::string_view name) const {
  const std::string& list = text(name);
  return list.empty() ? std::nullopt : parsed_list(list);
}

bool Attributes::hold(std::string_view conditions) const {
  bool all = true;
  each_part(conditions, ' ', [&](std::string_view condition) {
    const std::size_t equals = condition.find('=');
    const bool negated = condition[equals - 1] == '!';
    const std::string_view value = text(condition.substr(0, equals - (negated ? 1 : 0)));
    bool any = false;
    each_part(condition.substr(equals + 1), '|',
              [&](std::string_view wanted) { any = any || wanted == value; });
    all = all && any != negated;
  });
  return all;
}

Array::Array(const std::vector<std::int64_t>& shape, DType dtype) : Array(unset(shape, dtype)) {
  if (memory.bytes() != 0) std::memset(memory.data(), 0, memory.bytes());
}

Array Array::unset(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t count = 1;
  bool fits = true;
  for (std::int64_t extent : shape) fits = fits && !__builtin_mul_overflow(count, extent, &count);
  std::int64_t bytes = 0;
  if (!fits || __builtin_mul_overflow(count, size_of(dtype), &bytes)) {
    throw Error(
        ErrorKind::kOutOfMemory,
        fmt::format("a result of shape [{}] is larger than memory can be", fmt::join(shape, ", ")));
  }
  Array array;
  array.memory = Buffer(static_cast<std::size_t>(bytes));
  array.tensor = dense_tensor(array.memory.data(), dtype, shape);
  return array;
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
