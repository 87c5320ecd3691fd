// Pairwise cover: rows of choices, one per axis, such that every pair of choices of two axes that a
// valid row can hold stands in some row. Greedy: each row starts from a pair not yet covered and
// takes, axis by axis, the choice that covers the most new pairs.
#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "tests/random_arrays.h"

namespace ouzel::test {

using Row = std::vector<std::size_t>;

// `choices[i]` is the number of choices of axis i; `valid` judges whole rows. Pairs for which 200
// random completions are all invalid count as impossible.
inline std::vector<Row> pairwise(const std::vector<std::size_t>& choices,
                                 const std::function<bool(const Row&)>& valid) {
  using Choice = std::pair<std::size_t, std::size_t>;  // axis, choice
  const std::size_t axes = choices.size();
  Random random(1);
  std::set<std::pair<Choice, Choice>> open;
  for (std::size_t a = 0; a < axes; ++a) {
    for (std::size_t b = a + 1; b < axes; ++b) {
      for (std::size_t i = 0; i < choices[a]; ++i) {
        for (std::size_t j = 0; j < choices[b]; ++j) open.insert({{a, i}, {b, j}});
      }
    }
  }
  const auto gain = [&](const Row& row) {
    std::size_t count = 0;
    for (std::size_t a = 0; a < axes; ++a) {
      for (std::size_t b = a + 1; b < axes; ++b) count += open.count({{a, row[a]}, {b, row[b]}});
    }
    return count;
  };
  std::vector<Row> rows;
  while (!open.empty()) {
    const auto pair = *open.begin();
    Row best;
    std::size_t most = 0;
    for (int attempt = 0; attempt < 200 && (attempt < 30 || best.empty()); ++attempt) {
      Row row(axes);
      for (std::size_t a = 0; a < axes; ++a) row[a] = random.bits() % choices[a];
      row[pair.first.first] = pair.first.second;
      row[pair.second.first] = pair.second.second;
      if (!valid(row)) continue;
      // Each axis in turn takes the choice with the largest gain.
      for (std::size_t a = 0; a < axes; ++a) {
        if (a == pair.first.first || a == pair.second.first) continue;
        Row trial = row;
        for (trial[a] = 0; trial[a] < choices[a]; ++trial[a]) {
          if (valid(trial) && gain(trial) > gain(row)) row = trial;
        }
      }
      if (gain(row) > most) {
        most = gain(row);
        best = row;
      }
    }
    open.erase(pair);
    if (best.empty()) continue;
    for (std::size_t a = 0; a < axes; ++a) {
      for (std::size_t b = a + 1; b < axes; ++b) open.erase({{a, best[a]}, {b, best[b]}});
    }
    rows.push_back(best);
  }
  return rows;
}

}  // namespace ouzel::test
