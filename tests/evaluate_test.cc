// Evaluation: bits per byte against log-softmax in float64 of the model's own logits, and what the
// numbers may not depend on.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/evaluate.h"
#include "ouzel/model.h"

namespace ouzel {
namespace {

ModelConfig small(const std::string& type) {
  ModelConfig config = ModelConfig::defaults(type);
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.intermediate_size = 64;
  config.mixer.num_heads = 2;
  config.initializer_range = 0.3;
  return config;
}

ModelConfig hybrid() {
  ModelConfig config = small("retnet");
  MixerConfig softmax = MixerConfig::defaults(MixerKind::kSoftmaxAttention);
  softmax.num_heads = 2;
  config.attn = {{{1}, softmax}};
  return config;
}

std::string text_of(std::size_t size) {
  std::string text;
  for (std::size_t i = 0; text.size() < size; ++i) {
    text += "verse " + std::to_string(i * i % 97) + " of the book; ";
  }
  text.resize(size);
  return text;
}

// Gives a text in pieces of at most `piece` bytes.
auto reader(std::string_view text, std::size_t piece = 1 << 16) {
  return [text, piece](std::span<char> to) mutable {
    const std::size_t size = std::min({piece, to.size(), text.size()});
    std::memcpy(to.data(), text.data(), size);
    text.remove_prefix(size);
    return size;
  };
}

struct Outcome {
  Evaluation result;
  std::vector<float> losses;
};

Outcome run(Context& context, const Model& model, std::string_view text,
            EvaluateOptions options = {}, std::size_t piece = 1 << 16) {
  Outcome outcome;
  options.losses = [&](std::span<const float> losses) {
    outcome.losses.insert(outcome.losses.end(), losses.begin(), losses.end());
  };
  outcome.result = evaluate(context, model, reader(text, piece), options);
  return outcome;
}

// Mean bits of tokens 1 ... n-1, each from the tokens of its window before it, one forward call a
// window.
double expected_bits(Context& context, const Model& model, const std::string& text,
                     std::size_t window) {
  double nats = 0;
  for (std::size_t begin = 0; begin + 1 < text.size(); begin += window) {
    const std::size_t length = std::min(window, text.size() - 1 - begin);
    std::vector<std::int32_t> tokens(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                     text.begin() + static_cast<std::ptrdiff_t>(begin + length));
    std::vector<float> logits(length * 256);
    Workspace workspace;
    const auto rows = static_cast<std::int64_t>(length);
    model.forward(context, workspace, View<const std::int32_t, 2>(tokens.data(), {1, rows}), {},
                  {logits.data(), {rows, 256}}, LogitRows::kAll);
    for (std::size_t i = 0; i < length; ++i) {
      double sum = 0;
      for (std::size_t v = 0; v < 256; ++v) sum += std::exp(double(logits[i * 256 + v]));
      const auto target = static_cast<unsigned char>(text[begin + i + 1]);
      nats += std::log(sum) - double(logits[i * 256 + target]);
    }
  }
  return nats / std::numbers::ln2 / static_cast<double>(text.size() - 1);
}

TEST(Evaluate, WindowsAndTheCarriedRunAreTheMeanOfTheLosses) {
  Context context({.threads = 1, .poison_scratch = true});
  for (const ModelConfig& config : {small("linear_attn"), hybrid()}) {
    const Model model(context, config, 3);
    for (std::int64_t window : {1L, 7L, 256L, 700L, 2048L, 3000L, 9999L}) {
      const std::string text = text_of(window < 10 ? 300 : 5000);  // more than two chunks
      const auto size = static_cast<std::int64_t>(text.size());
      const Outcome found = run(context, model, text, {.window = window});
      EXPECT_EQ(found.result.tokens, size);
      EXPECT_NEAR(found.result.bits_per_byte,
                  expected_bits(context, model, text, static_cast<std::size_t>(window)), 1e-4)
          << "windows of " << window;
      EXPECT_NEAR(found.result.bits_per_byte_carried,
                  expected_bits(context, model, text, text.size()), 1e-4);
      ASSERT_EQ(found.losses.size(), text.size() - 1);
      double sum = 0;
      for (float loss : found.losses) sum += double(loss);
      EXPECT_NEAR(sum / std::numbers::ln2 / double(size - 1), found.result.bits_per_byte_carried,
                  1e-6);
    }
  }
}

TEST(Evaluate, LogitsAreThoseAfterTheLastToken) {
  Context context({.threads = 1, .poison_scratch = true});
  const Model model(context, hybrid(), 3);
  for (std::size_t size : {1UL, 300UL, 2048UL, 2049UL}) {
    const std::string text = text_of(size);
    const Evaluation result = evaluate(context, model, reader(text));
    const std::vector<std::int32_t> tokens(text.begin(), text.end());
    State state = model.new_state(static_cast<std::int64_t>(size));
    Workspace workspace;
    std::vector<float> logits(256);
    model.forward(context, workspace, tokens, state, {logits.data(), {1, 256}});
    ASSERT_EQ(result.logits.size(), 256u);
    for (std::size_t i = 0; i < 256; ++i) EXPECT_NEAR(result.logits[i], logits[i], 1e-3) << size;
  }
}

TEST(Evaluate, PiecesAndThreadsDoNotMatter) {
  Context one({.threads = 1}), two({.threads = 2});
  const Model model(one, small("retnet"), 3);
  const std::string text = text_of(4500);
  const Outcome whole = run(one, model, text, {.window = 100});
  for (std::size_t piece : {1UL, 13UL, 2048UL}) {
    const Outcome pieces = run(two, model, text, {.window = 100}, piece);
    EXPECT_EQ(pieces.result.bits_per_byte, whole.result.bits_per_byte);
    EXPECT_EQ(pieces.result.bits_per_byte_carried, whole.result.bits_per_byte_carried);
    EXPECT_EQ(pieces.losses, whole.losses);
    EXPECT_EQ(pieces.result.logits, whole.result.logits);
  }
}

TEST(Evaluate, RunsMayBeLeftOut) {
  Context context({.threads = 1});
  const Model model(context, small("retnet"), 3);
  const std::string text = text_of(400);
  const Outcome both = run(context, model, text);
  const Outcome carried = run(context, model, text, {.window = 0});
  EXPECT_TRUE(std::isnan(carried.result.bits_per_byte));
  EXPECT_EQ(carried.result.bits_per_byte_carried, both.result.bits_per_byte_carried);
  const Outcome windows = run(context, model, text, {.carried = false});
  EXPECT_TRUE(std::isnan(windows.result.bits_per_byte_carried));
  EXPECT_EQ(windows.result.bits_per_byte, both.result.bits_per_byte);
  EXPECT_TRUE(windows.losses.empty() && windows.result.logits.empty());
}

TEST(Evaluate, ShortTextsAndWrongOptions) {
  Context context({.threads = 1});
  const Model model(context, small("retnet"), 3);
  const Outcome one = run(context, model, "x");
  EXPECT_EQ(one.result.tokens, 1);
  EXPECT_TRUE(std::isnan(one.result.bits_per_byte));
  EXPECT_TRUE(std::isnan(one.result.bits_per_byte_carried));
  EXPECT_TRUE(one.losses.empty());
  const Outcome two = run(context, model, "xy");
  EXPECT_EQ(two.losses.size(), 1u);
  EXPECT_EQ(two.result.bits_per_byte, two.result.bits_per_byte_carried);
  const auto kind_of = [&](std::string_view text, const EvaluateOptions& options) {
    try {
      run(context, model, text, options);
    } catch (const Error& e) {
      return e.kind();
    }
    return ErrorKind::kIo;
  };
  EXPECT_EQ(kind_of("", {}), ErrorKind::kBadFile);
  EXPECT_EQ(kind_of("xy", {.window = -1}), ErrorKind::kInvalidArgument);
  ModelConfig config = small("retnet");
  config.vocab_size = 300;
  const Model wide(context, config, 3);
  EXPECT_THROW(run(context, wide, "xy"), Error);
}

TEST(Evaluate, ACancelledContextEndsIt) {
  int asked = 0;
  Context context({.threads = 1, .cancelled = [&] { return ++asked > 100; }});
  const Model model(context, small("retnet"), 3);
  const std::string text = text_of(100000);
  try {
    evaluate(context, model, reader(text));
    FAIL() << "was not cancelled";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCancelled);
  }
}

}  // namespace
}  // namespace ouzel
