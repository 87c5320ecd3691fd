// Generation as a function of the stream alone: stopped and resumed at every token, prompts in any
// pieces, stop texts over token borders, growing caches, damaged and foreign states.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "ouzel/model.h"
#include "tests/temp_folder.h"

namespace ouzel {
namespace {

ModelConfig small(const std::string& type) {
  ModelConfig config = ModelConfig::defaults(type);
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.intermediate_size = 64;
  config.mixer.num_heads = 2;
  config.initializer_range = 0.3;  // far from uniform logits
  return config;
}

ModelConfig hybrid() {
  ModelConfig config = small("linear_attn");
  config.mixer.use_short_conv = true;
  config.num_hidden_layers = 3;
  MixerConfig softmax = MixerConfig::defaults(MixerKind::kSoftmaxAttention);
  softmax.num_heads = 2;
  config.attn = {{{1}, softmax}};
  softmax.window_size = 40;
  config.attn.push_back({{2}, softmax});
  return config;
}

// A context whose scratch is poisoned.
Context context_with(int threads = 1, Isa isa = default_isa()) {
  return Context({.threads = threads, .isa = isa, .poison_scratch = true});
}

std::string generated(Generator& generator, std::int64_t tokens,
                      Finish expected = Finish::kLength) {
  std::string text;
  EXPECT_EQ(generator.generate(tokens,
                               [&](std::string_view piece) {
                                 text += piece;
                                 return true;
                               }),
            expected);
  return text;
}

std::string prompt(std::size_t size) {
  std::string text;
  while (text.size() < size) text += "And God said, Let there be light: and there was light. ";
  text.resize(size);
  return text;
}

// What `call` throws: "KIND: sentence"; "" for nothing.
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return std::to_string(static_cast<int>(e.kind())) + ": " + e.what();
  }
  return "";
}
std::string begins(ErrorKind kind) { return std::to_string(static_cast<int>(kind)) + ": "; }

const SamplingOptions kWild = {.temperature = 1.1,
                               .top_k = 100,
                               .top_p = 0.98,
                               .min_p = 0.001,
                               .repetition_penalty = 1.2,
                               .repetition_window = 12,
                               .seed = 99};

TEST(Generator, GoesOnBitForBitFromEverySplit) {
  constexpr std::int64_t kTokens = 20;
  for (Isa isa : supported_isas()) {
    Context context = context_with(1, isa);
    for (const ModelConfig& config : {small("retnet"), small("linear_attn"), hybrid()}) {
      const Model model(context, config, 5);
      Generator unbroken(context, model, kWild);
      unbroken.read(prompt(70));
      const std::string text = generated(unbroken, kTokens);
      EXPECT_EQ(text.size(), 20u);
      const State end = unbroken.state();
      EXPECT_EQ(Generator::position_of(end), 70 + kTokens);
      for (std::int64_t split = 0; split <= kTokens; ++split) {
        Generator first(context, model, kWild);
        first.read(prompt(70));
        const std::string before = generated(first, split);
        const test::TempFolder folder;
        first.state().save(folder / "saved.state");
        Generator second(context, model, model.load_state(folder / "saved.state"));
        EXPECT_EQ(before + generated(second, kTokens - split), text) << "split at " << split;
        EXPECT_TRUE(second.state() == end) << "split at " << split;
      }
    }
  }
}

TEST(Generator, APromptMayComeInAnyPieces) {
  Context context = context_with();
  const Model model(context, hybrid(), 5);
  // Around the borders of chunks, where a chunk waits and where a single token is left.
  for (std::int64_t size : {1L, 2L, Generator::kChunk - 1, Generator::kChunk, Generator::kChunk + 1,
                            2 * Generator::kChunk + 77}) {
    const std::string text = prompt(static_cast<std::size_t>(size));
    Generator whole(context, model, kWild);
    whole.read(text);
    const State read = whole.state();
    EXPECT_EQ(Generator::position_of(read), size);
    EXPECT_LT(size - read.position(), Generator::kChunk + 1);
    const std::string expected = generated(whole, 5);
    for (std::size_t piece : {1UL, 7UL, 512UL, 600UL}) {
      Generator pieces(context, model, kWild);
      for (std::size_t at = 0; at < text.size(); at += piece) {
        pieces.read(std::string_view(text).substr(at, piece));
        pieces.read("");
        // Stopped and resumed while reading, too.
        if (at % 3 == 0) pieces = Generator(context, model, pieces.state());
      }
      EXPECT_TRUE(pieces.state() == read) << size << " by " << piece;
      EXPECT_EQ(generated(pieces, 5), expected) << size << " by " << piece;
      EXPECT_TRUE(pieces.state() == whole.state()) << size << " by " << piece;
    }
  }
}

