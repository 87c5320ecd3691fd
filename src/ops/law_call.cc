#include "src/ops/law_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {
namespace {

// The part of `text` before the separator; `text` becomes the rest. Allocates nothing: a step must
// not.
std::string_view split_off(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(text.size(), part.size() + 1));
  return part;
}

// The letter of axis `axis` of a shape, "" beyond its last.
std::string_view letter_of(std::string_view shape, int axis) {
  std::string_view letter;
  for (int i = 0; i <= axis; ++i) letter = split_off(shape, ' ');
  return letter;
}

bool is_size(std::string_view letter) { return letter == "K" || letter == "V"; }

}  // namespace

LawCall::LawCall(const Law& law, const LawOptions& options, const RecurrenceInputs& inputs)
    : law_(law),
      reverse_(options.reverse),
      l2norm_(options.use_qk_l2norm),
      parallel_(options.form == Form::kParallel) {
  check_options(options, inputs);
  check_sizes(options, inputs);
  for (const LawInput& input : law.inputs) {
    if (input.name == nullptr) break;
    const ConstTensor& tensor = inputs.*input.tensor;
    if (!tensor.present() && input.optional) continue;
    in_[static_cast<std::size_t>(input.role)] = take(input.shape, tensor, input.name);
  }
  set_kind();
}

void LawCall::check_options(const LawOptions& options, const RecurrenceInputs& inputs) {
  const double keys = static_cast<double>(key_size(inputs.q));
  const double scale = options.scale.value_or(law_.unit_scale ? 1 : 1 / std::sqrt(keys));
  scale_ = static_cast<float>(scale);
  if (!std::isfinite(scale_)) refuse("the scale must be a finite number");
  if (l2norm_ && law_.erase != EraseKind::kCollinear) {
    refuse("use_qk_l2norm is for laws that erase along the key; normalise q and k before the call");
  }
  l2norm_eps_ = static_cast<float>(options.l2norm_eps);
  if (!(l2norm_eps_ >= 0 && std::isfinite(l2norm_eps_))) refuse("l2norm_eps must be at least 0");
  constexpr std::int64_t kMostRows = 1 << 20;  // tokens times this is a number
  if (options.num_householder < 1 || options.num_householder > (law_.many_rows() ? kMostRows : 1)) {
    refuse(fmt::format(
        "num_householder must be {}, not {}",
        law_.many_rows() ? fmt::format("from 1 to {}", kMostRows) : "1 (a token writes one key)",
        options.num_householder));
  }
  // An input that the law has no use for is a mistake of the caller.
  using In = RecurrenceInputs;
  constexpr std::pair<const char*, ConstTensor In::*> kMembers[] = {
      {"k", &In::k}, {"g", &In::g},   {"gv", &In::gv}, {"beta", &In::beta},
      {"a", &In::a}, {"b", &In::b},   {"p", &In::p},   {"w", &In::w},
      {"u", &In::u}, {"dt", &In::dt}, {"A", &In::A},   {"D", &In::D}};
  for (const auto& [name, member] : kMembers) {
    const bool taken = std::any_of(
        law_.inputs.begin(), law_.inputs.end(),
        [&](const LawInput& input) { return input.name != nullptr && input.tensor == member; });
    if (!taken && (inputs.*member).present()) {
      refuse(fmt::format("there is no input '{}': {}", name, law_.formula));
    }
  }
}

// B, T, heads, K and V, from the query, the key and the value.
void LawCall::check_sizes(const LawOptions& options, const RecurrenceInputs& inputs) {
  const bool has_key = law_.has(LawRole::kKey);
  const auto rank4 = [&](LawRole role, const ConstTensor& x) {
    const LawInput& input = *law_.find(role);
    if (x.rank == 4) return;
    refuse(fmt::format("{} must be [{}], not {}", input.name, input.shape, shape_string(x)));
  };
  rank4(LawRole::kQuery, inputs.q);
  rank4(LawRole::kValue, inputs.v);
  if (has_key) rank4(LawRole::kKey, inputs.k);
  RecurrenceShape& s = shape_;
  s.batch = inputs.q.extent[0];
  s.tokens = inputs.q.extent[1];
  s.query_heads = inputs.q.extent[2];
  s.value_heads = inputs.v.extent[2];
  s.key_heads = has_key ? inputs.k.extent[2] : s.value_heads;
  s.keys = s.features = inputs.q.extent[3];
  s.values = inputs.v.extent[3];
  kind_.rows_per_token = options.num_householder;
  if (s.tokens > std::numeric_limits<std::int64_t>::max() / kind_.rows_per_token) {
    refuse(fmt::format("{} tokens of num_householder {} rows are more than there can be", s.tokens,
                       kind_.rows_per_token));
  }
  const auto found = [&] {
    return fmt::format(
        "found {} {}, {}, {} {}", name(LawRole::kQuery), shape_string(inputs.q),
        has_key ? fmt::format("{} {}", name(LawRole::kKey), shape_string(inputs.k)) : "no key",
        name(LawRole::kValue), shape_string(inputs.v));
  };
  if (s.batch < 0 || s.tokens < 0) refuse("extents must not be negative; " + found());
  if (s.query_heads < 1 || s.key_heads < 1 || s.value_heads < 1 || s.keys < 1 || s.values < 1) {
    refuse("heads, key size and value size must be at least 1; " + found());
  }
  if (s.value_heads % s.key_heads != 0) {
    refuse(fmt::format("the heads of {} must be a multiple of those of {}; {}",
                       name(LawRole::kValue), name(LawRole::kKey), found()));
  }
  if (s.query_heads % s.value_heads != 0 && s.value_heads % s.query_heads != 0) {
    refuse(fmt::format("the heads of {} must divide those of {} or be a multiple of them; {}",
                       name(LawRole::kQuery), name(LawRole::kValue), found()));
  }
  s.output_heads = std::max(s.query_heads, s.value_heads);
  s.segments = inputs.segments;
  if (s.segments != nullptr) s.segments->check(law_.name, s.batch, s.tokens);
  s.sequences = s.segments != nullptr ? s.segments->count() : s.batch;
}

