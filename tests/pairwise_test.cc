// The pairwise cover that the operator tests take their cases from.
#include "tests/pairwise.h"

#include <gtest/gtest.h>

namespace ouzel::test {
namespace {

TEST(Pairwise, CoversEveryValidPairWithFewRows) {
  const std::vector<std::size_t> choices{11, 8, 3, 2, 5};
  const auto valid = [](const Row& r) {
    return !(r[2] == 1 && r[4] == 3) && (r[0] + r[1]) % 7 != 0;
  };
  const std::vector<Row> rows = pairwise(choices, valid);
  for (const Row& row : rows) EXPECT_TRUE(valid(row));
  for (std::size_t a = 0; a < choices.size(); ++a) {
    for (std::size_t b = a + 1; b < choices.size(); ++b) {
      for (std::size_t i = 0; i < choices[a]; ++i) {
        for (std::size_t j = 0; j < choices[b]; ++j) {
          const bool impossible =
              (a == 2 && b == 4 && i == 1 && j == 3) || (a == 0 && b == 1 && (i + j) % 7 == 0);
          bool covered = false;
          for (const Row& row : rows) covered |= row[a] == i && row[b] == j;
          EXPECT_EQ(covered, !impossible) << a << "=" << i << " " << b << "=" << j;
        }
      }
    }
  }
  // 76 rows are needed for the two largest axes alone; the full product has 2,640.
  EXPECT_LE(rows.size(), 100u);
}

}  // namespace
}  // namespace ouzel::test
