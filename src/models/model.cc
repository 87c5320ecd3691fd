#include "ouzel/model.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/formats/files.h"
#include "src/models/checkpoint.h"
#include "src/models/network.h"
#include "src/models/state_file.h"

namespace ouzel {
namespace {

[[noreturn]] void invalid(const std::string& why) {
  throw Error(ErrorKind::kInvalidArgument, "model: " + why);
}

}  // namespace

struct Workspace::Impl {
  Buffer memory;
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> positions;
  std::vector<SequenceMemory> sequences;
};

Workspace::Workspace() : impl_(std::make_unique<Impl>()) {}
Workspace::~Workspace() = default;
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
std::size_t Workspace::bytes() const { return impl_->memory.bytes(); }

Model::Model(Context& context, const ModelConfig& config, std::uint64_t seed) {
  auto network = std::make_shared<Network>(config);
  network->allocate();
  network->initialise(context, seed);
  network->pack(context);
  network->bind_states(network->fingerprint());
  network_ = std::move(network);
}

Model::Model(std::shared_ptr<const Network> network) : network_(std::move(network)) {}

Model Model::load(Context& context, const std::string& folder) {
  std::shared_ptr<Network> network = load_network(folder);
  network->pack(context);
  network->bind_states(network->fingerprint());
  return Model(std::move(network));
}

void Model::save(const std::string& folder) const {
  if (is_there(folder + "/" + kTrainingFile)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("{} holds a training run, which would go on with the weights of its {}: "
                    "save to another folder, or remove that file first",
                    folder, kTrainingFile));
  }
  save_network(*network_, folder);
}

const ModelConfig& Model::config() const { return network_->config(); }

std::vector<Parameter> Model::parameters() const {
  std::vector<Parameter> list;
  for (const ParameterInfo& info : network_->table().list()) {
    list.push_back(
        {info.name, dense_tensor(network_->weights() + info.offset, DType::kF32, info.shape)});
  }
  return list;
}

std::int64_t Model::parameter_count() const { return network_->table().size(); }

const std::string& Model::fingerprint() const { return network_->state_layout().fingerprint; }

State Model::new_state(std::int64_t capacity) const { return network_->new_state(capacity); }

State Model::load_state(const std::string& path, std::int64_t capacity) const {
  return load_state_file(*network_, path, capacity);
}

void Model::forward(Context& context, Workspace& workspace, View<const std::int32_t, 2> tokens,
                    std::span<State* const> states, View<float, 2> logits, LogitRows rows,
                    const Segments* segments) const {
  const std::int64_t batch = tokens.extent[0], length = tokens.extent[1];
  const std::int64_t vocab = config().vocab_size;
  if (segments != nullptr) segments->check("model", batch, length);
  const std::int64_t sequences = segments ? segments->count() : batch;
  if (!states.empty() && std::ssize(states) != sequences) {
    invalid(fmt::format("{} sequences were given {} states", sequences, states.size()));
  }
  const std::int64_t wanted = rows == LogitRows::kAll ? batch * length : sequences;
  if (logits.extent[0] != wanted || logits.extent[1] != vocab || logits.stride[1] != 1) {
    invalid(fmt::format("logits should be [{}, {}] with dense rows and are [{}, {}]", wanted, vocab,
                        logits.extent[0], logits.extent[1]));
  }

  Workspace::Impl& work = *workspace.impl_;
  // Rows outside every segment hold token 0 at position 0: whatever stands there is not looked at.
  work.tokens.assign(static_cast<std::size_t>(batch * length), 0);
  work.positions.assign(static_cast<std::size_t>(batch * length), 0);
  work.sequences.clear();
  for (std::int64_t n = 0; n < sequences; ++n) {
    const Segment s =
        segments ? segments->list[static_cast<std::size_t>(n)] : Segment{n, 0, length};
    std::int64_t position = 0;
    if (!states.empty()) {
      const State* state = states[static_cast<std::size_t>(n)];
      if (state == nullptr || state->layout_.get() == nullptr ||
          state->fingerprint() != fingerprint()) {
        invalid(
            fmt::format("state {} is of another model: its fingerprint is '{}', the model's '{}'",
                        n, state != nullptr ? state->fingerprint() : "", fingerprint()));
      }
      const auto earlier = states.first(static_cast<std::size_t>(n));
      if (const auto same = std::ranges::find(earlier, state); same != earlier.end()) {
        invalid(fmt::format("sequences {} and {} were given the same state; give each its own",
                            same - earlier.begin(), n));
      }
      position = state->position();
      if (network_->state_layout().grows() && s.length > state->capacity() - position) {
        invalid(
            fmt::format("state {} has room for {} tokens, has seen {} and was given {} more; "
                        "reserve more (State::reserve)",
                        n, state->capacity(), position, s.length));
      }
      work.sequences.push_back(Network::memory(*state));
    }
    for (std::int64_t t = 0; t < s.length; ++t) {
      const std::int32_t token = tokens.at(s.batch, s.begin + t);
      if (token < 0 || token >= vocab) {
        invalid(fmt::format("token {} of sequence {} is {}; the vocabulary has {}", t, n, token,
                            vocab));
      }
      const auto row = static_cast<std::size_t>(s.batch * length + s.begin + t);
      work.tokens[row] = token;
      work.positions[row] = position + t;
    }
  }
  if (batch * length == 0) {
    for (std::int64_t r = 0; r < wanted; ++r) std::fill_n(logits(r), vocab, 0.0f);
    return;
  }

  const auto pass = [&](Arena& arena) {
    Run run{.context = context,
            .arena = arena,
            .batch = batch,
            .tokens = length,
            .segments = segments,
            .positions = work.positions,
            .initial = work.sequences,
            .final = work.sequences};
    network_->forward(run, work.tokens, logits, rows);
  };
  Arena counting;
  pass(counting);
  if (work.memory.bytes() < counting.peak()) {
    work.memory = Buffer();  // free first: the peak is the larger of the two, not the sum
    work.memory = Buffer(counting.peak());
  }
  if (context.impl().options().poison_scratch) {
    std::memset(work.memory.data(), 0xff, work.memory.bytes());
  }
  Arena arena(work.memory);
  pass(arena);

  if (segments != nullptr && rows == LogitRows::kAll) {
    std::vector<bool> inside(static_cast<std::size_t>(wanted));
    for (const Segment& s : segments->list) {
      for (std::int64_t t = 0; t < s.length; ++t) {
        inside[static_cast<std::size_t>(s.batch * length + s.begin + t)] = true;
      }
    }
    for (std::int64_t r = 0; r < wanted; ++r) {
      if (!inside[static_cast<std::size_t>(r)]) std::fill_n(logits(r), vocab, 0.0f);
    }
  }
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t taken =
        segments ? segments->list[static_cast<std::size_t>(n)].length : length;
    if (!states.empty()) Network::advance(*states[static_cast<std::size_t>(n)], taken);
    if (taken == 0 && rows == LogitRows::kLast) std::fill_n(logits(n), vocab, 0.0f);
  }
}

void Model::forward(Context& context, Workspace& workspace, std::span<const std::int32_t> tokens,
                    State& state, View<float, 2> logits, LogitRows rows) const {
  State* const states[] = {&state};
  forward(context, workspace, {tokens.data(), {1, std::ssize(tokens)}}, states, logits, rows);
}

}  // namespace ouzel
