// Whole tiny models of every type against their float64 twin: logits, and the gradient of the loss
// with respect to every parameter tensor by central differences of the twin.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/model.h"
#include "src/base/dense_tensor.h"
#include "src/layers/layer.h"
#include "src/models/network.h"
#include "tests/compare.h"
#include "tests/model_cases.h"

namespace ouzel {
namespace {

// A network with random weights (norms and biases too), and memory to run it.
class Bench {
 public:
  Bench(Context& context, const ModelConfig& config, std::uint64_t seed = 7)
      : context_(context), network_(config) {
    network_.allocate();
    network_.initialise(context, seed);
    Random random(seed, 99);
    for (const ParameterInfo& info : network_.table().list()) {
      if (info.init == Init::kNormal) continue;
      for (std::int64_t i = 0; i < info.size; ++i) {
        network_.weights()[info.offset + i] += static_cast<float>(0.3 * random.normal());
      }
    }
    network_.pack(context);
    gradients_.resize(static_cast<std::size_t>(network_.table().size()));
  }

  Network& network() { return network_; }
  const std::vector<float>& gradients() const { return gradients_; }
  test::ReferenceModel reference() const {
    std::vector<Parameter> list;
    for (const ParameterInfo& info : network_.table().list()) {
      list.push_back(
          {info.name, dense_tensor(network_.weights() + info.offset, DType::kF32, info.shape)});
    }
    return {network_.config(), list};
  }

  // Losses of [batch, tokens]; gradients of their sum replace those held.
  std::vector<float> backward(const std::vector<std::int32_t>& tokens,
                              const std::vector<std::int32_t>& targets, std::int64_t batch,
                              bool recompute, const std::vector<SequenceMemory>& before = {},
                              const std::vector<SequenceMemory>& after = {}) {
    std::fill(gradients_.begin(), gradients_.end(), 0.0f);
    const std::int64_t length = std::ssize(tokens) / batch;
    std::vector<std::int64_t> positions(tokens.size());
    for (std::int64_t r = 0; r < std::ssize(tokens); ++r) {
      positions[static_cast<std::size_t>(r)] =
          r % length + (before.empty() ? 0 : before[0].position);
    }
    std::vector<float> losses(tokens.size());
    const auto pass = [&](Arena& arena) {
      Run run{.context = context_,
              .arena = arena,
              .gradients = gradients_.data(),
              .batch = batch,
              .tokens = length,
              .positions = positions,
              .initial = before,
              .final = after,
              .training = true};
      network_.backward(run, tokens, targets, 1, losses.data(), recompute);
    };
    Arena counting;
    pass(counting);
    const Buffer memory(counting.peak());
    std::memset(memory.data(), 0xff, memory.bytes());
    Arena arena(memory);
    pass(arena);
    EXPECT_EQ(arena.peak(), counting.peak());
    EXPECT_EQ(arena.used(), 0u);
    peak_ = counting.peak();
    return losses;
  }
  std::size_t peak() const { return peak_; }

 private:
  Context& context_;
  Network network_;
  std::vector<float> gradients_;
  std::size_t peak_ = 0;
};

TEST(Layers, LossesAndGradientsAgreeWithFloat64) {
  const std::int64_t batch = 2, length = 9;
  for (const auto& [name, config] : test::model_cases()) {
    const auto tokens = test::random_tokens(batch * length, config.vocab_size, 1);
    const auto targets = test::random_tokens(batch * length, config.vocab_size, 2);
    // Central differences of the twin for some elements of each tensor.
    struct Sample {
      const ParameterInfo* info;
      std::vector<std::int64_t> at;
      std::vector<double> expected;
    };
    std::vector<Sample> samples;
    Context first({.threads = 1});
    Bench model(first, config);
    test::ReferenceModel twin = model.reference();
    const auto loss = [&] {
      double sum = 0;
      for (std::int64_t b = 0; b < batch; ++b) {
        const auto begin = b * length, end = begin + length;
        sum += twin.loss({tokens.begin() + begin, tokens.begin() + end},
                         {targets.begin() + begin, targets.begin() + end});
      }
      return sum;
    };
    Random random(3);
    for (const ParameterInfo& info : model.network().table().list()) {
      samples.push_back({&info, {}, {}});
      for (int i = 0; i < 6; ++i) {
        const auto at =
            static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(info.size)));
        double& weight = twin.parameters.at(info.name)[static_cast<std::size_t>(at)];
        const double saved = weight, step = 1e-5;
        weight = saved + step;
        const double above = loss();
        weight = saved - step;
        const double below = loss();
        weight = saved;
        samples.back().at.push_back(at);
        samples.back().expected.push_back((above - below) / (2 * step));
      }
    }
    for (const Isa isa : supported_isas()) {
      SCOPED_TRACE(std::string(name_of(isa)) + " " + name);
      Context context({.threads = 2, .isa = isa, .poison_scratch = true});
      Bench bench(context, config);
      double sum = 0;
      for (float value : bench.backward(tokens, targets, batch, false)) {
        sum += static_cast<double>(value);
      }
      EXPECT_NEAR(sum, loss(), 2e-5 * std::abs(loss()));
      for (const Sample& sample : samples) {
        std::vector<double> difference;
        for (std::size_t i = 0; i < sample.at.size(); ++i) {
          const float found =
              bench.gradients()[static_cast<std::size_t>(sample.info->offset + sample.at[i])];
          ASSERT_TRUE(std::isfinite(found)) << sample.info->name;
          difference.push_back(static_cast<double>(found) - sample.expected[i]);
        }
        EXPECT_LT(test::rms(difference), 1e-4 * test::rms(sample.expected) + 1e-6)
            << sample.info->name;
        EXPECT_GT(test::rms(sample.expected), 0) << sample.info->name;
      }
    }
  }
}

