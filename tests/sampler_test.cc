// The sampler: each filter against distributions worked out by hand, draws against their
// probabilities, and what a draw may depend on.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "src/infer/stop_text.h"

namespace ouzel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

// Share of each token among `draws` at successive positions.
std::vector<double> shares(const SamplingOptions& options, const std::vector<float>& logits,
                           int draws = 20000) {
  std::vector<double> share(logits.size());
  for (int i = 0; i < draws; ++i) {
    Sampler sampler(options, i, {});
    share[static_cast<std::size_t>(sampler.sample(logits))] += 1.0 / draws;
  }
  return share;
}

// Five standard deviations of a share of 1/2 over 20,000 draws.
constexpr double kTolerance = 0.018;

void expect_shares(const SamplingOptions& options, const std::vector<float>& logits,
                   const std::vector<double>& expected) {
  const std::vector<double> found = shares(options, logits);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], kTolerance) << "token " << i;
    if (expected[i] == 0) {
      EXPECT_EQ(found[i], 0) << "token " << i << " was to be dropped";
    }
  }
}

const std::vector<double> kProbabilities = {0.05, 0.4, 0.1, 0.25, 0.2};

TEST(Sampler, DrawsByTheProbabilities) {
  expect_shares({.temperature = 1}, logits_of(kProbabilities), kProbabilities);
}

TEST(Sampler, TemperatureIsAnExponent) {
  // Squares: 0.0025, 0.16, 0.01, 0.0625, 0.04, of 0.275 together.
  expect_shares({.temperature = 0.5}, logits_of(kProbabilities),
                {0.0025 / 0.275, 0.16 / 0.275, 0.01 / 0.275, 0.0625 / 0.275, 0.04 / 0.275});
}

TEST(Sampler, ZeroTemperatureTakesTheLargestAndTheLowestOfEquals) {
  Sampler sampler({.temperature = 0});
  EXPECT_EQ(sampler.sample(logits_of(kProbabilities)), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{-kInf, 2, 3, 3, 3, 1}), 2);
  EXPECT_EQ(sampler.sample(std::vector<float>(256, 0.0f)), 0);
}

TEST(Sampler, TinyTemperatureIsGreedyWithoutOverflow) {
  for (double temperature : {1e-300, 5e-324}) {
    Sampler sampler({.temperature = temperature});
    EXPECT_EQ(sampler.sample(std::vector<float>{1e30f, 2e30f, -kInf, 1.9e30f}), 1);
  }
}

TEST(Sampler, TopKKeepsTheMostLikely) {
  expect_shares({.temperature = 1, .top_k = 2}, logits_of(kProbabilities),
                {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
  expect_shares({.temperature = 1, .top_k = 99}, logits_of(kProbabilities), kProbabilities);
  // Of equals, the lowest tokens.
  expect_shares({.temperature = 1, .top_k = 2}, {1, 1, 1, 1}, {0.5, 0.5, 0, 0});
}

TEST(Sampler, TopPKeepsTheTokenThatCrossesTheShare) {
  expect_shares({.temperature = 1, .top_p = 0.6}, logits_of(kProbabilities),
                {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
  expect_shares({.temperature = 1, .top_p = 0.3}, logits_of(kProbabilities), {0, 1, 0, 0, 0});
  expect_shares({.temperature = 1, .top_p = 0}, logits_of(kProbabilities), {0, 1, 0, 0, 0});
  expect_shares({.temperature = 1, .top_p = 0.9}, logits_of(kProbabilities),
                {0, 0.4 / 0.95, 0.1 / 0.95, 0.25 / 0.95, 0.2 / 0.95});
  expect_shares({.temperature = 1, .top_p = 0.5}, {0, 0}, {1, 0});  // one is just the half
}

TEST(Sampler, MinPIsRelativeToTheMostLikely) {
  expect_shares({.temperature = 1, .min_p = 0.45}, logits_of(kProbabilities),
                {0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85});
  expect_shares({.temperature = 1, .min_p = 1}, logits_of(kProbabilities), {0, 1, 0, 0, 0});
}

TEST(Sampler, FiltersActOnWhatTheOneBeforeLeft) {
  // Top 3 of: 0.4, 0.25, 0.2; of their 0.85, 0.7 is 0.595: two stay; 0.25 >= 0.7 * 0.4 fails.
  expect_shares({.temperature = 1, .top_k = 3, .top_p = 0.7}, logits_of(kProbabilities),
                {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
  expect_shares({.temperature = 1, .top_k = 3, .top_p = 0.7, .min_p = 0.7},
                logits_of(kProbabilities), {0, 1, 0, 0, 0});
}

TEST(Sampler, RepetitionPenaltyDividesPositiveAndMultipliesNegativeLogits) {
  SamplingOptions options{.temperature = 1, .repetition_penalty = 2, .repetition_window = 2};
  // 3 leaves the window; 0 (logit 2) becomes 1, 1 (logit -1) becomes -2; twice seen counts once.
  Sampler once(options);
  for (std::int32_t token : {3, 0, 1}) once.accept(token);
  EXPECT_EQ(once.recent(), (std::vector<std::int32_t>{0, 1}));
  const std::vector<float> logits = {2, -1, 0, 1.5};
  std::vector<double> expected = {std::exp(1.0), std::exp(-2.0), 1, std::exp(1.5)};
  double sum = 0;
  for (double e : expected) sum += e;
  for (double& e : expected) e /= sum;
  std::vector<double> share(4);
  for (int i = 0; i < 20000; ++i) {
    Sampler sampler(options, i, {0, 1});
    share[static_cast<std::size_t>(sampler.sample(logits))] += 1.0 / 20000;
  }
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(share[i], expected[i], kTolerance);

  options.temperature = 0;
  Sampler twice(options);
  twice.accept(0);
  twice.accept(0);
  EXPECT_EQ(twice.sample(std::vector<float>{2, -1, 0.9f, 0.5f}), 0);  // 1, not 0.5
  EXPECT_EQ(twice.sample(std::vector<float>{2, -1, 1.1f, 0.5f}), 2);

  // Of more tokens than the window holds, the last stay.
  Sampler longer(options, 4, {3, 2, 0, 1});
  EXPECT_EQ(longer.recent(), (std::vector<std::int32_t>{0, 1}));
}

TEST(Sampler, ADrawDependsOnSeedAndPositionOnly) {
  const std::vector<float> flat(256, 0.0f);
  const auto drawn = [&](std::uint64_t seed, std::int64_t position) {
    Sampler sampler({.temperature = 1, .seed = seed}, position, {});
    return sampler.sample(flat);
  };
  Sampler sampler({.temperature = 1, .seed = 7});
  std::map<std::int32_t, int> seen;
  for (std::int64_t i = 0; i < 1000; ++i) {
    const std::int32_t token = sampler.sample(flat);
    EXPECT_EQ(token, sampler.sample(flat)) << "asking twice changes nothing";
    EXPECT_EQ(token, drawn(7, i));
    ++seen[token];
    sampler.accept(token);
  }
  EXPECT_GT(seen.size(), 200u);
  int equal = 0;
  for (std::int64_t i = 0; i < 1000; ++i) equal += drawn(7, i) == drawn(8, i);
  EXPECT_LT(equal, 30);
}

TEST(Sampler, LogitsThatAreNoNumbersAreRefused) {
  Sampler sampler({.temperature = 1});
  const auto message = [&](std::vector<float> logits) -> std::string {
    try {
      sampler.sample(logits);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return e.what();
    }
    return "no error";
  };
  EXPECT_NE(message({0, 1, std::nanf(""), 2}).find("token 2"), std::string::npos);
  EXPECT_NE(message({0, kInf}).find("token 1"), std::string::npos);
  EXPECT_NE(message({-kInf, -kInf}).find("no token"), std::string::npos);
  EXPECT_EQ(message({-kInf, 0}), "no error");
}

TEST(Sampler, AForeignTokenInTheWindowIsRefused) {
  for (std::int32_t token : {-1, 4}) {
    Sampler sampler({.repetition_penalty = 2});
    sampler.accept(token);
    EXPECT_THROW(sampler.sample(std::vector<float>{0, 1, 2, 3}), Error);
  }
}

TEST(Sampler, OptionsOutOfRangeAreRefused) {
  const double nan = std::nan("");
  const std::vector<SamplingOptions> wrong = {{.temperature = -1},
                                              {.temperature = nan},
                                              {.temperature = kInf},
                                              {.top_k = -1},
                                              {.top_p = -0.1},
                                              {.top_p = 1.1},
                                              {.top_p = nan},
                                              {.min_p = -0.1},
                                              {.min_p = 1.5},
                                              {.min_p = nan},
                                              {.repetition_penalty = 0},
                                              {.repetition_penalty = nan},
                                              {.repetition_window = -1},
                                              {.repetition_window = 1 << 20},
                                              {.stop = {"ok", ""}},
                                              {.stop = {std::string(5000, 'x')}},
                                              {.stop = std::vector<std::string>(65, "x")}};
  for (std::size_t i = 0; i < wrong.size(); ++i) EXPECT_THROW(wrong[i].check(), Error) << i;
  SamplingOptions{}.check();
}

// What a text lets through under stop texts, "|" where one ended it.
std::string passed(const std::vector<std::string>& stops, const std::string& text,
                   std::string* held = nullptr) {
  StopText watch(stops);
  std::string out;
  for (char byte : text) {
    if (watch.push(byte, out)) out += '|';
  }
  if (held != nullptr) *held = watch.held();
  return out;
}

TEST(StopText, EndsAndHoldsBack) {
  std::string held;
  EXPECT_EQ(passed({}, "abc"), "abc");
  EXPECT_EQ(passed({"b"}, "abc"), "a|c");
  EXPECT_EQ(passed({"end"}, "the en", &held), "the ");
  EXPECT_EQ(held, "en");
  EXPECT_EQ(passed({"end"}, "the ende"), "the |");
  EXPECT_EQ(passed({"end"}, "the enend."), "the en|.");
  // A failed match may hide the beginning of another.
  EXPECT_EQ(passed({"aab"}, "aaab"), "a|");
  EXPECT_EQ(passed({"abac"}, "ababac"), "ab|");
  EXPECT_EQ(passed({"ababc"}, "abababc"), "ab|");
  // Of several, the one that ends first; of those that end together, the longest.
  EXPECT_EQ(passed({"abcd", "bc"}, "abcd"), "a|d");
  EXPECT_EQ(passed({"c", "abc"}, "xabc"), "x|");
  EXPECT_EQ(passed({"\n\n", "###"}, "a\n##\n#\n\n"), "a\n##\n#|");
}

TEST(StopText, LetsEverythingThroughInTheEnd) {
  // Against the definition: what passed, what is held and the stop texts make the text.
  const std::string text = "abaababbabaabbbabab";
  for (const std::vector<std::string>& stops :
       {std::vector<std::string>{"bbb"}, {"abab"}, {"bba", "aba"}, {"aabb", "zz"}}) {
    StopText watch(stops);
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (watch.push(text[i], out)) {
        bool ends = false;
        for (const std::string& stop : stops) ends |= text.substr(0, i + 1).ends_with(stop);
        EXPECT_TRUE(ends);
        break;
      }
      EXPECT_EQ(out + watch.held(), text.substr(0, i + 1));
    }
    std::string again = out + watch.take_held();
    EXPECT_TRUE(watch.held().empty());
    EXPECT_TRUE(text.starts_with(again));
  }
}

}  // namespace
}  // namespace ouzel
