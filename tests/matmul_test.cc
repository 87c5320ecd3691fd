// Matrix products against float64 sums, and the promise that an element never depends on its
// company: rows alone, any thread count and every stride give the same bits.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "src/ops/matmul.h"

namespace ouzel {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A matrix of normal numbers whose rows are `padding` longer than its columns; the padding is NaN,
// so that reading it shows, and is checked to be untouched.
struct Matrix {
  std::int64_t rows, columns, stride;
  std::vector<float> data;

  Matrix(std::int64_t rows, std::int64_t columns, unsigned seed, std::int64_t padding = 3)
      : rows(rows), columns(columns), stride(columns + padding) {
    data.assign(static_cast<std::size_t>(rows * stride), kNaN);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) at(r, c) = normal(random);
    }
  }
  float& at(std::int64_t r, std::int64_t c) {
    return data[static_cast<std::size_t>(r * stride + c)];
  }
  double at(std::int64_t r, std::int64_t c) const {
    return data[static_cast<std::size_t>(r * stride + c)];
  }
  View<float, 2> view() { return {data.data(), {rows, columns}, {stride, 1}}; }
  View<const float, 2> view() const { return {data.data(), {rows, columns}, {stride, 1}}; }
  bool padding_untouched() const {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = columns; c < stride; ++c) {
        if (!std::isnan(at(r, c))) return false;
      }
    }
    return true;
  }
};

bool same_bits(const Matrix& a, const Matrix& b) {
  return a.data.size() == b.data.size() &&
         (a.data.empty() ||
          std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0);
}

// |found - sum| <= bound * (|start| + sum of magnitudes), for each element of `found`, where the
// sum runs over `inner` products term(row, column, i).
template <class Term>
void expect_sums(const Matrix& found, const Matrix* start, std::int64_t inner, Term term) {
  for (std::int64_t r = 0; r < found.rows; ++r) {
    for (std::int64_t c = 0; c < found.columns; ++c) {
      double sum = start ? start->at(r, c) : 0, size = std::abs(sum);
      for (std::int64_t i = 0; i < inner; ++i) {
        const double product = term(r, c, i);
        sum += product;
        size += std::abs(product);
      }
      ASSERT_NEAR(found.at(r, c), sum, 1e-6 * size) << "row " << r << ", column " << c;
    }
  }
  EXPECT_TRUE(found.padding_untouched());
}

struct Shape {
  std::int64_t m, n, k;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.m << " x " << s.n << " x " << s.k;
}

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  // Each size as rows, columns and inner dimension, beside others that are no multiple of anything.
  for (std::int64_t s : {0, 1, 2, 3, 15, 16, 17, 31, 33, 60, 64, 100, 384}) {
    list.push_back({s, 37, 29});
    list.push_back({19, s, 29});
    list.push_back({19, 37, s});
    list.push_back({131, 37, s});  // many rows
    list.push_back({1, s, 33});
    list.push_back({s, s, 7});
  }
  list.push_back({5, 417, 1100});   // several inner and column blocks, few rows
  list.push_back({131, 401, 530});  // and many
  list.push_back({1030, 20, 40});   // several token blocks of the weight gradient
  return list;
}

class MatmulTest : public testing::TestWithParam<Isa> {
 protected:
  Context context_{{.threads = 2, .isa = GetParam(), .poison_scratch = true}};
};

TEST_P(MatmulTest, LinearIsTheSumOfProducts) {
  PackedMatrix packed;
  for (const Shape& s : shapes()) {
    SCOPED_TRACE(s);
    const Matrix x(s.m, s.k, 1), w(s.n, s.k, 2), before(s.m, s.n, 3);
    packed.pack(context_, w.view());
    for (bool accumulate : {false, true}) {
      Matrix y = before;
      linear(context_, x.view(), packed, y.view(), accumulate);
      expect_sums(y, accumulate ? &before : nullptr, s.k,
                  [&](auto r, auto c, auto i) { return x.at(r, i) * w.at(c, i); });
    }
  }
}

TEST_P(MatmulTest, BackwardInputIsTheSumOfProducts) {
  for (const Shape& s : shapes()) {
    SCOPED_TRACE(s);
    const Matrix dy(s.m, s.k, 1), w(s.k, s.n, 2), before(s.m, s.n, 3);
    for (bool accumulate : {false, true}) {
      Matrix dx = before;
      linear_backward_input(context_, dy.view(), w.view(), dx.view(), accumulate);
      expect_sums(dx, accumulate ? &before : nullptr, s.k,
                  [&](auto r, auto c, auto i) { return dy.at(r, i) * w.at(i, c); });
    }
  }
}

