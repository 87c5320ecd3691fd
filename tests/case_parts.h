// What the tables of cases share: names, arrangements of sequences, random data, covers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/cases.h"
#include "tests/pairwise.h"
#include "tests/random_arrays.h"

namespace ouzel::test {

inline constexpr const char* kLayoutNames[] = {"rows", "packed", "padded", "alone"};
inline constexpr const char* kHeadNames[] = {"one", "equal", "more_values", "more_queries",
                                             "one_key"};
inline constexpr const char* kDataNames[] = {"zero_mean", "narrow_positive", "constant"};

template <class Enum, std::size_t Size>
const char* name(const char* const (&names)[Size], Enum value) {
  return names[static_cast<std::size_t>(value)];
}

struct HeadCounts {
  std::int64_t q, k, v;
};
inline HeadCounts head_counts(Heads heads) {
  switch (heads) {
    case Heads::kOne:
      return {1, 1, 1};
    case Heads::kEqual:
      return {2, 2, 2};
    case Heads::kMoreValues:
      return {2, 2, 4};
    case Heads::kMoreQueries:
      return {4, 2, 2};
    case Heads::kOneKey:
      return {4, 1, 2};
  }
  return {};
}

struct Arrangement {
  std::int64_t batch = 1, tokens = 0;
  Segments segments;
};
inline Arrangement arrange(Layout layout, std::int64_t tokens) {
  switch (layout) {
    case Layout::kRows:
      return {2, tokens, Segments::whole(2, tokens)};
    case Layout::kAlone:
      return {1, tokens, Segments::whole(1, tokens)};
    case Layout::kPacked: {
      // Empty, one token, the rest in two; then two rows of no sequence.
      const std::int64_t part = tokens / 3;
      Arrangement a{1, tokens + 3, {}};
      a.segments.list = {{0, 0, 0}, {0, 0, 1}, {0, 1, part}, {0, 1 + part, tokens - part}};
      return a;
    }
    case Layout::kPadded: {
      const std::int64_t lengths[] = {tokens, tokens - tokens / 4};
      return {2, tokens + 2, Segments::padded(lengths, tokens + 2, true)};
    }
  }
  return {};
}

inline Doubles draw(Random& random, Data data, std::vector<std::int64_t> shape) {
  switch (data) {
    case Data::kZeroMean:
      return random_array<double>(random, std::move(shape));
    case Data::kNarrowPositive:
      return random_array<double>(random, std::move(shape), 0.9, 1.1);
    case Data::kConstant: {
      Doubles a(std::move(shape));
      std::fill(a.data.begin(), a.data.end(), static_cast<double>(0.7f));
      return a;
    }
  }
  return {};
}

// Tokens outside every segment: NaN, so that reading one shows. A token has `rows` rows.
inline void poison_padding(Doubles& array, const Segments& segments, std::int64_t rows = 1) {
  if (!array.present() || array.data.empty()) return;
  const std::int64_t batch = array.extent(0), tokens = array.extent(1) / rows;
  const std::size_t row = array.data.size() / static_cast<std::size_t>(batch * tokens);
  std::vector<bool> used(static_cast<std::size_t>(batch * tokens));
  for (const Segment& s : segments.list) {
    for (std::int64_t t = 0; t < s.length; ++t) {
      used[static_cast<std::size_t>(s.batch * tokens + s.begin + t)] = true;
    }
  }
  for (std::size_t r = 0; r < used.size(); ++r) {
    if (used[r]) continue;
    std::fill_n(array.data.begin() + static_cast<std::ptrdiff_t>(r * row), row,
                std::numeric_limits<double>::quiet_NaN());
  }
}

inline const std::vector<std::int64_t> kTokens{0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 1000};
inline const std::vector<std::int64_t> kSizes{1, 3, 16, 24, 60, 64, 100, 128};

// A pairwise cover of the choices, without what does not exist.
template <class Case>
std::vector<Case> cover(const std::vector<std::size_t>& choices, Case (*make)(const Row&)) {
  std::vector<Case> cases;
  const auto valid = [&](const Row& r) { return exists(make(r)); };
  for (const Row& r : pairwise(choices, valid)) cases.push_back(make(r));
  return cases;
}

// Every choice of the first `fixed` axes, the rest at random.
template <class Case>
std::vector<Case> product(const std::vector<std::size_t>& choices, std::size_t fixed,
                          Case (*make)(const Row&)) {
  Random random(2);
  std::vector<Case> cases;
  Row row(choices.size());
  while (true) {
    for (int attempt = 0; attempt < 200; ++attempt) {  // of some there is none
      for (std::size_t a = fixed; a < row.size(); ++a) row[a] = random.bits() % choices[a];
      if (!exists(make(row))) continue;
      cases.push_back(make(row));
      break;
    }
    std::size_t axis = 0;
    while (axis < fixed && ++row[axis] == choices[axis]) row[axis++] = 0;
    if (axis == fixed) return cases;
  }
}

}  // namespace ouzel::test
