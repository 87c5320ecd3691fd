#include "src/models/network.h"

#include <algorithm>
#include <cstring>

#include "src/base/context_impl.h"
#include "src/base/hash.h"
#include "src/base/random.h"
#include "src/ops/pointwise.h"

namespace ouzel {
namespace {

View<float, 3> ungrouped(Matrix m) { return heads_of(m, 0, 1, m.extent[1]); }

const ModelConfig& checked(const ModelConfig& config) {
  config.check();
  return config;
}

std::vector<std::unique_ptr<Block>> make_blocks(const Builder& builder) {
  std::vector<std::unique_ptr<Block>> blocks;
  for (std::int64_t layer = 0; layer < builder.config.num_hidden_layers; ++layer) {
    blocks.push_back(std::make_unique<Block>(builder, layer));
  }
  return blocks;
}

Linear make_head(const Builder& builder, std::int64_t embedding) {
  const ModelConfig& config = builder.config;
  if (!config.tie_word_embeddings) {
    return {builder, {{"lm_head", config.vocab_size}}, config.hidden_size};
  }
  builder.table.add_alias("lm_head.weight");
  return {builder, embedding, config.vocab_size, config.hidden_size};
}

}  // namespace

Network::Network(const ModelConfig& config)
    : config_(checked(config)),
      builder_{config_, table_, *layout_, linears_},
      embedding_(table_, "model.embeddings", config_.vocab_size, config_.hidden_size),
      blocks_(make_blocks(builder_)),
      norm_(table_, "model.norm", config_.hidden_size, config_.norm_eps),
      head_(make_head(builder_, embedding_.offset())) {}

std::int64_t Network::parameters_without_embeddings() const {
  const std::int64_t matrix = config_.vocab_size * config_.hidden_size;
  return table_.size() - (config_.tie_word_embeddings ? 1 : 2) * matrix;
}

void Network::allocate() {
  weights_ = Buffer(static_cast<std::size_t>(table_.size()) * sizeof(float));
}

void Network::initialise(Context& context, std::uint64_t seed) {
  constexpr std::int64_t kBlock = 4096;  // numbers that one task draws
  const double deviation = config_.initializer_range;
  for (std::size_t i = 0; i < table_.list().size(); ++i) {
    const ParameterInfo& info = table_.list()[i];
    float* values = weights() + info.offset;
    if (info.init != Init::kNormal) {
      std::fill_n(values, info.size, info.init == Init::kOnes ? 1.0f : 0.0f);
      continue;
    }
    context.impl().run((info.size + kBlock - 1) / kBlock, [&](std::int64_t block, Scratch&) {
      const std::int64_t begin = block * kBlock, end = std::min(info.size, begin + kBlock);
      Random random(seed, i, static_cast<std::uint64_t>(begin) * 4);  // a normal consumes four
      for (std::int64_t j = begin; j < end; ++j) {
        values[j] = static_cast<float>(deviation * random.normal());
      }
    });
  }
}

void Network::pack(Context& context) {
  for (Linear* linear : linears_) linear->pack(context, weights());
}

std::size_t Network::packed_bytes() const {
  std::size_t bytes = 0;
  for (const Linear* linear : linears_) bytes += linear->packed_bytes();
  return bytes;
}

std::size_t Network::scratch_bytes() const {
  std::size_t bytes = 0;
  for (const Linear* linear : linears_) bytes = std::max(bytes, linear->scratch_bytes());
  return bytes;
}

std::string Network::fingerprint() const {
  const std::string json = config_.to_json();
  return hash_string(hash_bytes(weights(), weights_.bytes(), hash_bytes(json.data(), json.size())));
}

SequenceMemory Network::memory(const State& state) {
  return {state.layout_.get(), state.memory_.f32(), state.capacity_, state.position_};
}

Matrix Network::embed_and_mix(Run& run, std::span<const std::int32_t> tokens) const {
  run.weights = weights();
  const Matrix x = run.arena.matrix(run.rows(), config_.hidden_size);
  embedding_.forward(run, tokens, x);
  for (const auto& block : blocks_) {
    const Frame frame = block->push(run.arena, run);
    block->forward(run, x, x, frame);
    run.arena.release(frame);
  }
  return x;
}

void Network::forward(Run& run, std::span<const std::int32_t> tokens, Matrix logits,
                      LogitRows rows) const {
  const std::size_t mark = run.arena.used();
  Matrix x = embed_and_mix(run, tokens);
  if (rows == LogitRows::kLast) {
    const Matrix last = run.arena.matrix(run.sequences(), config_.hidden_size);
    run.compute([&] {
      const std::size_t bytes = static_cast<std::size_t>(config_.hidden_size) * sizeof(float);
      for (std::int64_t n = 0; n < run.sequences(); ++n) {
        const Segment s = run.segment(n);
        if (s.length == 0) {
          std::memset(last(n), 0, bytes);
        } else {
          std::memcpy(last(n), x(s.batch * run.tokens + s.begin + s.length - 1), bytes);
        }
      }
    });
    x = last;
  }
  norm_.forward(run, ungrouped(x), ungrouped(x), nullptr);
  head_.forward(run, x, logits);
  run.arena.release(mark);
}

void Network::losses(Run& run, std::span<const std::int32_t> tokens,
                     std::span<const std::int32_t> targets, float* losses) const {
  const std::size_t mark = run.arena.used();
  const Matrix logits = run.arena.matrix(run.rows(), config_.vocab_size);
  forward(run, tokens, logits, LogitRows::kAll);
  run.compute([&] { cross_entropy(run.context, logits, targets, 1, losses, nullptr); });
  run.arena.release(mark);
}

void Network::backward(Run& run, std::span<const std::int32_t> tokens,
                       std::span<const std::int32_t> targets, float weight, float* losses,
                       bool recompute) const {
  run.weights = weights();
  const std::size_t mark = run.arena.used();
  const std::int64_t hidden = config_.hidden_size;
  const Matrix d = run.arena.matrix(run.rows(), hidden);  // the gradient of the stream
  std::vector<Matrix> x{run.arena.matrix(run.rows(), hidden)};
  std::vector<Frame> frames;
  embedding_.forward(run, tokens, x[0]);
  for (const auto& block : blocks_) {
    x.push_back(run.arena.matrix(run.rows(), hidden));
    frames.push_back(block->push(run.arena, run));
    block->forward(run, x.end()[-2], x.back(), frames.back());
    if (recompute) run.arena.release(frames.back());
  }

  const std::size_t top = run.arena.used();
  const Matrix normed = run.arena.matrix(run.rows(), hidden);
  float* rstd = run.arena.take<float>(run.rows());
  Matrix logits = run.arena.matrix(run.rows(), config_.vocab_size);
  norm_.forward(run, ungrouped(x.back()), ungrouped(normed), rstd);
  head_.forward(run, normed, logits);
  run.compute([&] { cross_entropy(run.context, logits, targets, weight, losses, &logits); });
  head_.backward(run, normed, logits, d);
  norm_.backward(run, ungrouped(x.back()), rstd, ungrouped(d), ungrouped(d));
  run.arena.release(top);

  for (std::size_t layer = blocks_.size(); layer-- > 0;) {
    const Block& block = *blocks_[layer];
    if (recompute) {
      Run again = run;
      again.final = {};
      block.push(run.arena, run);
      block.forward(again, x[layer], x[layer + 1], frames[layer]);
    }
    block.backward(run, x[layer], d, frames[layer]);
    run.arena.release(frames[layer]);
  }
  embedding_.backward(run, tokens, d);
  run.arena.release(mark);
}

}  // namespace ouzel
