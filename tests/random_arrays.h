// Random inputs of tests: the same numbers on every machine, all exact in float32.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "src/ops/reference/array.h"

namespace ouzel::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // SplitMix64 (Steele, Lea, Flood 2014).
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform in [lo, hi), rounded to float.
  float uniform(double lo, double hi) {
    return static_cast<float>(lo + (hi - lo) * static_cast<double>(bits() >> 11) * 0x1p-53);
  }
  std::int64_t integer(std::int64_t lo, std::int64_t hi) {  // in [lo, hi]
    return lo + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(hi - lo + 1));
  }

 private:
  std::uint64_t state_;
};

template <class Real>
reference::Array<Real> random_array(Random& random, std::vector<std::int64_t> shape, double lo = -1,
                                    double hi = 1) {
  reference::Array<Real> array(std::move(shape));
  for (Real& x : array.data) x = random.uniform(lo, hi);
  return array;
}

}  // namespace ouzel::test
