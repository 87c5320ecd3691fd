// The random projection of FAVOR+ (arXiv:2009.14794, appendix B.2).
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/feature_map.h"
#include "src/base/random.h"

namespace ouzel {

void draw_orthogonal_projection(std::uint64_t seed, ProjectionNorms norms, View<float, 2> w) {
  const std::int64_t rows = w.extent[0], keys = w.extent[1];
  if (rows < 1 || keys < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a random projection [m, K] needs m and K of at least 1, not [{}, {}]",
                            rows, keys));
  }
  std::int64_t bytes = size_of(DType::kF64);
  if (__builtin_mul_overflow(bytes, rows, &bytes) || __builtin_mul_overflow(bytes, keys, &bytes)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("a random projection of [{}, {}] numbers is larger than memory can be; take "
                    "fewer rows or keys",
                    rows, keys));
  }
  Random random(seed);
  std::vector<std::vector<double>> block;  // unit rows, orthogonal to each other
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r % keys == 0) block.clear();
    std::vector<double> row(static_cast<std::size_t>(keys));
    for (double& x : row) x = random.normal();
    // The length of a Gaussian row is independent of its direction.
    const double length = norms == ProjectionNorms::kChi ? std::sqrt(dot(row, row))
                                                         : std::sqrt(static_cast<double>(keys));
    // Twice: the last rows of a block keep few of their digits the first time.
    for (int pass = 0; pass < 2; ++pass) {
      for (const std::vector<double>& other : block) {
        const double along = dot(row, other);
        for (std::size_t i = 0; i < row.size(); ++i) row[i] -= along * other[i];
      }
    }
    const double norm = std::sqrt(dot(row, row));
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] /= norm;
      w.at(r, static_cast<std::int64_t>(i)) = static_cast<float>(length * row[i]);
    }
    block.push_back(std::move(row));
  }
}

}  // namespace ouzel