TEST(Generator, APromptAfterATextWaitsToTheNextBorder) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator generator(context, model, kWild);
  generator.read(prompt(70));
  generated(generator, 20);
  generator.read(prompt(500));
  const State saved = generator.state();
  EXPECT_EQ(saved.position(), 512);
  EXPECT_EQ(Generator::position_of(saved), 590);
  Generator resumed(context, model, saved);
  EXPECT_EQ(generated(resumed, 5), generated(generator, 5));
  EXPECT_EQ(resumed.statistics().prompt_tokens, 590 - 512);
}

TEST(Generator, PromptsAndTextsMayTakeTurns) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator unbroken(context, model, kWild);
  std::string text;
  for (std::size_t turn = 0; turn < 4; ++turn) {
    unbroken.read(prompt(200 * turn + 1));
    text += generated(unbroken, 3);
  }
  Generator broken(context, model, kWild);
  std::string again;
  for (std::size_t turn = 0; turn < 4; ++turn) {
    const std::string piece = prompt(200 * turn + 1);
    broken.read(piece.substr(0, piece.size() / 2));
    broken = Generator(context, model, broken.state());
    broken.read(piece.substr(piece.size() / 2));
    again += generated(broken, 1);
    broken = Generator(context, model, broken.state());
    again += generated(broken, 2);
  }
  EXPECT_EQ(again, text);
  EXPECT_TRUE(broken.state() == unbroken.state());
}

TEST(Generator, GreedyTextIsTheArgmaxOfTheModelsLogits) {
  Context context = context_with();
  const Model model(context, hybrid(), 5);
  const std::string text = prompt(100);
  Generator generator(context, model, {.temperature = 0});
  generator.read(text);
  const std::string found = generated(generator, 8);

  Workspace workspace;
  State state = model.new_state(200);
  std::vector<std::int32_t> tokens(text.begin(), text.end());
  std::vector<float> logits(256);
  std::string expected;
  for (int i = 0; i < 8; ++i) {
    model.forward(context, workspace, tokens, state, {logits.data(), {1, 256}});
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    expected += static_cast<char>(best);
    tokens = {static_cast<std::int32_t>(best)};
  }
  EXPECT_EQ(found, expected);
}

TEST(Generator, ThreadsDoNotMatter) {
  Context one = context_with(1), two = context_with(2);
  const Model model(one, hybrid(), 5);
  Generator a(one, model, kWild), b(two, model, kWild);
  for (Generator* generator : {&a, &b}) generator->read(prompt(700));
  EXPECT_EQ(generated(a, 20), generated(b, 20));
  EXPECT_TRUE(a.state() == b.state());
}

TEST(Generator, AnEmptyPromptIsALineBreak) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator empty(context, model, kWild), line(context, model, kWild);
  empty.read("");
  EXPECT_EQ(empty.position(), 0);
  line.read("\n");
  EXPECT_EQ(generated(empty, 10), generated(line, 10));
  EXPECT_TRUE(empty.state() == line.state());
}

TEST(Generator, OptionsComeFromTheStateUnlessGiven) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator first(context, model, kWild);
  first.read(prompt(30));
  const State state = first.state();
  EXPECT_EQ(Generator::sampling_of(state), kWild);
  EXPECT_EQ(Generator::sampling_of(model.new_state()), SamplingOptions{});
  SamplingOptions other = kWild;
  other.seed = 100;
  Generator same(context, model, state), reseeded(context, model, state, other);
  const std::string text = generated(same, 30);
  EXPECT_NE(generated(reseeded, 30), text);
  Generator again(context, model, state);
  EXPECT_EQ(generated(again, 30), text) << "a state may be gone on from any number of times";
}

TEST(Generator, StopTextsEndAndAreLeftOut) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator free(context, model, kWild);
  free.read(prompt(20));
  const std::string text = generated(free, 60);
  SamplingOptions options = kWild;
  options.stop = {text.substr(20, 4), "never to be seen"};
  const std::string expected = text.substr(0, text.find(options.stop[0]));

  Generator generator(context, model, options);
  generator.read(prompt(20));
  EXPECT_EQ(generated(generator, 60, Finish::kStop), expected);
  EXPECT_EQ(generator.take_held_text(), "");
  EXPECT_EQ(generator.position(), 20 + std::int64_t(expected.size()) + 4);
  // The stream has seen the stop text, and goes on after it.
  options.stop.clear();
  Generator after(context, model, generator.state(), options);
  EXPECT_EQ(generated(after, 10), text.substr(expected.size() + 4, 10));
}

