#include "src/ops/operator_call.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"
#include "src/base/half.h"
#include "src/base/text.h"
#include "src/ops/copy_tensor.h"

namespace ouzel {
namespace {

// More sequences than this only occur in files made to exhaust memory: each costs some though it
// holds no token.
constexpr std::int64_t kMaxSequences = 1 << 22;

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, sentence);
}

// Whether a row of the table can work on it as it is.
bool is_plain(const ConstTensor& tensor, DType dtype) {
  const auto last = static_cast<std::size_t>(std::max(tensor.rank - 1, 0));
  return tensor.dtype == dtype && (tensor.extent[last] <= 1 || tensor.stride[last] == 1) &&
         reinterpret_cast<std::uintptr_t>(tensor.data) %
                 static_cast<std::uintptr_t>(size_of(dtype)) ==
             0;
}

// Whether it has no gaps between its elements, last axis innermost.
bool is_dense(const ConstTensor& tensor) {
  std::int64_t step = 1;
  for (auto i = static_cast<std::size_t>(tensor.rank); i-- > 0;) {
    if (tensor.extent[i] > 1 && tensor.stride[i] != step) return false;
    step *= tensor.extent[i];
  }
  return true;
}

std::vector<std::int64_t> shape_vector(const ConstTensor& tensor) {
  return {tensor.extent.begin(), tensor.extent.begin() + tensor.rank};
}

// Whether one of the tensors that an operator takes, by name, is what `is` says.
template <class Is>
bool any_tensor(const OperatorInfo& info, bool backward, Is&& is) {
  for (const TensorInfo& input : info.inputs) {
    if (is(input.name, input)) return true;
  }
  for (const TensorInfo& output : info.outputs) {
    if (backward && !output.gradient.empty() && is(output.gradient, output)) return true;
  }
  return false;
}

// Numbers of tokens may be 0; numbers of heads, features and sequences may not.
bool counts_tokens(std::string_view letter) { return letter.starts_with('T'); }

}  // namespace

std::string wanted_type(const TensorInfo& info, DType dtype) {
  const bool wide = info.dtype == DType::kF64;
  if (dtype == info.dtype || (wide ? dtype == DType::kF32 : is_half(dtype))) return "";
  return wide ? "F64 or F32" : "F32, BF16 or F16";
}

OperatorCall::OperatorCall(const OperatorInfo& info, const Attributes& attributes,
                           const std::map<std::string, ConstTensor>& tensors, bool backward,
                           const Segments* segments)
    : info_(info), attributes_(attributes), backward_(backward) {
  check_names(tensors);
  if (segments != nullptr) {
    if (info.find_attribute("cu_seqlens") == nullptr) {
      refuse(
          fmt::format("{} takes no segments: every row of its batch is one sequence", info.name));
    }
    segments_ = *segments;
  } else if (const auto cu_seqlens = attributes.integers("cu_seqlens")) {
    segments_ = Segments::packed(*cu_seqlens);
  }
  const auto given = [&](const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensor() : found->second;
  };
  extents_.reserve(12);
  in_.reserve(tensors.size() + 1);
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
  in_.push_back({first.gradient, no_gradient_.tensor, first.dtype});
}

ConstTensor OperatorCall::in(std::string_view name) const {
  const auto found = std::ranges::find(in_, name, &Taken::name);
  return found == in_.end() ? ConstTensor() : found->tensor;
}

Tensor OperatorCall::out(std::string_view name) const {
  const auto found = std::ranges::find(out_, name, &Placed::name);
  return found == out_.end() ? Tensor() : found->memory;
}

const OperatorCall::Extent* OperatorCall::find_extent(std::string_view letter) const {
  const auto found = std::ranges::find(extents_, letter, &Extent::letter);
  return found == extents_.end() ? nullptr : &*found;
}

std::optional<std::int64_t> OperatorCall::known_extent(std::string_view letter) const {
  const Extent* known = find_extent(letter);
  return known == nullptr ? std::nullopt : std::optional(known->value);
}

