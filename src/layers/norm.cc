#include "src/layers/norm.h"

namespace ouzel {

Norm::Norm(ParameterTable& table, const std::string& name, std::int64_t size, double eps,
           bool affine)
    : options_{.eps = static_cast<float>(eps)} {
  if (affine) weight_ = table.add(name + ".weight", {size}, Init::kOnes);
}

void Norm::forward(Run& run, View<const float, 3> x, View<float, 3> y, float* rstd,
                   View<const float, 3> gate) const {
  run.compute([&] { rms_norm(run.context, options_, x, weight(run), gate, y, rstd); });
}

void Norm::backward(Run& run, View<const float, 3> x, const float* rstd, View<const float, 3> dy,
                    View<float, 3> dx, View<const float, 3> gate, View<float, 3> dgate) const {
  run.compute([&] {
    rms_norm_backward(run.context, options_, x, weight(run), gate, rstd, dy, dx, dgate,
                      weight_ < 0 ? nullptr : run.gradients + weight_);
  });
}

}  // namespace ouzel