void LawCall::set_kind() {
  kind_.keys = shape_.keys;
  kind_.values = shape_.values;
  kind_.decay = in(LawRole::kDecay).present() || in(LawRole::kStep).present();
  kind_.decay_per_key = kind_.decay && law_.decay == DecayKind::kPerKey;
  kind_.value_decay = in(LawRole::kValueDecay).present();
  kind_.erase = law_.erase;
  kind_.erase_decayed = law_.erase_decayed;
  kind_.strength_per_value = in(LawRole::kStrength).present() && in(LawRole::kStrength).size > 1;
  kind_.bonus = in(LawRole::kBonus).present();
  kind_.queries = shape_.outputs_per_state();
}

std::int64_t LawCall::extent(std::string_view letter) const {
  if (letter == "B") return shape_.batch;
  if (letter == "T") return shape_.tokens;
  if (letter == "TN") return shape_.tokens * kind_.rows_per_token;
  if (letter == "HQ") return shape_.query_heads;
  if (letter == "HK") return shape_.key_heads;
  if (letter == "HV") return shape_.value_heads;
  if (letter == "HO") return shape_.output_heads;
  return letter == "K" ? shape_.keys : shape_.values;
}

bool LawCall::fits(std::string_view shape, const ConstTensor& tensor) const {
  int axis = 0;
  while (!shape.empty()) {
    const std::int64_t expected = extent(split_off(shape, ' '));
    if (axis >= tensor.rank || tensor.extent[static_cast<std::size_t>(axis)] != expected) {
      return false;
    }
    ++axis;
  }
  return axis == tensor.rank;
}

LawTensor LawCall::take(const char* shape, const ConstTensor& tensor,
                        const std::string_view what) const {
  std::string_view shapes = shape, fitting;
  while (!shapes.empty() && fitting.empty()) {
    const std::string_view alternative = split_off(shapes, '|');
    if (fits(alternative, tensor)) fitting = alternative;
  }
  if (fitting.empty()) {
    std::string expected, sizes;
    for (std::string_view rest = shape; !rest.empty();) {
      expected += expected.empty() ? "[" : " or [";
      sizes += sizes.empty() ? "[" : " or [";
      std::string_view letters = split_off(rest, '|');
      for (const char* comma = ""; !letters.empty(); comma = ", ") {
        const std::string_view letter = split_off(letters, ' ');
        expected += fmt::format("{}{}", comma, letter);
        sizes += fmt::format("{}{}", comma, extent(letter));
      }
      expected += "]";
      sizes += "]";
    }
    refuse(fmt::format("{} must be {} = {}, not {}", what, expected, sizes, shape_string(tensor)));
  }
  if (tensor.dtype != DType::kF32 && tensor.dtype != DType::kBF16 && tensor.dtype != DType::kF16) {
    refuse(fmt::format("{} must be F32, BF16 or F16, not {}", what, name_of(tensor.dtype)));
  }
  LawTensor x;
  x.data = const_cast<void*>(tensor.data);
  x.dtype = tensor.dtype;
  x.is_parameter = letter_of(fitting, 0) != "B";
  int axis = 0;
  if (!x.is_parameter) {
    if (letter_of(fitting, 1) == "TN") x.rows_per_token = kind_.rows_per_token;
    x.batch_stride = tensor.stride[0];
    x.row_stride = tensor.stride[1];
    axis = 2;
  }
  const auto heads = static_cast<std::size_t>(axis);
  x.heads = tensor.extent[heads];
  x.head_stride = tensor.stride[heads];
  x.size = 1;
  if (is_size(letter_of(fitting, axis + 1))) {
    x.size = tensor.extent[heads + 1];
    if (x.size > 1 && tensor.stride[heads + 1] != 1) {
      refuse(
          fmt::format("the last axis of {} must be contiguous (its stride is {}); copy the "
                      "array first",
                      what, tensor.stride[heads + 1]));
    }
  }
  return x;
}