void OperatorCall::set_extent(const std::string& letter, std::int64_t value,
                              const std::string& from) {
  const Extent* known = find_extent(letter);
  if (known == nullptr) {
    extents_.push_back({letter, value, from});
  } else if (known->value != value) {
    refuse(fmt::format("{}: {} has {} = {}; {} makes it {}", info_.name, known->from, letter,
                       known->value, from, value));
  }
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
  const auto is_taken = [&](const std::string& own, const TensorInfo& row) {
    if (own != name) return false;
    if (attributes_.hold(row.when)) return true;
    refuse(fmt::format("{}: tensor '{}' is only taken with {}", info_.name, name, row.when));
  };
  if (any_tensor(info_, backward_, is_taken)) return;
  std::vector<std::string> names;
  any_tensor(info_, backward_, [&](const std::string& own, const TensorInfo& row) {
    if (attributes_.hold(row.when)) names.push_back(own);
    return false;
  });
  const std::string near = did_you_mean(name, names);
  refuse(fmt::format("{} takes no tensor '{}'{}{} It takes {}", info_.name, printable(name), near,
                     near.empty() ? "." : "", joined(names)));
}

std::optional<std::int64_t> OperatorCall::resolve(std::string_view letter) {
  if (letter.front() <= '9') return parsed<std::int64_t>(letter);
  if (const Extent* known = find_extent(letter); known != nullptr) return known->value;
  Extent extent;
  if (letter == "N" && segments_) {
    extent = {"N", segments_->count(), "cu_seqlens"};
  } else if (const Extent* batch = find_extent("B"); letter == "N" && batch != nullptr) {
    extent = *batch;
  } else if (const Extent* keys = find_extent("K"); letter == "F" && keys != nullptr) {
    extent = *keys;
    if (info_.features != nullptr) {
      const auto known = [this](std::string_view other) { return known_extent(other); };
      extent = {"F", info_.features(attributes_, known), "the feature map"};
    }
  } else if (const Extent* rows = find_extent("M"); letter == "R" && rows != nullptr) {
    extent = {"R", 2 * rows->value, rows->from};
  } else if (const Extent* q = find_extent("HQ"), *v = find_extent("HV");
             letter == "HO" && q != nullptr && v != nullptr) {
    extent = q->value > v->value ? *q : *v;
  } else {
    return std::nullopt;
  }
  extent.letter = letter;
  extents_.push_back(std::move(extent));
  return extents_.back().value;
}

// Whether the tensor has these letters, which are then known.
bool OperatorCall::fits(std::string_view letters, const ConstTensor& tensor,
                        const std::string& name) {
  std::array<std::pair<std::string_view, std::int64_t>, kMaxRank> fixed;  // it is the first to have
  std::size_t axes = 0, count = 0;
  bool fit = true;
  each_part(letters, ' ', [&](std::string_view letter) {
    const std::size_t axis = axes++;
    fit = fit && axis < static_cast<std::size_t>(tensor.rank);
    if (!fit) return;
    const std::int64_t extent = tensor.extent[axis];
    auto known = resolve(letter);
    for (std::size_t i = 0; i < count; ++i) {
      if (fixed[i].first == letter) known = fixed[i].second;
    }
    fit = known ? *known == extent : extent != 0 || counts_tokens(letter);
    if (!known) fixed[count++] = {letter, extent};
  });
  if (!fit || axes != static_cast<std::size_t>(tensor.rank)) return false;
  for (std::size_t i = 0; i < count; ++i) {
    extents_.push_back({std::string(fixed[i].first), fixed[i].second, name});
  }
  return true;
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
      const Extent* known_letter = find_extent(letter);
      if (!value || known_letter == nullptr) continue;
      if (std::count(seen.begin(), seen.end(), letter) != 0) continue;
      seen.push_back(letter);
      const std::string& from = known_letter->from;
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

void OperatorCall::refuse_shape(const TensorInfo& info, const std::string& name,
                                const ConstTensor& tensor) {
  for (const std::string& alternative : split(info.shape, '|')) {
    const std::vector<std::string> letters = split(alternative, ' ');
    if (std::ssize(letters) != tensor.rank) continue;
    for (std::size_t i = 0; i < letters.size(); ++i) {
      if (tensor.extent[i] != 0 || counts_tokens(letters[i]) || resolve(letters[i])) continue;
      refuse(
          fmt::format("{}: {} is empty: its shape {} has {} = 0, and only numbers of tokens may "
                      "be 0; leave the call out",
                      info_.name, name, shape_string(tensor), letters[i]));
    }
  }
  refuse(fmt::format("{}: {} has shape {}; expected {}", info_.name, name, shape_string(tensor),
                     expected(info)));
}

void OperatorCall::take(const TensorInfo& info, const std::string& name,
                        const ConstTensor& tensor) {
  if (const std::string wanted = wanted_type(info, tensor.dtype); !wanted.empty()) {
    refuse(fmt::format("{}: {} is {}; {} was expected: convert it first", info_.name, name,
                       described(tensor), wanted));
  }
  bool taken = false;
  each_part(info.shape, '|',
            [&](std::string_view letters) { taken = taken || fits(letters, tensor, name); });
  if (taken) {
    if (const auto n = resolve("N"); n && *n > kMaxSequences) {
      refuse(fmt::format("{}: {} sequences are more than the {} that one call takes", info_.name,
                         *n, kMaxSequences));
    }
    const bool half = info.takes_half && is_half(tensor.dtype);
    in_.push_back({name, tensor, half ? tensor.dtype : info.dtype});
    return;
  }
  refuse_shape(info, name, tensor);
}

std::vector<std::int64_t> OperatorCall::shape_of(const TensorInfo& info) {
  std::vector<std::int64_t> shape;
  const std::string_view first = std::string_view(info.shape).substr(0, info.shape.find('|'));
  each_part(first, ' ', [&](std::string_view letter) { shape.push_back(resolve(letter).value()); });
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
         .shape = shape_of(output),
         .takes_half = output.takes_half});
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
                        .shape = shape_vector(given),
                        .takes_half = input.takes_half});
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

