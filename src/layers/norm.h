// RMSNorm over groups of features, optionally with a weight and a swish gate.
#pragma once

#include <cstdint>
#include <string>

#include "src/layers/layer.h"
#include "src/ops/norm.h"

namespace ouzel {

class Norm {
 public:
  // `name` + ".weight" [size]; affine = false: no weight.
  Norm(ParameterTable& table, const std::string& name, std::int64_t size, double eps,
       bool affine = true);

  // y = x / rms(x) * w (* silu(gate)); x, y, gate [rows, groups, size]. rstd [rows, groups] or
  // null.
  void forward(Run& run, View<const float, 3> x, View<float, 3> y, float* rstd,
               View<const float, 3> gate = {}) const;
  // dx may be dy.
  void backward(Run& run, View<const float, 3> x, const float* rstd, View<const float, 3> dy,
                View<float, 3> dx, View<const float, 3> gate = {}, View<float, 3> dgate = {}) const;

 private:
  const float* weight(const Run& run) const {
    return weight_ < 0 ? nullptr : run.weights + weight_;
  }

  std::int64_t weight_ = -1;  // offset; -1: none
  RmsNormOptions options_;
};

}  // namespace ouzel
