#include "apps/ouzel/compare.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel::app {
namespace {

bool is_small(double x) { return std::isfinite(x) && std::abs(x) < 1e37; }

// RMS over the values that are small in `truth`.
template <class Value>
double rms(const std::vector<double>& truth, Value value) {
  double sum = 0;
  std::size_t n = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (!is_small(truth[i])) continue;
    const double x = value(i);
    sum += x * x;
    ++n;
  }
  return n == 0 ? 0 : std::sqrt(sum / static_cast<double>(n));
}

double rms(const std::vector<double>& truth) {
  return rms(truth, [&](std::size_t i) { return truth[i]; });
}

struct Pair {
  const NamedArray* result;
  std::vector<std::int64_t> shape;  // of the truth
  std::vector<double> truth;
};

std::string fault_of(const Pair& pair) {
  const Tensor& tensor = pair.result->array.tensor;
  const std::vector<std::int64_t> shape(tensor.extent.begin(), tensor.extent.begin() + tensor.rank);
  if (shape != pair.shape) {
    return fmt::format("shape {}, expected {}", shape_string(shape), shape_string(pair.shape));
  }
  const float* values = pair.result->array.memory.f32();
  for (std::size_t i = 0; i < pair.truth.size(); ++i) {
    if (is_small(pair.truth[i]) != is_small(values[i])) {
      return fmt::format("element {} is {}, expected {}", i, values[i], pair.truth[i]);
    }
  }
  return "";
}

}  // namespace

std::vector<Comparison> compare(const SafetensorsReader& file,
                                const std::vector<NamedArray>& results, const Bounds& bounds) {
  std::vector<Pair> pairs;
  double largest[2] = {0, 0};  // of outputs, of gradients
  for (const NamedArray& result : results) {
    const NamedTensor* truth = file.find(result.name);
    if (truth == nullptr) continue;
    if (!truth->is_float()) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("the expected tensor {} is {}; floats were expected", result.name,
                              truth->type));
    }
    Pair pair = {&result, truth->shape,
                 std::vector<double>(static_cast<std::size_t>(truth->size()))};
    file.read_f64(*truth, pair.truth.data());
    double& kind = largest[result.is_gradient ? 1 : 0];
    kind = std::max(kind, rms(pair.truth));
    pairs.push_back(std::move(pair));
  }
  std::vector<Comparison> comparisons;
  for (const Pair& pair : pairs) {
    Comparison c;
    c.name = pair.result->name;
    c.bound = pair.result->is_gradient ? bounds.gradient : bounds.output;
    c.fault = fault_of(pair);
    if (c.fault.empty()) {
      const float* values = pair.result->array.memory.f32();
      const double floor = 1e-3 * largest[pair.result->is_gradient ? 1 : 0];
      const double difference =
          rms(pair.truth, [&](std::size_t i) { return values[i] - pair.truth[i]; });
      // All-zero truths leave nothing to divide by: only zero is right then.
      c.error = difference / std::max({rms(pair.truth), floor, 1e-30});
    }
    comparisons.push_back(std::move(c));
  }
  return comparisons;
}

std::string describe(const Comparison& c) {
  if (!c.fault.empty()) return fmt::format("{:<14} {}", c.name, c.fault);
  if (std::isinf(c.bound)) return fmt::format("{:<14} {:.2e}", c.name, c.error);
  return fmt::format("{:<14} {:.2e}  {} the bound {:.0e}", c.name, c.error,
                     c.within() ? "within" : "BEYOND", c.bound);
}

}  // namespace ouzel::app
