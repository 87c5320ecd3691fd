// States and their files: safetensors with one tensor per part (growing parts hold the rows in use)
// and metadata that names the format, the fingerprint and the position.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/base/dense_tensor.h"
#include "src/base/text.h"
#include "src/formats/safetensors.h"
#include "src/models/network.h"
#include "src/models/state_file.h"

namespace ouzel {
namespace {

constexpr const char* kFormat = "ouzel-state-1";
constexpr const char* kSampler = "sampler";

// Floats of a part that are in use at a position.
std::int64_t used(const StatePart& part, std::int64_t position) {
  return part.grows ? part.size * position : part.size;
}

std::vector<std::int64_t> shape_in_file(const StatePart& part, std::int64_t position) {
  std::vector<std::int64_t> shape = part.shape;
  if (part.grows) shape.insert(shape.begin(), position);
  return shape;
}

void check_capacity(std::int64_t tokens) {
  if (tokens >= 0) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("a state's capacity of {} tokens is negative; give 0 or more", tokens));
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::kBadFile, fmt::format("{}: {}", path, why));
}

}  // namespace

State::State() = default;
State::~State() = default;
State::State(State&&) noexcept = default;
State& State::operator=(State&&) noexcept = default;

State::State(std::shared_ptr<const StateLayout> layout, std::int64_t capacity)
    : layout_(std::move(layout)) {
  check_capacity(capacity);
  if (!layout_->fits(capacity)) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a state with room for {} tokens needs more memory than can be "
                            "addressed; ask for room for fewer (it can be reserved later)",
                            capacity));
  }
  capacity_ = layout_->grows() ? capacity : 0;
  const std::size_t bytes = static_cast<std::size_t>(layout_->size(capacity_)) * sizeof(float);
  try {
    memory_ = Buffer::zeros(bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kOutOfMemory) throw;
    throw Error(error.kind(),
                fmt::format("a state with room for {} tokens takes {} bytes, which this machine "
                            "does not have; ask for room for fewer (it can be reserved later)",
                            capacity_, bytes));
  }
}

State::State(const State& other)
    : sampler(other.sampler),
      layout_(other.layout_),
      memory_(other.memory_.bytes()),
      capacity_(other.capacity_),
      position_(other.position_) {
  if (memory_.bytes() != 0) std::memcpy(memory_.data(), other.memory_.data(), memory_.bytes());
}

State& State::operator=(const State& other) {
  if (this != &other) *this = State(other);
  return *this;
}