TEST(Generator, TextThatMayBeginAStopIsHeldBackOverASplit) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator free(context, model, kWild);
  free.read(prompt(20));
  const std::string text = generated(free, 60);
  SamplingOptions options = kWild;
  // One that is completed at 44, and one that only begins (at 5, with six bytes) and fails.
  options.stop = {text.substr(40, 4), text.substr(5, 6) + "\x01never"};
  Generator unbroken(context, model, options);
  unbroken.read(prompt(20));
  const std::string expected = generated(unbroken, 60, Finish::kStop);
  EXPECT_EQ(expected, text.substr(0, 40));
  for (std::int64_t split = 0; split < 44; ++split) {
    Generator first(context, model, options);
    first.read(prompt(20));
    const std::string before = generated(first, split);
    EXPECT_LE(before.size(), static_cast<std::size_t>(split));
    Generator second(context, model, first.state());
    EXPECT_EQ(before + generated(second, 60, Finish::kStop), expected) << "split at " << split;
    EXPECT_TRUE(second.state() == unbroken.state()) << "split at " << split;
    // Without the stop texts, or after another prompt, what was held is text.
    Generator without(context, model, first.state(), kWild);
    EXPECT_EQ(before + generated(without, 3), text.substr(0, std::size_t(split) + 3));
    Generator prompted(context, model, first.state());
    prompted.read("x");
    EXPECT_EQ(before + prompted.take_held_text(), text.substr(0, std::size_t(split)));
    EXPECT_EQ(before + first.take_held_text(), text.substr(0, std::size_t(split)));
  }
}

TEST(Generator, TheStateOfARecurrentModelHasOneSize) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator generator(context, model, kWild);
  generator.read("x");
  const State one = generator.state();
  generator.read(prompt(999));
  const State thousand = generator.state();
  generated(generator, 3000);
  const State more = generator.state();
  EXPECT_EQ(thousand.bytes(), one.bytes());
  EXPECT_EQ(more.bytes(), one.bytes());
  EXPECT_EQ(more.sampler.size(), one.sampler.size());
}

TEST(Generator, CachesOfSoftmaxLayersGrow) {
  Context context = context_with();
  const Model model(context, hybrid(), 5);
  Generator growing(context, model, kWild);
  Generator roomy(context, model, model.new_state(8192), kWild);
  for (Generator* generator : {&growing, &roomy}) generator->read(prompt(900));
  const std::size_t before = growing.state_bytes();
  EXPECT_EQ(generated(growing, 1300), generated(roomy, 1300));
  EXPECT_TRUE(growing.state() == roomy.state());
  EXPECT_GT(growing.state_bytes(), before);
  EXPECT_LT(growing.state_bytes(), roomy.state_bytes());
  const test::TempFolder folder;
  growing.state().save(folder / "saved.state");
  Generator loaded(context, model, model.load_state(folder / "saved.state"));
  EXPECT_EQ(generated(loaded, 20), generated(roomy, 20));
}

TEST(Generator, StatesOfOtherModelsAreRefused) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5), other(context, small("retnet"), 6);
  Generator generator(context, other, kWild);
  generator.read(prompt(20));
  const State state = generator.state();
  const std::string direct = error_of([&] { Generator(context, model, state); });
  const test::TempFolder folder;
  state.save(folder / "saved.state");
  const std::string loaded = error_of([&] { model.load_state(folder / "saved.state"); });
  EXPECT_TRUE(direct.starts_with(begins(ErrorKind::kInvalidArgument))) << direct;
  EXPECT_TRUE(loaded.starts_with(begins(ErrorKind::kBadFile))) << loaded;
  for (const std::string& sentence : {direct, loaded}) {
    EXPECT_NE(sentence.find(model.fingerprint()), std::string::npos) << sentence;
    EXPECT_NE(sentence.find(other.fingerprint()), std::string::npos) << sentence;
  }
}

