#include "tests/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "tests/case_parts.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr const char* kLawNames[] = {"identity",           "identity_normalized", "elu1",
                                     "elu1_normalized",    "relu_normalized",     "product",
                                     "product_normalized", "retention",           "decays"};
constexpr const char* kDirectionNames[] = {"causal", "reverse", "noncausal"};
// Features near 1, so that the signed map's denominators keep away from 0.
reference::MapWeights<double> map_weights(Random& random, std::vector<Int> heads, Int features,
                                          Int keys) {
  const auto shape = [&](std::vector<Int> tail) {
    std::vector<Int> s = heads;
    s.insert(s.end(), tail.begin(), tail.end());
    return s;
  };
  const double spread = 0.5 / std::sqrt(static_cast<double>(keys));
  reference::MapWeights<double> w;
  w.w1 = random_array<double>(random, shape({features, keys}), -spread, spread);
  w.b1 = random_array<double>(random, shape({features}), 0.9, 1.1);
  w.w2 = random_array<double>(random, shape({features, keys}), -spread, spread);
  w.b2 = random_array<double>(random, shape({features}), 0.9, 1.1);
  return w;
}

}  // namespace

std::string name_of(const LawCase& c) {
  return fmt::format("{} T {} K {} V {} {} heads {} {} {}{}", name(kLawNames, c.law), c.tokens,
                     c.keys, c.values, name(kLayoutNames, c.layout), name(kHeadNames, c.heads),
                     name(kDirectionNames, c.direction), name(kDataNames, c.data),
                     c.states ? " states" : "");
}
std::string name_of(const AttentionCase& c) {
  return fmt::format("attention T {} K {} V {} {} heads {} {} window {} offset {} {}{}", c.tokens,
                     c.keys, c.values, name(kLayoutNames, c.layout), name(kHeadNames, c.heads),
                     c.causal ? "causal" : "full", c.window, c.offset, name(kDataNames, c.data),
                     c.sharp ? " sharp" : "");
}
std::string name_of(const ConvCase& c) {
  return fmt::format("short_conv T {} D {} W {} {}{}{}{}", c.tokens, c.channels, c.width,
                     name(kLayoutNames, c.layout), c.silu ? " silu" : "", c.bias ? " bias" : "",
                     c.states ? " states" : "");
}

namespace {

bool is_normalized(Law law) {
  return law == Law::kIdentityNormalized || law == Law::kElu1Normalized ||
         law == Law::kReluNormalized || law == Law::kProductNormalized;
}

}  // namespace

bool has_gradients(const LawCase& c) {
  if (!is_normalized(c.law)) return true;
  // A quotient of one feature does not depend on it; gradients of a map add up what is left of
  // nearly equal values over all tokens.
  return c.keys > 1 && (c.law != Law::kProductNormalized || c.data == Data::kZeroMean);
}
bool has_gradients(const AttentionCase&) { return true; }
bool has_gradients(const ConvCase&) { return true; }

bool is_flat(const LawCase& c) {
  // Parameters of a single feature are single numbers, sums of terms of both signs.
  if (c.law == Law::kProduct) return c.keys == 1;
  // Of three keys of zero mean often one alone passes the ReLU.
  return is_normalized(c.law) && (c.tokens <= 2 || c.keys == 1 || c.data != Data::kZeroMean ||
                                  (c.law == Law::kReluNormalized && c.keys <= 3));
}
// Rows of one key are exact: their gradients are 0.
bool is_flat(const AttentionCase& c) {
  return c.data != Data::kZeroMean || (c.sharp && c.tokens <= 2);
}
bool is_flat(const ConvCase&) { return false; }

bool exists(const LawCase& c) {
  const bool retention = c.law == Law::kRetention || c.law == Law::kDecays;
  const bool noncausal = c.direction == Direction::kNoncausal;
  if (retention && noncausal) return false;
  if (noncausal && c.states) return false;
  // A denominator that can vanish guards nothing: positive data only.
  if (c.law == Law::kIdentityNormalized && c.data == Data::kZeroMean) return false;
  // The mean of equal values depends on nothing: gradients would be noise alone.
  if (is_normalized(c.law) && c.data == Data::kConstant) return false;
  return true;
}