bool operator==(const State& a, const State& b) {
  if (a.position_ != b.position_ || a.sampler != b.sampler || !a.layout_ != !b.layout_)
    return false;
  if (!a.layout_) return true;
  if (a.layout_ != b.layout_ && (a.layout_->fingerprint != b.layout_->fingerprint ||
                                 a.layout_->size(1) != b.layout_->size(1))) {
    return false;
  }
  const SequenceMemory x = Network::memory(a), y = Network::memory(b);
  for (std::size_t i = 0; i < a.layout_->parts().size(); ++i) {
    const int part = static_cast<int>(i);
    const std::int64_t floats = used(a.layout_->parts()[i], a.position_);
    if (floats != 0 && std::memcmp(x.part(part), y.part(part),
                                   static_cast<std::size_t>(floats) * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

std::size_t State::bytes() const { return memory_.bytes() + sampler.size(); }

const std::string& State::fingerprint() const {
  static const std::string none;
  return layout_ ? layout_->fingerprint : none;
}

void State::reserve(std::int64_t tokens) {
  check_capacity(tokens);
  if (!layout_ || !layout_->grows() || tokens <= capacity_) return;
  State larger(layout_, tokens);
  larger.position_ = position_;
  const SequenceMemory from = Network::memory(*this), to = Network::memory(larger);
  for (std::size_t i = 0; i < layout_->parts().size(); ++i) {
    const int part = static_cast<int>(i);
    const std::int64_t floats = used(layout_->parts()[i], position_);
    std::copy_n(from.part(part), floats, to.part(part));
  }
  larger.sampler = std::move(sampler);
  *this = std::move(larger);
}

void State::clear() {
  if (memory_.bytes() != 0) std::memset(memory_.data(), 0, memory_.bytes());
  position_ = 0;
  sampler.clear();
}

void State::save(const std::string& path) const {
  if (!layout_) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: a state that belongs to no model cannot be saved", path));
  }
  std::vector<TensorToWrite> tensors;
  const SequenceMemory memory = Network::memory(*this);
  for (std::size_t i = 0; i < layout_->parts().size(); ++i) {
    const StatePart& part = layout_->parts()[i];
    tensors.push_back({part.name, dense_tensor(memory.part(static_cast<int>(i)), DType::kF32,
                                               shape_in_file(part, position_))});
  }
  const auto bytes = static_cast<std::int64_t>(sampler.size());
  tensors.push_back({kSampler, dense_tensor(sampler.data(), DType::kU8, {bytes})});
  write_safetensors(path, tensors,
                    {{"format", kFormat},
                     {"fingerprint", layout_->fingerprint},
                     // In as many digits at any position: the file has one size.
                     {"position", fmt::format("{:016}", position_)},
                     {"layout",
                      "s [head, key, value], z [head, key], conv [channel, tap], "
                      "k and v [token, head, size]"}});
}

std::int64_t position_in_file(const std::string& path, const std::string& text) {
  std::int64_t position = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), position);
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
  if (error != std::errc() || end != text.data() + text.size() || position < 0 ||
      position > kMostTokens) {
    refuse(path, fmt::format("'{}' is not a position", printable(text)));
  }
  return position;
}

State load_state_file(const Network& network, const std::string& path, std::int64_t capacity) {
  check_capacity(capacity);
  const SafetensorsReader file(path);
  const auto metadata = [&](const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string() : found->second;
  };
  if (metadata("format") != kFormat) {
    refuse(path, fmt::format("not a state file of format {} (its format is '{}')", kFormat,
                             metadata("format")));
  }
  const StateLayout& layout = network.state_layout();
  if (metadata("fingerprint") != layout.fingerprint) {
    refuse(path,
           fmt::format("this state is of another model: its fingerprint is {}, the model's {}; "
                       "use the model that made it, which must not have been trained further",
                       metadata("fingerprint"), layout.fingerprint));
  }
  const std::int64_t position = position_in_file(path, metadata("position"));

  // Everything is checked against the file's own sizes before memory is taken for it.
  std::vector<const NamedTensor*> found;
  for (const StatePart& part : layout.parts()) {
    const std::vector<std::int64_t> shape = shape_in_file(part, position);
    const NamedTensor* tensor = file.find(part.name);
    if (tensor == nullptr) refuse(path, fmt::format("tensor {} is missing", part.name));
    if (tensor->dtype != DType::kF32 || tensor->shape != shape) {
      refuse(path, fmt::format("tensor {} should be F32 {} and is {} {}", part.name,
                               shape_string(shape), tensor->type, shape_string(tensor->shape)));
    }
    found.push_back(tensor);
  }
  const NamedTensor* sampler = file.find(kSampler);
  if (sampler == nullptr || sampler->dtype != DType::kU8 || sampler->shape.size() != 1) {
    refuse(path, "tensor sampler (U8, one dimension) is missing");
  }
  if (file.tensors().size() != layout.parts().size() + 1) {
    refuse(path, fmt::format("holds {} tensors, a state of this model has {}",
                             file.tensors().size(), layout.parts().size() + 1));
  }

  State state = network.new_state(std::max(position, capacity));
  Network::advance(state, position);
  const SequenceMemory memory = Network::memory(state);
  for (std::size_t i = 0; i < found.size(); ++i) {
    file.read_f32(*found[i], memory.part(static_cast<int>(i)));
  }
  state.sampler.resize(sampler->bytes);
  file.read(*sampler, state.sampler.data());
  return state;
}

}  // namespace ouzel