TEST_P(MatmulTest, BackwardWeightIsTheSumOfProductsAddedOn) {
  std::vector<Shape> all = shapes();
  // Tokens in one, two and many parts of their own sums, the last of them short.
  for (const std::int64_t m : {2047, 2048, 2305, 9300}) all.push_back({m, 13, 17});
  for (const Shape& s : all) {
    SCOPED_TRACE(s);
    const Matrix dy(s.m, s.n, 1), x(s.m, s.k, 2), before(s.n, s.k, 3);
    Matrix dw = before;
    linear_backward_weight(context_, dy.view(), x.view(), dw.view());
    expect_sums(dw, &before, s.m, [&](auto r, auto c, auto i) { return dy.at(i, r) * x.at(i, c); });
  }
}

TEST_P(MatmulTest, RowsDoNotDependOnTheirCompany) {
  for (const Shape& s : {Shape{61, 417, 1100}, Shape{301, 70, 385}, Shape{300, 33, 1}}) {
    SCOPED_TRACE(s);
    const Matrix x(s.m, s.k, 1), w(s.n, s.k, 2), wt(s.k, s.n, 5);
    PackedMatrix packed;
    packed.pack(context_, w.view());
    Matrix y(s.m, s.n, 3), dx(s.m, s.n, 3);
    linear(context_, x.view(), packed, y.view());
    linear_backward_input(context_, x.view(), wt.view(), dx.view());
    for (std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 29, 57}) {
      for (std::int64_t first = 0; first + rows <= s.m; first += rows * 3) {
        Matrix part(rows, s.n, 7), d_part(rows, s.n, 7);
        const View<const float, 2> in(x.view()(first), {rows, s.k}, {x.stride, 1});
        linear(context_, in, packed, part.view());
        linear_backward_input(context_, in, wt.view(), d_part.view());
        const std::size_t bytes = part.data.size() * sizeof(float);
        ASSERT_EQ(std::memcmp(part.data.data(), y.view()(first), bytes), 0) << rows;
        ASSERT_EQ(std::memcmp(d_part.data.data(), dx.view()(first), bytes), 0) << rows;
      }
    }
  }
}

TEST_P(MatmulTest, ThreadsAndStridesChangeNoBit) {
  for (const Shape& s :
       {Shape{1100, 417, 70}, Shape{130, 90, 1030}, Shape{2, 600, 530}, Shape{3500, 21, 34}}) {
    SCOPED_TRACE(s);
    std::vector<Matrix> results[3];
    for (int threads : {1, 2, 3, 5}) {
      Context context({.threads = threads, .isa = GetParam(), .poison_scratch = true});
      const std::int64_t padding = threads * 5 - 5;
      const Matrix x(s.m, s.k, 1, padding), w(s.n, s.k, 2, padding), wt(s.k, s.n, 3, padding),
          dy(s.m, s.n, 4, padding);
      PackedMatrix packed;
      packed.pack(context, w.view());
      Matrix y(s.m, s.n, 5), dx(s.m, s.n, 6), dw(s.n, s.k, 7);
      linear(context, x.view(), packed, y.view());
      linear_backward_input(context, x.view(), wt.view(), dx.view());
      linear_backward_weight(context, dy.view(), x.view(), dw.view());
      results[0].push_back(y);
      results[1].push_back(dx);
      results[2].push_back(dw);
    }
    for (const auto& list : results) {
      for (const Matrix& m : list) EXPECT_TRUE(same_bits(m, list[0]));
    }
  }
}

TEST_P(MatmulTest, NaNAndInfinityReachTheirRowAlone) {
  const std::int64_t m = 40, n = 50, k = 60;
  Matrix x(m, k, 1);
  const Matrix w(n, k, 2);
  x.at(17, 3) = kNaN;
  x.at(20, 59) = std::numeric_limits<float>::infinity();
  PackedMatrix packed;
  packed.pack(context_, w.view());
  Matrix y(m, n, 3);
  linear(context_, x.view(), packed, y.view());
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t c = 0; c < n; ++c) {
      EXPECT_EQ(std::isnan(y.at(r, c)), r == 17);
      EXPECT_EQ(std::isinf(y.at(r, c)), r == 20);
    }
  }
}

TEST_P(MatmulTest, RefusesShapesThatDoNotMeet) {
  const Matrix x(4, 5, 1), w(6, 7, 2);
  Matrix y(4, 6, 3), dw(6, 5, 4);
  PackedMatrix packed;
  packed.pack(context_, w.view());
  EXPECT_THROW(linear(context_, x.view(), packed, y.view()), Error);
  EXPECT_THROW(linear_backward_input(context_, x.view(), w.view(), y.view()), Error);
  EXPECT_THROW(linear_backward_weight(context_, w.view(), x.view(), dw.view()), Error);
}

INSTANTIATE_TEST_SUITE_P(EachIsa, MatmulTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel
