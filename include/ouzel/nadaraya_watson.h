// Kernel regression (E. A. Nadaraya, G. S. Watson, 1964), exact: o_i = sum_j w_ij y_j / sum_j w_ij
// with w = exp(-|queries_i - x_j|^2 / (2 bandwidth^2)) or exp(scale queries_i . x_j). Weights are
// shifted by the largest of a query, so that none too far from every point divides by 0.
#pragma once

#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/tensor.h"

namespace ouzel {

enum class RegressionKernel { kGaussian, kExpDot };

struct NadarayaWatsonOptions {
  RegressionKernel kernel = RegressionKernel::kGaussian;
  double bandwidth = 1;              // gaussian; above 0
  std::optional<double> scale = {};  // exp_dot; default d^-0.5
};

// x [P, d], y [P, V], queries [M, d], o [M, V]; P at least 1. float32, any strides with unit last
// stride. Computed in float64.
struct NadarayaWatsonInputs {
  ConstTensor x = {}, y = {}, queries = {};
};

OUZEL_EXPORT void nadaraya_watson(Context& context, const NadarayaWatsonOptions& options,
                                  const NadarayaWatsonInputs& inputs, const Tensor& o);

// Gradients are assigned; absent ones are not computed.
OUZEL_EXPORT void nadaraya_watson_backward(Context& context, const NadarayaWatsonOptions& options,
                                           const NadarayaWatsonInputs& inputs,
                                           const ConstTensor& d_o, const Tensor& dx,
                                           const Tensor& dy, const Tensor& dqueries);

}  // namespace ouzel