Call make_call(const LawCase& c, std::uint64_t seed) {
  Random random(seed);
  const HeadCounts heads = head_counts(c.heads);
  const Arrangement at = arrange(c.layout, c.tokens);
  Recurrence a;
  a.segments = at.segments;
  a.q = draw(random, c.data, {at.batch, at.tokens, heads.q, c.keys});
  a.k = draw(random, c.data, {at.batch, at.tokens, heads.k, c.keys});
  a.v = draw(random, c.data, {at.batch, at.tokens, heads.v, c.values});
  a.causal = c.direction != Direction::kNoncausal;
  a.reverse = c.direction == Direction::kReverse;
  a.scale = 1 / std::sqrt(static_cast<double>(c.keys));
  Int features = c.keys;
  switch (c.law) {
    case Law::kIdentity:
      break;
    case Law::kIdentityNormalized:
      a.normalize = true;
      a.eps = 1e-10;
      break;
    case Law::kElu1:
    case Law::kElu1Normalized:
      a.map = FeatureMapKind::kElu1;
      a.normalize = c.law == Law::kElu1Normalized;
      a.eps = 1e-6;
      break;
    case Law::kReluNormalized:
      a.map = FeatureMapKind::kRelu;
      a.normalize = true;
      a.eps = 1e-6;
      break;
    case Law::kProduct:
      a.map = FeatureMapKind::kElementwiseProduct;
      a.q_map = map_weights(random, {}, features, c.keys);
      break;
    case Law::kProductNormalized:
      a.map = FeatureMapKind::kElementwiseProduct;
      a.normalize = true;
      features = c.keys + 5;
      a.q_map = map_weights(random, {heads.q}, features, c.keys);
      a.k_map = map_weights(random, {heads.k}, features, c.keys);
      a.k_map.b1 = a.k_map.b2 = Doubles();  // no bias, hence sums of squares:
      a.k_map.w2 = a.k_map.w1;
      break;
    case Law::kRetention:
      a.log_decay = reference::retention_log_decay<double>(heads.v);
      break;
    case Law::kDecays: {
      const double all[] = {0, -1e-5, -0.1, -20, -1000, -std::numeric_limits<double>::infinity()};
      for (Int h = 0; h < heads.v; ++h)
        a.log_decay.push_back(all[(seed + static_cast<std::size_t>(h)) % 6]);
      break;
    }
  }
  Call call;
  const Int sequences = a.segments.count();
  const double lo = c.data == Data::kZeroMean ? -1 : 0.5;
  if (c.states) {
    a.s0 = random_array<double>(random, {sequences, heads.v, features, c.values}, lo);
    if (a.normalize) a.z0 = random_array<double>(random, {sequences, heads.v, features}, 0.5);
  }
  if (c.states && a.causal) {
    call.upstream["dht"] = draw(random, c.data, {sequences, heads.v, features, c.values});
    if (a.normalize) call.upstream["dzt"] = draw(random, c.data, {sequences, heads.v, features});
  }
  call.upstream["do"] =
      draw(random, c.data, {at.batch, at.tokens, std::max(heads.q, heads.v), c.values});
  for (Doubles* array : {&a.q, &a.k, &a.v, &call.upstream["do"]})
    poison_padding(*array, a.segments);
  call.arguments = std::move(a);
  return call;
}

bool exists(const AttentionCase& c) { return c.offset == 0 || c.layout == Layout::kRows; }

Call make_call(const AttentionCase& c, std::uint64_t seed) {
  Random random(seed);
  HeadCounts heads = head_counts(c.heads);
  if (c.heads == Heads::kMoreValues) heads = head_counts(Heads::kEqual);
  const Arrangement at = arrange(c.layout, c.tokens);
  const Int keys = at.tokens + c.offset;
  Attention a;
  a.query_segments = a.key_segments = at.segments;
  if (c.offset > 0) a.key_segments = Segments::whole(at.batch, keys);
  a.q = draw(random, c.data, {at.batch, at.tokens, heads.q, c.keys});
  a.k = draw(random, c.data, {at.batch, keys, heads.k, c.keys});
  a.v = random_array<double>(random, {at.batch, keys, heads.k, c.values});
  const auto size = static_cast<double>(c.keys);
  a.scale = 1 / std::sqrt(size);
  // Products of zero mean have a spread of sqrt(K) / 3, positive ones are near K.
  if (c.sharp) a.scale = c.data == Data::kZeroMean ? 18 / std::sqrt(size) : 20 / size;
  a.causal = c.causal;
  a.window = c.window;
  a.q_offset = c.offset;
  Call call;
  call.upstream["do"] = draw(random, Data::kZeroMean, {at.batch, at.tokens, heads.q, c.values});
  for (Doubles* array : {&a.q, &call.upstream["do"]}) poison_padding(*array, a.query_segments);
  for (Doubles* array : {&a.k, &a.v}) poison_padding(*array, a.key_segments);
  call.arguments = std::move(a);
  return call;
}

