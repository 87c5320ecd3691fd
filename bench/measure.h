// Timing: repetitions of a case alternate with what they are compared to (the FMA peak, another
// library, fewer threads), and the figure is the median of the ratios of neighbours: a machine that
// changes its clock between two cases changes both sides.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bench/case.h"
#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel::bench {

double median(std::vector<double> values);

// Seconds that one call takes.
double seconds_of(const std::function<void()>& call);

// FLOP/s of all threads of the context at once.
double peak_flops(Context& context);

// Fills ms, gflops, peak_gflops and efficiency for a call of `flops` useful operations.
Row with_efficiency(Row row, Context& context, double flops, int runs,
                    const std::function<void()>& call);

// Fills ms (of `call`) and ratio: the time of `other` over that of `call`.
Row with_ratio(Row row, int runs, const std::function<void()>& call,
               const std::function<void()>& other);

// Dense memory of standard normal numbers times `scale`; the same for the same seed.
class Data {
 public:
  Data(std::uint64_t seed, std::vector<std::int64_t> shape, double scale = 1);
  static Data empty(std::vector<std::int64_t> shape);  // for outputs: filled with NaN
  Data like() const { return empty(shape_); }

  float* data() const { return buffer_.f32(); }
  std::int64_t size() const;
  std::int64_t bytes() const { return size() * 4; }
  Tensor tensor() const;
  // Throws unless every element has been written with a finite number and not all are 0: a case
  // whose result nobody could use has not been measured.
  void consume(const char* what) const;

 private:
  explicit Data(std::vector<std::int64_t> shape);
  std::vector<std::int64_t> shape_;
  Buffer buffer_;
};

}  // namespace ouzel::bench