bool LawCall::streams(const LawTensor& x) const {
  // Of 8 MiB and more, what was written first has left the second-level cache before anyone reads.
  // Kernels write whole slabs.
  constexpr std::int64_t kLeast = std::int64_t{8} << 20, kLine = 16;
  const std::int64_t floats = shape_.batch * shape_.tokens * x.rows_per_token * x.heads * x.size;
  return x.present() && !x.is_parameter && !x.is_narrow() &&
         floats * static_cast<std::int64_t>(sizeof(float)) >= kLeast && x.size % kSlab == 0 &&
         x.row_stride % kLine == 0 && x.head_stride % kLine == 0 && x.batch_stride % kLine == 0 &&
         reinterpret_cast<std::uintptr_t>(x.data) % (kLine * sizeof(float)) == 0;
}

std::int64_t LawCall::kept_state() const {
  return padded(shape_.keys, kSlab) * padded(shape_.values, kSlab);
}

// Of the first sequences.
std::int64_t LawCall::kept_chunks(std::int64_t sequences) const {
  const std::int64_t chunk = backward_chunk(kind_);
  std::int64_t chunks = 0;
  for (std::int64_t n = 0; n < sequences; ++n) chunks += (segment(n).length + chunk - 1) / chunk;
  return chunks;
}

std::int64_t LawCall::kept_floats() const {
  // The forward pass goes by chunks that begin at multiples of 16 tokens; the parallel form has no
  // states.
  if (backward_chunk(kind_) % 16 != 0 || parallel_) return 0;
  return kept_chunks(shape_.sequences) * shape_.value_heads * kept_state();
}

std::int64_t LawCall::kept_at(std::int64_t sequence, std::int64_t state) const {
  const std::int64_t before = kept_chunks(sequence), own = kept_chunks(sequence + 1) - before;
  return (before * shape_.value_heads + state * own) * kept_state();
}

LawTensor LawCall::gradient(LawRole role, const RecurrenceInputGrads& grads) const {
  const LawInput* input = law_.find(role);
  if (input == nullptr || !in(role).present()) return {};
  const Tensor& tensor = grads.*input->gradient;
  if (!tensor.present()) return {};
  char what[32] = "the gradient of ";
  std::strcat(what, input->name);
  const LawTensor x = take(input->shape, tensor, what);
  if (x.size != in(role).size) {
    refuse(fmt::format("{} must have the shape of {}, not {}", what, input->name,
                       shape_string(tensor)));
  }
  return x;
}

LawTensor LawCall::output(const ConstTensor& tensor, const char* what) const {
  return take("B T HO V", tensor, what);
}

void LawCall::check_state(const StateView& state, const char* what) const {
  if (!state.present()) return;
  if (state.heads != shape_.value_heads || state.keys != shape_.keys ||
      state.values != shape_.values ||
      static_cast<std::int64_t>(state.sequences.size()) != shape_.sequences) {
    refuse(fmt::format("{} must be [N, HV, K, V] = [{}, {}, {}, {}], not [{}, {}, {}, {}]", what,
                       shape_.sequences, shape_.value_heads, shape_.keys, shape_.values,
                       state.sequences.size(), state.heads, state.keys, state.values));
  }
  for (const SequenceState& s : state.sequences) {
    if (s.s == nullptr) refuse(fmt::format("{} lacks the memory of S", what));
  }
}

void LawCall::refuse(const std::string& sentence) const {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", law_.name, sentence));
}

StateMemory<float> state_memory(const StateView& state, std::int64_t sequence, std::int64_t head) {
  if (!state.present()) return {};
  const SequenceState& s = state.sequences[static_cast<std::size_t>(sequence)];
  const std::int64_t at = head * state.head_stride;
  return {s.s + at, s.s_residue != nullptr ? s.s_residue + at : nullptr, state.key_stride, 1};
}

std::int64_t position_of(const StateView& state, std::int64_t sequence) {
  return state.present() ? state.sequences[static_cast<std::size_t>(sequence)].position : 0;
}

void zero_gaps(const RecurrenceShape& shape, std::int64_t batch_row, const LawTensor& x) {
  if (!x.present() || x.is_parameter) return;
  const auto zero = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin * x.rows_per_token; row < end * x.rows_per_token; ++row) {
      for (std::int64_t h = 0; h < x.heads; ++h) {
        const std::int64_t at = batch_row * x.batch_stride + row * x.row_stride + h * x.head_stride;
        std::memset(static_cast<char*>(x.data) + at * size_of(x.dtype), 0,
                    static_cast<std::size_t>(x.size * size_of(x.dtype)));
      }
    }
  };
  std::int64_t end = 0;
  for (const Segment& s : shape.segments->list) {
    if (s.batch != batch_row) continue;
    zero(end, s.begin);
    end = s.begin + s.length;
  }
  zero(end, shape.tokens);
}

}  // namespace ouzel