// The elements of a result must not overwrite each other: from the innermost axis outwards, each
// steps over all that lies within.
void OperatorCall::check_apart(const Tensor& memory, const std::string& name) const {
  std::vector<std::size_t> axes;
  for (std::size_t i = 0; i < static_cast<std::size_t>(memory.rank); ++i) {
    if (memory.extent[i] == 0) return;
    if (memory.extent[i] > 1) axes.push_back(i);
  }
  const auto step = [&](std::size_t axis) { return std::abs(memory.stride[axis]); };
  std::ranges::sort(axes, {}, step);
  std::int64_t within = 0;
  for (const std::size_t axis : axes) {
    if (step(axis) <= within) {
      refuse(
          fmt::format("{}: the memory for {} has stride {} along axis {}: its elements would "
                      "overwrite each other",
                      info_.name, name, memory.stride[axis], axis));
    }
    within += step(axis) * (memory.extent[axis] - 1);
  }
}

// Dense memory is compared; that tensors with gaps interleave is the caller's to know.
void OperatorCall::check_overlaps() const {
  struct Block {
    const std::string* name;
    const char *begin, *end;
    bool is_state, is_result;
  };
  std::vector<Block> blocks;
  const auto add = [&](const std::string& name, const ConstTensor& x, bool is_state,
                       bool is_result) {
    if (!x.present() || x.size() == 0 || !is_dense(x)) return;
    const auto* begin = static_cast<const char*>(x.data);
    blocks.push_back({&name, begin, begin + x.size() * size_of(x.dtype), is_state, is_result});
  };
  for (const TensorInfo& input : info_.inputs) {
    add(input.name, in(input.name), input.is_state(), false);
  }
  for (const TensorInfo& output : info_.outputs) {
    add(output.gradient, in(output.gradient), false, false);
  }
  for (const ResultInfo& result : results_) {
    add(result.name, out(result.name), result.is_state && !result.is_gradient, true);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Block &a = blocks[i], &b = blocks[j];
      if (!a.is_result || a.begin >= b.end || b.begin >= a.end) continue;
      const bool same_state = a.is_state && b.is_state && a.begin == b.begin && a.end == b.end;
      if (same_state && !b.is_result) continue;
      refuse(fmt::format("{}: the memory for {} overlaps that of {}; give it its own", info_.name,
                         *a.name, *b.name));
    }
  }
}

