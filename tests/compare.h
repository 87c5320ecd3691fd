// The yardstick: RMS of the difference over RMS of the truth, per tensor, with a floor of 1e-3 of
// the largest RMS among the call's tensors of the same kind; a non-finite mismatch fails.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/bounds.h"
#include "src/ops/reference/array.h"

namespace ouzel::test {

template <class Real>
double rms(const std::vector<Real>& x) {
  double sum = 0;
  std::size_t count = 0;
  for (Real v : x) {
    if (!std::isfinite(v)) continue;
    sum += static_cast<double>(v) * static_cast<double>(v);
    ++count;
  }
  return count == 0 ? 0 : std::sqrt(sum / static_cast<double>(count));
}

// Collects tensors of one call, then judges them together.
class Comparison {
 public:
  template <class Real>
  void output(const std::string& name, const reference::Array<Real>& got,
              const reference::Array<double>& truth) {
    add(outputs_, name, got, truth);
  }
  template <class Real>
  void gradient(const std::string& name, const reference::Array<Real>& got,
                const reference::Array<double>& truth) {
    add(gradients_, name, got, truth);
  }

  // Fails, naming it, for every tensor whose error is beyond its bound. `gradient_floor`: see
  // kFloor.
  void expect_within(const Bounds& bounds, double gradient_floor = kFloor) const {
    judge(outputs_, bounds.output, kFloor);
    judge(gradients_, bounds.gradient, gradient_floor);
  }

 private:
  struct Entry {
    std::string name;
    double difference, truth;
  };

  template <class Real>
  void add(std::vector<Entry>& entries, const std::string& name, const reference::Array<Real>& got,
           const reference::Array<double>& truth) {
    ASSERT_EQ(got.shape, truth.shape) << name;
    std::vector<double> difference(truth.data.size());
    int mismatches = 0;
    for (std::size_t i = 0; i < truth.data.size(); ++i) {
      const double x = static_cast<double>(got.data[i]), y = truth.data[i];
      const bool same_kind = std::isnan(y)   ? std::isnan(x)
                             : std::isinf(y) ? x == y
                                             : std::isfinite(x);
      if (!same_kind) {
        if (mismatches++ == 0) {
          ADD_FAILURE() << name << "[" << i << "] is " << x << ", expected " << y;
        }
        difference[i] = std::numeric_limits<double>::max();
      } else if (std::isfinite(y)) {
        difference[i] = x - y;
      }
    }
    entries.push_back({name, rms(difference), rms(truth.data)});
  }

  static void judge(const std::vector<Entry>& entries, double bound, double floor) {
    double largest = 0;
    for (const Entry& e : entries) largest = std::max(largest, e.truth);
    for (const Entry& e : entries) {
      EXPECT_LE(e.difference / std::max({e.truth, floor * largest, 1e-30}), bound) << e.name;
    }
  }

  std::vector<Entry> outputs_, gradients_;
};

}  // namespace ouzel::test
