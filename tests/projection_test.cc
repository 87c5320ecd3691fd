// Random projections: their rows are orthogonal, and the maps that they serve unbiased.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "ouzel/feature_map.h"
#include "src/ops/reference/feature_map.h"
#include "tests/calls.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;
using enum FeatureMapKind;

Floats projection(std::uint64_t seed, ProjectionNorms norms, Int rows, Int keys) {
  Floats w({rows, keys});
  draw_orthogonal_projection(seed, norms, View<float, 2>(w.data.data(), {rows, keys}));
  return w;
}

TEST(Projection, RowsAreOrthogonalInBlocks) {
  const Int keys = 8;
  for (ProjectionNorms norms : {ProjectionNorms::kChi, ProjectionNorms::kSqrt}) {
    const Floats w = projection(1, norms, 20, keys);
    for (Int a = 0; a < 20; ++a) {
      for (Int b = a; b < 20; ++b) {
        double dot = 0;
        for (Int i = 0; i < keys; ++i) {
          dot += static_cast<double>(w(a, i)) * static_cast<double>(w(b, i));
        }
        if (a != b && a / keys == b / keys) {
          EXPECT_NEAR(dot, 0, 1e-5);
        }
        if (a == b && norms == ProjectionNorms::kSqrt) {
          EXPECT_NEAR(dot, 8, 1e-5);
        }
      }
    }
  }
  EXPECT_TRUE(same_bits(projection(5, ProjectionNorms::kChi, 9, 4),
                        projection(5, ProjectionNorms::kChi, 9, 4)));
  EXPECT_FALSE(same_bits(projection(5, ProjectionNorms::kChi, 9, 4),
                         projection(6, ProjectionNorms::kChi, 9, 4)));
}

// The mean over draws of phi(x).phi(y) is exp(x.y / sqrt(d)).
TEST(Projection, FavorIsUnbiased) {
  Random random(9);
  const Int size = 8, rows = 16, draws = 4000;
  const auto x = random_array<double>(random, {size}), y = random_array<double>(random, {size});
  double dot = 0;
  for (std::size_t i = 0; i < 8; ++i) dot += x.data[i] * y.data[i];
  for (FeatureMapKind kind : {kFavorPositive, kFavorHyperbolic}) {
    double sum = 0, square = 0;
    for (Int draw = 0; draw < draws; ++draw) {
      const Floats w =
          projection(static_cast<std::uint64_t>(draw), ProjectionNorms::kChi, rows, size);
      reference::MapWeights<double> weights;
      weights.w1 = Doubles({rows, size});
      std::copy(w.data.begin(), w.data.end(), weights.w1.data.begin());
      const auto a = reference::features<double>({kind, {}}, weights, 0, x.data.data(), size, 0);
      const auto b = reference::features<double>({kind, {}}, weights, 0, y.data.data(), size, 0);
      double kernel = 0;
      for (std::size_t f = 0; f < a.size(); ++f) kernel += a[f] * b[f];
      sum += kernel;
      square += kernel * kernel;
    }
    const double mean = sum / draws;
    const double deviation = std::sqrt((square / draws - mean * mean) / draws);
    EXPECT_NEAR(mean, std::exp(dot / std::sqrt(8.0)), 5 * deviation);
  }
}

}  // namespace
}  // namespace ouzel::test
