// States of models: values that are copied and compared, files, what they cost.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/formats/files.h"
#include "tests/errors.h"
#include "tests/model_cases.h"
#include "tests/model_runs.h"
#include "tests/temp_folder.h"

namespace ouzel::test {
namespace {

TEST(State, IsAValue) {
  Context context({.threads = 2});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const Model model(context, config, 5);
    const auto tokens = random_tokens(40, config.vocab_size, 1);
    const std::vector<std::int32_t> head(tokens.begin(), tokens.begin() + 25),
        tail(tokens.begin() + 25, tokens.end());
    State state = model.new_state(25);
    run_pieces(model, context, head, {25}, state);
    state.sampler = {1, 2, 3};
    State copy = state;
    EXPECT_TRUE(copy == state);
    copy.reserve(100);
    EXPECT_TRUE(copy == state);  // what is reserved does not count
    state.reserve(40);
    State fork = state;
    const std::vector<float> logits = run_pieces(model, context, tail, {15}, state);
    EXPECT_FALSE(copy == state);
    EXPECT_EQ(run_pieces(model, context, tail, {15}, fork), logits);
    EXPECT_TRUE(fork == state);
    fork.sampler.push_back(4);
    EXPECT_FALSE(fork == state);
    EXPECT_EQ(run_pieces(model, context, tail, {15}, copy), logits);
    copy.clear();
    EXPECT_TRUE(copy == model.new_state());
    EXPECT_EQ(copy.position(), 0);
  }
}

TEST(State, GoesThroughAFile) {
  Context context({.threads = 2});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    const Model model(context, config, 5);
    const auto tokens = random_tokens(40, config.vocab_size, 1);
    const std::vector<std::int32_t> head(tokens.begin(), tokens.begin() + 25),
        tail(tokens.begin() + 25, tokens.end());
    State state = model.new_state(100);
    run_pieces(model, context, head, {25}, state);
    state.sampler = {9, 8, 7};
    state.save(folder / "state");
    State loaded = model.load_state(folder / "state", 40);
    EXPECT_TRUE(loaded == state);
    EXPECT_EQ(run_pieces(model, context, tail, {15}, loaded),
              run_pieces(model, context, tail, {15}, state));
    EXPECT_TRUE(loaded == state);

    const Model other(context, config, 6);
    expect_contains(message_of([&] { other.load_state(folder / "state"); }, ErrorKind::kBadFile),
                    {folder / "state", model.fingerprint(), other.fingerprint()});
    // Cut short anywhere, or another file altogether.
    const std::string bytes = read_file(folder / "state");
    for (std::size_t length :
         {std::size_t{0}, std::size_t{7}, bytes.size() / 2, bytes.size() - 1}) {
      write_file(folder / "cut", std::string_view(bytes).substr(0, length));
      message_of([&] { model.load_state(folder / "cut"); }, ErrorKind::kBadFile);
    }
    model.save(folder / "model");
    expect_contains(message_of([&] { model.load_state(folder / "model" + "/model.safetensors"); },
                               ErrorKind::kBadFile),
                    {"ouzel-state"});
  }
}

TEST(State, HasAFixedSizeWithoutUnwindowedSoftmax) {
  Context context({.threads = 1});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const Model model(context, config, 5);
    const bool grows = name == "transformer" || name == "hybrid";
    EXPECT_EQ(model.new_state(1000).bytes() > model.new_state(10).bytes(), grows);
    EXPECT_EQ(model.new_state(1000).capacity(), grows ? 1000 : 0);
  }
}

TEST(State, RefusesCapacitiesThatCannotBe) {
  Context context({.threads = 1});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    const Model model(context, config, 5);
    State state = model.new_state(3);
    state.save(folder / "state");
    const std::int64_t before = state.capacity();
    const bool grows = model.new_state(3).capacity() == 3;
    for (const std::int64_t tokens : {std::int64_t{-1}, INT64_MIN, INT64_MAX}) {
      if (tokens > 0 && !grows) continue;  // such a state needs no room
      const char* part = tokens < 0 ? "is negative; give 0 or more" : "ask for room for fewer";
      expect_refused(part, [&] { state.reserve(tokens); });
      expect_refused(part, [&] { static_cast<void>(model.new_state(tokens)); });
      expect_refused(part, [&] { static_cast<void>(model.load_state(folder / "state", tokens)); });
    }
    EXPECT_EQ(state.capacity(), before);
  }
}

}  // namespace
}  // namespace ouzel::test