TEST(Layers, RecomputationGivesTheSameBitsInLessMemory) {
  Context context({.threads = 2, .poison_scratch = true});
  for (const auto& [name, config] : test::model_cases()) {
    SCOPED_TRACE(name);
    Bench bench(context, config);
    const auto tokens = test::random_tokens(40, config.vocab_size, 1);
    const auto targets = test::random_tokens(40, config.vocab_size, 2);
    const std::vector<float> losses = bench.backward(tokens, targets, 2, false);
    const std::vector<float> gradients = bench.gradients();
    const std::size_t peak = bench.peak();
    EXPECT_EQ(bench.backward(tokens, targets, 2, true), losses);
    EXPECT_EQ(bench.gradients(), gradients);
    EXPECT_LT(bench.peak(), peak);
  }
}

TEST(Layers, GradientsDoNotDependOnThreads) {
  Context one({.threads = 1}), three({.threads = 3});
  for (const auto& [name, config] : test::model_cases()) {
    SCOPED_TRACE(name);
    Bench a(one, config), b(three, config);
    const auto tokens = test::random_tokens(300, config.vocab_size, 1);
    const auto targets = test::random_tokens(300, config.vocab_size, 2);
    EXPECT_EQ(a.backward(tokens, targets, 3, false), b.backward(tokens, targets, 3, false));
    EXPECT_EQ(a.gradients(), b.gradients());
  }
}

// Two windows with the state passed between them have the losses of the unbroken sequence.
TEST(Layers, StatesPassFromWindowToWindow) {
  Context context({.threads = 2, .poison_scratch = true});
  for (auto [name, config] : test::model_cases()) {
    SCOPED_TRACE(name);
    if (config.mixer.kind == MixerKind::kSoftmaxAttention) config.mixer.window_size = 5;
    for (auto& hybrid : config.attn) hybrid.mixer.window_size = 4;
    Bench bench(context, config);
    const auto tokens = test::random_tokens(26, config.vocab_size, 1);
    const auto targets = test::random_tokens(26, config.vocab_size, 2);
    const std::vector<float> whole = bench.backward(tokens, targets, 1, false);
    const StateLayout& layout = bench.network().state_layout();
    std::vector<float> zeros(static_cast<std::size_t>(layout.size(0)), 0.0f), middle = zeros,
                                                                              end = zeros;
    std::vector<float> losses;
    std::vector<float>* memory[] = {&zeros, &middle, &end};
    for (std::size_t half = 0; half < 2; ++half) {
      const std::int64_t begin = half == 0 ? 0 : 11, stop = half == 0 ? 11 : 26;
      const std::vector<SequenceMemory> before{{&layout, memory[half]->data(), 0, begin}};
      const std::vector<SequenceMemory> after{{&layout, memory[half + 1]->data(), 0, begin}};
      const std::vector<float> kept = *memory[half];
      for (const bool recompute : {false, true}) {
        const auto part = bench.backward({tokens.begin() + begin, tokens.begin() + stop},
                                         {targets.begin() + begin, targets.begin() + stop}, 1,
                                         recompute, before, after);
        EXPECT_EQ(*memory[half], kept);
        if (recompute) losses.insert(losses.end(), part.begin(), part.end());
      }
    }
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(losses[i], whole[i], 2e-4 * (1 + std::abs(whole[i]))) << i;
    }
  }
}

}  // namespace
}  // namespace ouzel
