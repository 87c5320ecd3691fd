// Pairwise cover: rows of choices, one per axis, such that every pair of choices of two axes that a
// valid row can hold stands in some row. Greedy: each row starts from a pair not yet covered and
// takes, axis by axis, the choice that covers the most new pairs.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "tests/random_arrays.h"

namespace ouzel::test {

using Row = std::vector<std::size_t>;

// `choices[i]` is the number of choices of axis i; `valid` judges whole rows. Pairs for which 200
// random completions are all invalid count as impossible.
inline std::vector<Row> pairwise(const std::vector<std::size_t>& choices,
                                 const std::function<bool(const Row&)>& valid) {
  const std::size_t axes = choices.size();
  Random random(1);
  // Whether the pair of choice i of axis a and choice j of axis b > a is still to be covered.
  std::vector<std::size_t> first(axes);  // index of an axis's first choice among all
  std::size_t all = 0;
  for (std::size_t a = 0; a < axes; ++a) {
    first[a] = all;
    all += choices[a];
  }
  std::vector<char> open(all * all, true);
  const auto at = [&](std::size_t a, std::size_t i, std::size_t b, std::size_t j) -> char& {
    return open[(first[a] + i) * all + first[b] + j];
  };
  const auto gain = [&](const Row& row) {
    std::size_t count = 0;
    for (std::size_t a = 0; a < axes; ++a) {
      for (std::size_t b = a + 1; b < axes; ++b) {
        count += static_cast<std::size_t>(at(a, row[a], b, row[b]));
      }
    }
    return count;
  };
  // The row with these two choices that covers the most, if there is a valid one.
  const auto best_row = [&](std::size_t a1, std::size_t i1, std::size_t a2, std::size_t i2) {
    Row best;
    std::size_t most = 0;
    for (int attempt = 0; attempt < 200 && (attempt < 30 || best.empty()); ++attempt) {
      Row row(axes);
      for (std::size_t a = 0; a < axes; ++a) row[a] = random.bits() % choices[a];
      row[a1] = i1;
      row[a2] = i2;
      if (!valid(row)) continue;
      // Each axis in turn takes the choice with the largest gain.
      for (std::size_t a = 0; a < axes; ++a) {
        if (a == a1 || a == a2) continue;
        Row trial = row;
        for (trial[a] = 0; trial[a] < choices[a]; ++trial[a]) {
          if (gain(trial) > gain(row) && valid(trial)) row = trial;
        }
      }
      if (gain(row) > most) {
        most = gain(row);
        best = row;
      }
    }
    return best;
  };
  std::vector<Row> rows;
  for (std::size_t a = 0; a < axes; ++a) {
    for (std::size_t i = 0; i < choices[a]; ++i) {
      for (std::size_t b = a + 1; b < axes; ++b) {
        for (std::size_t j = 0; j < choices[b]; ++j) {
          if (!at(a, i, b, j)) continue;
          const Row row = best_row(a, i, b, j);
          if (row.empty()) continue;
          rows.push_back(row);
          for (std::size_t c = 0; c < axes; ++c) {
            for (std::size_t d = c + 1; d < axes; ++d) at(c, row[c], d, row[d]) = false;
          }
        }
      }
    }
  }
  return rows;
}

}  // namespace ouzel::test