void OperatorCall::put(const std::string& name, const Tensor& memory) {
  const ResultInfo& wanted = result(name);
  if (shape_vector(memory) != wanted.shape ||
      (memory.dtype != DType::kF32 && !is_half(memory.dtype))) {
    refuse(fmt::format("{}: the memory for {} is {}; F32, BF16 or F16 [{}] was expected",
                       info_.name, name, described(memory), fmt::join(wanted.shape, ", ")));
  }
  check_apart(memory, name);
  outputs_wanted_ = outputs_wanted_ || !wanted.is_gradient;
  if (out(name).present()) {
    refuse(fmt::format("{}: memory for {} is given twice", info_.name, name));
  }
  out_.push_back({wanted.name, memory});
}

std::vector<std::pair<const TensorInfo*, const TensorInfo*>> OperatorCall::states() const {
  const auto listed = [this](const std::vector<TensorInfo>& tensors) {
    std::vector<const TensorInfo*> states;
    for (const TensorInfo& tensor : tensors) {
      if (tensor.is_state() && attributes_.hold(tensor.when)) states.push_back(&tensor);
    }
    return states;
  };
  const auto initial = listed(info_.inputs), final = listed(info_.outputs);
  std::vector<std::pair<const TensorInfo*, const TensorInfo*>> pairs;
  for (std::size_t i = 0; i < std::min(initial.size(), final.size()); ++i) {
    pairs.emplace_back(initial[i], final[i]);
  }
  return pairs;
}

void OperatorCall::update_states() {
  const auto pairs = states();
  if (pairs.empty()) {
    refuse(fmt::format("{}: there is no state to update with these attributes", info_.name));
  }
  for (const auto& [initial, final] : pairs) {
    const ConstTensor given = in(initial->name);
    if (!given.present() || given.dtype != DType::kF32) {
      refuse(fmt::format("{}: a step updates '{}' {} in place: it must be given as F32, not {}",
                         info_.name, initial->name, expected(*initial),
                         given.present() ? name_of(given.dtype) : "left out"));
    }
    put(final->name, writable(given));
  }
}

bool OperatorCall::steps() const {
  if (backward_ || segments_ || known_extent("T") != 1) return false;
  if (attributes_.flag("reverse")) return false;
  if (const std::string& form = attributes_.text("form"); !form.empty() && form != "auto") {
    return false;
  }
  const auto pairs = states();
  return !pairs.empty() && std::ranges::all_of(pairs, [this](const auto& pair) {
    return out(pair.second->name).present();
  });
}

void OperatorCall::begin_states() const {
  for (const auto& [initial, final] : states()) {
    copy_or_clear(*context_, in(initial->name), out(final->name));
  }
}

void OperatorCall::run(Context& context) {
  context_ = &context;
  check_overlaps();
  // Without tokens and states there is nothing to do, however many heads are without them.
  const bool has_work = std::ranges::any_of(results_, [&](const ResultInfo& result) {
    const bool wanted = &result == &results_.front() || out(result.name).present();
    return wanted && std::ranges::count(result.shape, 0) == 0;
  });
  if (!has_work) return;
  std::vector<Array> converted;
  for (Taken& taken : in_) {
    if (is_plain(taken.tensor, taken.dtype)) continue;
    converted.push_back(Array::unset(shape_vector(taken.tensor), taken.dtype));
    copy_tensor(context, taken.tensor, converted.back().tensor);
    taken.tensor = converted.back().tensor;
  }
  // What is not written straight. Gradients of weights are added to, so they begin at zero.
  std::vector<std::pair<Tensor, Tensor>> back;
  for (const ResultInfo& result : results_) {
    const Tensor wanted = out(result.name);
    const bool first = &result == &results_.front();
    if (!wanted.present() && !first) continue;
    const bool half = result.takes_half && is_half(wanted.dtype);
    if (wanted.present() && !result.is_weight &&
        is_plain(wanted, half ? wanted.dtype : DType::kF32)) {
      continue;
    }
    converted.push_back(Array::unset(result.shape));
    if (result.is_weight) clear_rows(context, converted.back().tensor);
    std::erase_if(out_, [&](const Placed& placed) { return placed.name == result.name; });
    out_.push_back({result.name, converted.back().tensor});
    if (wanted.present()) back.emplace_back(converted.back().tensor, wanted);
  }
  info_.run(*this);
  for (const auto& [from, to] : back) copy_tensor(context, from, to);
}

}  // namespace ouzel
