// SwiGLU, rotary positions, embedding, cross entropy and additions against float64, and bit for bit
// over threads and strides.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/pointwise.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using reference::Array;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 60, 64, 100, 384};

// Rows with `padding` floats of NaN after each, which must stay.
struct Rows {
  std::int64_t rows, size, stride;
  std::vector<float> data;

  Rows(std::int64_t rows, std::int64_t size, std::uint64_t seed, double range = 1,
       std::int64_t padding = 2)
      : rows(rows), size(size), stride(size + padding) {
    data.assign(static_cast<std::size_t>(rows * stride), kNaN);
    Random random(seed);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < size; ++i) at(r, i) = random.uniform(-range, range);
    }
  }
  float& at(std::int64_t r, std::int64_t i) {
    return data[static_cast<std::size_t>(r * stride + i)];
  }
  double at(std::int64_t r, std::int64_t i) const {
    return data[static_cast<std::size_t>(r * stride + i)];
  }
  View<float, 2> view() { return {data.data(), {rows, size}, {stride, 1}}; }
  View<const float, 2> view() const { return {data.data(), {rows, size}, {stride, 1}}; }
  bool same_bits(const Rows& other) const {
    return data.size() == other.data.size() &&
           (data.empty() ||
            std::memcmp(data.data(), other.data.data(), data.size() * sizeof(float)) == 0);
  }
  // The numbers without padding, which is checked.
  Array<float> dense() const {
    Array<float> a({rows, size});
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < size; ++i) a(r, i) = static_cast<float>(at(r, i));
      for (std::int64_t i = size; i < stride; ++i) EXPECT_TRUE(std::isnan(at(r, i)));
    }
    return a;
  }
};

template <class Function>
Array<double> truth(std::int64_t rows, std::int64_t size, Function f) {
  Array<double> a({rows, size});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < size; ++i) a(r, i) = f(r, i);
  }
  return a;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class PointwiseTest : public testing::TestWithParam<Isa> {
 protected:
  Context context_{{.threads = 2, .isa = GetParam(), .poison_scratch = true}};
  Context single_{{.threads = 1, .isa = GetParam(), .poison_scratch = true}};
};

TEST_P(PointwiseTest, SwigluAndItsGradientsAgreeWithFloat64) {
  for (std::int64_t size : kSizes) {
    for (std::int64_t rows : {1, 7, 200}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << size);
      const Rows gate(rows, size, 1, 8), up(rows, size, 2), dy(rows, size, 3);
      Rows y(rows, size, 4), dgate = gate, dup = up;
      swiglu(context_, gate.view(), up.view(), y.view());
      swiglu_backward(context_, dgate.view(), dup.view(), dy.view(), dgate.view(), dup.view());
      Comparison comparison;
      comparison.output("y", y.dense(), truth(rows, size, [&](auto r, auto i) {
                          return gate.at(r, i) * sigmoid(gate.at(r, i)) * up.at(r, i);
                        }));
      comparison.gradient("dgate", dgate.dense(), truth(rows, size, [&](auto r, auto i) {
                            const double g = gate.at(r, i), s = sigmoid(g);
                            return dy.at(r, i) * up.at(r, i) * s * (1 + g * (1 - s));
                          }));
      comparison.gradient("dup", dup.dense(), truth(rows, size, [&](auto r, auto i) {
                            return dy.at(r, i) * gate.at(r, i) * sigmoid(gate.at(r, i));
                          }));
      comparison.expect_within(kFloat32);
      Rows again(rows, size, 4);
      swiglu(single_, gate.view(), up.view(), again.view());
      EXPECT_TRUE(again.same_bits(y));
    }
  }
}

TEST_P(PointwiseTest, SwigluOfExtremesIsNaNOnlyForNaN) {
  Rows gate(1, 5, 1), up(1, 5, 2), y(1, 5, 3);
  const float gates[] = {-1e30f, -100, 100, 1e30f, kNaN};
  for (std::int64_t i = 0; i < 5; ++i) gate.at(0, i) = gates[i], up.at(0, i) = 1;
  swiglu(context_, gate.view(), up.view(), y.view());
  EXPECT_EQ(y.at(0, 0), 0);
  EXPECT_EQ(y.at(0, 1), 0);
  EXPECT_EQ(y.at(0, 2), 100);
  EXPECT_EQ(y.at(0, 3), 1e30f);
  EXPECT_TRUE(std::isnan(y.at(0, 4)));
}