Call make_call(const ConvCase& c, std::uint64_t seed) {
  Random random(seed);
  const Arrangement at = arrange(c.layout, c.tokens);
  Conv a;
  a.segments = at.segments;
  a.x = random_array<double>(random, {at.batch, at.tokens, c.channels});
  a.weight = random_array<double>(random, {c.channels, c.width});
  if (c.bias) a.bias = random_array<double>(random, {c.channels});
  a.silu = c.silu;
  Call call;
  const std::vector<Int> state{a.segments.count(), c.channels, c.width};
  if (c.states) {
    a.s0 = random_array<double>(random, state);
    call.upstream["dht"] = random_array<double>(random, state);
  }
  call.upstream["do"] = random_array<double>(random, a.x.shape);
  for (Doubles* array : {&a.x, &call.upstream["do"]}) poison_padding(*array, a.segments);
  call.arguments = std::move(a);
  return call;
}

namespace {

LawCase recurrence_case(const Row& r) {
  return {static_cast<Law>(r[0]),
          kTokens[r[1]],
          kSizes[r[2]],
          kSizes[r[3]],
          static_cast<Layout>(r[4]),
          static_cast<Heads>(r[5]),
          static_cast<Direction>(r[6]),
          static_cast<Data>(r[7]),
          r[8] == 1};
}
const std::vector<std::size_t> kRecurrenceChoices{
    kLaws, kTokens.size(), kSizes.size(), kSizes.size(), 3, 5, 3, 3, 2};

constexpr Int kWindows[] = {0, 1, 2, 16, 100};
constexpr Int kOffsets[] = {0, 1, 70};
const std::vector<Int> kAttentionTokens{0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 300};

AttentionCase attention_case(const Row& r) {
  return {kAttentionTokens[r[0]],   kSizes[r[1]], kSizes[r[2]],   static_cast<Layout>(r[3]),
          static_cast<Heads>(r[4]), r[5] == 0,    kWindows[r[6]], kOffsets[r[7]],
          static_cast<Data>(r[8]),  r[9] == 1};
}
const std::vector<std::size_t> kAttentionChoices{
    kAttentionTokens.size(), kSizes.size(), kSizes.size(), 3, 5, 2, 5, 3, 2, 2};

}  // namespace

std::vector<LawCase> recurrence_cases() { return cover(kRecurrenceChoices, recurrence_case); }
std::vector<LawCase> all_recurrence_cases() {
  return product<LawCase>(kRecurrenceChoices, 4, recurrence_case);
}

std::vector<AttentionCase> attention_cases() { return cover(kAttentionChoices, attention_case); }
std::vector<AttentionCase> all_attention_cases() {
  return product<AttentionCase>(kAttentionChoices, 3, attention_case);
}

std::vector<ConvCase> conv_cases() {
  const std::vector<Int> widths{1, 2, 3, 4, 5};
  std::vector<ConvCase> cases;
  const auto any = [](const Row&) { return true; };
  for (const Row& r : pairwise({kTokens.size(), kSizes.size(), widths.size(), 3, 2, 2, 2}, any)) {
    cases.push_back({kTokens[r[0]], kSizes[r[1]], widths[r[2]], static_cast<Layout>(r[3]),
                     r[4] == 1, r[5] == 1, r[6] == 1});
  }
  return cases;
}

std::vector<LawCase> recurrence_samples(Int tokens) {
  std::vector<LawCase> cases;
  for (std::size_t law = 0; law < kLaws; ++law) {
    LawCase c{static_cast<Law>(law), tokens, 24, 40};
    c.states = true;
    c.heads = static_cast<Heads>(law % 5);
    if (!exists(c)) c.data = Data::kNarrowPositive;
    cases.push_back(c);
  }
  LawCase large{Law::kElu1Normalized, tokens, 64, 64};
  cases.push_back(large);
  large.law = Law::kIdentity;
  large.states = true;
  cases.push_back(large);
  return cases;
}

std::vector<AttentionCase> attention_samples(Int tokens) {
  AttentionCase causal{tokens, 24, 40};
  AttentionCase full = causal, window = causal, grouped = causal, large = causal;
  full.causal = false;
  window.window = 19;
  grouped.heads = Heads::kMoreQueries;
  large.keys = large.values = 64;
  return {causal, full, window, grouped, large};
}

std::vector<ConvCase> conv_samples(Int tokens) {
  return {{tokens, 40, 4, Layout::kRows, true, true, true},
          {tokens, 7, 3, Layout::kRows, false, false, false}};
}

}  // namespace ouzel::test
