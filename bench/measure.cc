#include "bench/measure.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/peak.h"

namespace ouzel::bench {
namespace {

constexpr int kWarmUps = 2;  // pages touched, scratch grown, clocks up

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double peak_flops(Context& context) {
  std::vector<double> rates(static_cast<std::size_t>(context.threads()));
  // One task a thread; each lasts milliseconds, so none is taken twice by an idle neighbour.
  context.impl().run(context.threads(), [&](std::int64_t task, Scratch&) {
    rates[static_cast<std::size_t>(task)] = fma_peak_flops(context.isa());
  });
  double total = 0;
  for (double rate : rates) total += rate;
  return total;
}

Row with_efficiency(Row row, Context& context, double flops, int runs,
                    const std::function<void()>& call) {
  for (int i = 0; i < kWarmUps; ++i) call();
  std::vector<double> seconds, peaks, ratios;
  double before = peak_flops(context);
  for (int i = 0; i < runs; ++i) {
    seconds.push_back(seconds_of(call));
    const double after = peak_flops(context);
    peaks.push_back(std::max(before, after));
    ratios.push_back(flops / seconds.back() / peaks.back());
    before = after;
  }
  row.threads = context.threads();
  row.ms = median(seconds) * 1e3;
  row.gflops = flops / median(seconds) / 1e9;
  row.peak_gflops = median(peaks) / 1e9;
  row.efficiency = median(ratios);
  return row;
}

Row with_ratio(Row row, int runs, const std::function<void()>& call,
               const std::function<void()>& other) {
  for (int i = 0; i < kWarmUps; ++i) {
    call();
    other();
  }
  std::vector<double> seconds, ratios;
  for (int i = 0; i < runs; ++i) {
    const double theirs = seconds_of(other);
    seconds.push_back(seconds_of(call));
    ratios.push_back(theirs / seconds.back());
  }
  row.ms = median(seconds) * 1e3;
  row.ratio = median(ratios);
  return row;
}

Data::Data(std::vector<std::int64_t> shape) : shape_(std::move(shape)) {
  buffer_ = Buffer(static_cast<std::size_t>(bytes()));
}

Data::Data(std::uint64_t seed, std::vector<std::int64_t> shape, double scale)
    : Data(std::move(shape)) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  for (std::int64_t i = 0; i < size(); ++i) data()[i] = normal(random);
}

Data Data::empty(std::vector<std::int64_t> shape) {
  Data data(std::move(shape));
  std::fill_n(data.data(), data.size(), std::numeric_limits<float>::quiet_NaN());
  return data;
}

std::int64_t Data::size() const {
  std::int64_t n = 1;
  for (std::int64_t extent : shape_) n *= extent;
  return n;
}

Tensor Data::tensor() const {
  std::array<std::int64_t, kMaxRank> stride{};
  Tensor tensor;
  tensor.data = data();
  tensor.rank = static_cast<int>(shape_.size());
  std::int64_t step = 1;
  for (std::size_t i = shape_.size(); i-- > 0;) {
    tensor.extent[i] = shape_[i];
    stride[i] = step;
    step *= shape_[i];
  }
  tensor.stride = stride;
  return tensor;
}

void Data::consume(const char* what) const {
  double magnitude = 0;
  for (std::int64_t i = 0; i < size(); ++i) magnitude += std::abs(data()[i]);
  if (!std::isfinite(magnitude) || magnitude == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string("bench: the result of ") + what + " is not a finite non-zero array");
  }
}

}  // namespace ouzel::bench