TEST_P(PointwiseTest, RotaryTurnsPairsByTheirAngleAtAnyPosition) {
  const std::int64_t positions[] = {0, 1, 1, 2, 17, 1000, 65536, 1234567, 2147483647};
  for (std::int64_t size : {2, 6, 16, 30, 64, 100, 128}) {
    for (double base : {10000.0, 500000.0}) {
      SCOPED_TRACE(testing::Message() << "size " << size << ", base " << base);
      const std::int64_t rows = std::size(positions), heads = 3;
      const Rows before(rows, heads * size, 1);
      Rows x = before;
      const View<float, 3> view(x.data.data(), {rows, heads, size}, {x.stride, size, 1});
      rotary(context_, view, positions, base, false);
      Comparison comparison;
      comparison.output(
          "x", x.dense(), truth(rows, heads * size, [&](auto r, auto i) {
            const std::int64_t half = size / 2, e = i % size, k = e % half;
            const double angle =
                static_cast<double>(positions[r]) *
                std::pow(base, -2.0 * static_cast<double>(k) / static_cast<double>(size));
            const double a = before.at(r, i - e + k), b = before.at(r, i - e + k + half);
            return e < half ? a * std::cos(angle) - b * std::sin(angle)
                            : b * std::cos(angle) + a * std::sin(angle);
          }));
      rotary(context_, view, positions, base, true);
      comparison.output("back", x.dense(),
                        truth(rows, heads * size, [&](auto r, auto i) { return before.at(r, i); }));
      comparison.expect_within(kFloat32);
    }
  }
}

TEST_P(PointwiseTest, RotaryDoesNotDependOnTasksOrNeighbours) {
  const std::int64_t rows = 500, heads = 4, size = 64;
  std::vector<std::int64_t> positions;
  for (std::int64_t r = 0; r < rows; ++r) positions.push_back(r / 2 % 100);
  const Rows before(rows, heads * size, 1);
  Rows all = before;
  rotary(context_, {all.data.data(), {rows, heads, size}, {all.stride, size, 1}}, positions, 1e4,
         false);
  for (std::int64_t r : {0, 1, 2, 257, 499}) {
    Rows one = before;
    rotary(single_, {&one.at(r, 0), {1, heads, size}, {one.stride, size, 1}},
           std::span(positions).subspan(static_cast<std::size_t>(r), 1), 1e4, false);
    EXPECT_EQ(std::memcmp(&one.at(r, 0), &all.at(r, 0), heads * size * sizeof(float)), 0);
  }
}

TEST_P(PointwiseTest, EmbedCopiesRowsAndItsGradientAddsThemInOrder) {
  for (std::int64_t size : {1, 33, 64, 100, 384}) {
    const std::vector<std::int32_t> tokens{3, 0, 3, 9, 3, 1, 9};
    const std::int64_t rows = 7;
    const Rows table(10, size, 1), dy(rows, size, 2), start(10, size, 4);
    Rows y(rows, size, 3), dtable = start;
    embed(context_, tokens, table.view(), y.view());
    embed_backward(context_, tokens, dy.view(), dtable.view());
    Rows expected = start;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t token = tokens[static_cast<std::size_t>(r)];
        EXPECT_EQ(y.at(r, i), table.at(token, i));
        expected.at(token, i) += static_cast<float>(dy.at(r, i));
      }
    }
    EXPECT_TRUE(dtable.same_bits(expected));
    y.dense();
  }
}