TEST(Generator, ModelsOfOtherTokensAreRefused) {
  Context context = context_with();
  ModelConfig config = small("retnet");
  config.vocab_size = 300;
  const Model model(context, config, 5);
  const std::string sentence = error_of([&] { Generator(context, model); });
  EXPECT_TRUE(sentence.starts_with(begins(ErrorKind::kInvalidArgument)));
  EXPECT_NE(sentence.find("300"), std::string::npos) << sentence;
}

TEST(Generator, DamagedSamplersAreRefused) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  SamplingOptions options = kWild;
  options.stop = {"end", "stop"};
  Generator generator(context, model, options);
  generator.read(prompt(20));
  generated(generator, 3);
  const State state = generator.state();
  const auto refusal = [&](const State& damaged) {
    return error_of([&] { Generator(context, model, damaged); });
  };
  EXPECT_EQ(refusal(state), "");
  for (std::size_t size = 1; size < state.sampler.size(); ++size) {
    State cut = state;
    cut.sampler.resize(size);
    EXPECT_TRUE(refusal(cut).starts_with(begins(ErrorKind::kBadFile))) << size;
  }
  State longer = state;
  longer.sampler.push_back(0);
  EXPECT_TRUE(refusal(longer).starts_with(begins(ErrorKind::kBadFile)));
  // Any byte changed: refused or taken, never worse; the magic, version and position are refused.
  std::size_t refused = 0;
  for (std::size_t i = 0; i < state.sampler.size(); ++i) {
    State flipped = state;
    flipped.sampler[i] ^= 0xff;
    const std::string sentence = refusal(flipped);
    EXPECT_TRUE(sentence.empty() || sentence.starts_with(begins(ErrorKind::kBadFile))) << sentence;
    refused += !sentence.empty();
    if (i < 8) {
      EXPECT_FALSE(sentence.empty()) << i;
    }
  }
  EXPECT_GT(refused, 60u);
  // Bytes of another position of the same stream.
  State moved = state;
  generated(generator, 1);
  moved.sampler = generator.state().sampler;
  EXPECT_TRUE(refusal(moved).starts_with(begins(ErrorKind::kBadFile)));
}

TEST(Generator, AStateWithoutSamplerNeedsAPrompt) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  State state = model.new_state();
  Workspace workspace;
  std::vector<float> logits(256);
  const std::vector<std::int32_t> tokens = {1, 2, 3};
  model.forward(context, workspace, tokens, state, {logits.data(), {1, 256}});
  Generator generator(context, model, state);
  const auto nothing = [](std::string_view) { return true; };
  EXPECT_TRUE(error_of([&] {
                generator.generate(1, nothing);
              }).starts_with(begins(ErrorKind::kInvalidArgument)));
  generator.read("x");
  EXPECT_EQ(generated(generator, 4).size(), 4u);
}

TEST(Generator, TheCallbackEndsItAndGenerationGoesOnLater) {
  Context context = context_with();
  const Model model(context, small("retnet"), 5);
  Generator whole(context, model, kWild), broken(context, model, kWild);
  for (Generator* generator : {&whole, &broken}) generator->read(prompt(20));
  std::string text;
  const auto one = [&](std::string_view piece) {
    text += piece;
    return false;
  };
  for (int i = 0; i < 10; ++i) EXPECT_EQ(broken.generate(99, one), Finish::kCallback);
  EXPECT_EQ(text, generated(whole, 10));
  EXPECT_EQ(broken.statistics().generated_tokens, 10);
  EXPECT_EQ(broken.statistics().prompt_tokens, 20);
  EXPECT_EQ(broken.statistics().steps, 9) << "the last token waits";
  EXPECT_THROW(broken.generate(-1, one), Error);
}

TEST(Generator, ACancelledGeneratorDoesNotGoOn) {
  std::atomic<bool> cancel = false;
  Context context({.threads = 1, .cancelled = [&] { return cancel.load(); }});
  const Model model(context, small("retnet"), 5);
  Generator generator(context, model, kWild);
  generator.read(prompt(20));
  cancel = true;
  const auto nothing = [](std::string_view) { return true; };
  EXPECT_TRUE(
      error_of([&] { generator.generate(1, nothing); }).starts_with(begins(ErrorKind::kCancelled)));
  cancel = false;
  EXPECT_TRUE(
      error_of([&] { generator.generate(1, nothing); }).starts_with(begins(ErrorKind::kCancelled)));
  EXPECT_TRUE(
      error_of([&] { (void)generator.state(); }).starts_with(begins(ErrorKind::kCancelled)));
}

}  // namespace
}  // namespace ouzel
