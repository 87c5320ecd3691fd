// Gradients against central differences in long double.
#pragma once

#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include "src/ops/reference/array.h"

namespace ouzel::test {

// Every element of `gradient` against (loss(x + h) - loss(x - h)) / 2h. With h = 1e-6 the
// truncation is about 1e-12 and the rounding of the 64-bit significand 1e-13.
template <class Loss>
void expect_gradient(const std::string& name, reference::Array<long double>& x,
                     const reference::Array<long double>& gradient, const Loss& loss) {
  constexpr long double h = 1e-6L;
  ASSERT_EQ(x.shape, gradient.shape) << name;
  for (std::size_t i = 0; i < x.data.size(); ++i) {
    const long double center = x.data[i];
    x.data[i] = center + h;
    const long double above = loss();
    x.data[i] = center - h;
    const long double below = loss();
    x.data[i] = center;
    const auto expected = static_cast<double>((above - below) / (2 * h));
    EXPECT_NEAR(static_cast<double>(gradient.data[i]), expected, 2e-9 * (1 + std::abs(expected)))
        << name << "[" << i << "]";
  }
}

inline long double dot(const reference::Array<long double>& a,
                       const reference::Array<long double>& b) {
  long double sum = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) sum += a.data[i] * b.data[i];
  return sum;
}

inline void expect_near(const reference::Array<long double>& a,
                        const reference::Array<long double>& b, double tolerance) {
  ASSERT_EQ(a.shape, b.shape);
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(a.data[i]), static_cast<double>(b.data[i]), tolerance) << i;
  }
}

}  // namespace ouzel::test