TEST_P(PointwiseTest, CrossEntropyAndItsGradientAgreeWithFloat64) {
  for (std::int64_t size : {1, 2, 3, 15, 16, 17, 31, 33, 100, 256}) {
    for (double range : {1.0, 80.0}) {
      SCOPED_TRACE(testing::Message() << size << " classes within " << range);
      const std::int64_t rows = 300;
      const float weight = 0.25f;
      const Rows logits(rows, size, 1, range);
      std::vector<std::int32_t> targets;
      for (std::int64_t r = 0; r < rows; ++r) {
        targets.push_back(r % 11 == 5 ? -1 : static_cast<std::int32_t>(r * 7 % size));
      }
      Array<float> losses({rows}), alone({rows});
      Rows dlogits = logits;
      View<float, 2> gradient = dlogits.view();
      cross_entropy(context_, dlogits.view(), targets, weight, losses.data.data(), &gradient);
      cross_entropy(single_, logits.view(), targets, weight, alone.data.data(), nullptr);
      EXPECT_EQ(losses.data, alone.data);
      Array<double> expected({rows});
      const auto d_expected = truth(rows, size, [&](auto r, auto i) {
        const std::int64_t target = targets[static_cast<std::size_t>(r)];
        if (target < 0) return 0.0;
        double sum = 0;
        for (std::int64_t k = 0; k < size; ++k) sum += std::exp(logits.at(r, k));
        expected(r) = std::log(sum) - logits.at(r, target);
        return weight * (std::exp(logits.at(r, i)) / sum - (i == target ? 1 : 0));
      });
      Comparison comparison;
      if (size > 1) {
        comparison.output("losses", losses, expected);
      } else {
        for (float loss : losses.data) EXPECT_EQ(loss, 0);
      }
      comparison.gradient("dlogits", dlogits.dense(), d_expected);
      comparison.expect_within(kFloat32);
    }
  }
}

TEST_P(PointwiseTest, CrossEntropyOfFarLogits) {
  // Sums that overflow float32 unless shifted, weights of exactly 0, and NaN.
  Rows logits(3, 4, 1);
  const float values[3][4] = {{1000, 999, -1e30f, -std::numeric_limits<float>::infinity()},
                              {-1000, -1001, -1000, -1000},
                              {0, kNaN, 0, 0}};
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t i = 0; i < 4; ++i) logits.at(r, i) = values[r][i];
  }
  const std::vector<std::int32_t> targets{1, 1, 0};
  float losses[3];
  View<float, 2> gradient = logits.view();
  cross_entropy(context_, logits.view(), targets, 1, losses, &gradient);
  EXPECT_NEAR(losses[0], 1 + std::log1p(std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(losses[1], 1 + std::log(3 + std::exp(-1.0)), 1e-6);
  EXPECT_TRUE(std::isnan(losses[2]));
  EXPECT_EQ(logits.at(0, 3), 0);
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(logits.at(2, i)));
}

TEST_P(PointwiseTest, AddAdds) {
  for (std::int64_t size : kSizes) {
    const Rows x(90, size, 1), before(90, size, 2);
    Rows y = before;
    add(context_, x.view(), y.view());
    Rows expected = before;
    for (std::int64_t r = 0; r < 90; ++r) {
      for (std::int64_t i = 0; i < size; ++i) expected.at(r, i) += static_cast<float>(x.at(r, i));
    }
    EXPECT_TRUE(y.same_bits(expected));
  }
}

TEST_P(PointwiseTest, RefusesWrongShapes) {
  Rows a(3, 4, 1), b(3, 5, 2);
  const std::vector<std::int32_t> two{0, 1};
  const std::vector<std::int64_t> positions{0, 1, 2};
  float losses[3];
  EXPECT_THROW(swiglu(context_, a.view(), b.view(), a.view()), Error);
  EXPECT_THROW(add(context_, a.view(), b.view()), Error);
  EXPECT_THROW(embed(context_, two, a.view(), b.view()), Error);
  EXPECT_THROW(cross_entropy(context_, a.view(), two, 1, losses, nullptr), Error);
  EXPECT_THROW(rotary(context_, {b.data.data(), {3, 1, 5}}, positions, 1e4, false), Error);
  EXPECT_THROW(rotary(context_, {a.data.data(), {2, 1, 4}}, positions, 1e4, false), Error);
}

INSTANTIATE_TEST_SUITE_P(EachIsa, PointwiseTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel::test
