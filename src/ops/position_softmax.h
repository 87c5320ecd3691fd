// Softmax over the positions of a sequence, a feature at a time, in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/ops/rows64.h"

namespace ouzel {

// log(sum_t e^(k_t)) of each of n features of head h; -inf without tokens.
inline void position_lse(const AnyView<const void, 4>& k, const Segment& seq, std::int64_t h,
                         std::int64_t n, double* lse) {
  for (std::int64_t i = 0; i < n; ++i) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled_at(t);
      top = std::max(top, static_cast<double>(k.at(seq.batch, t, h, i)));
    }
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled_at(t);
      sum += std::exp(static_cast<double>(k.at(seq.batch, t, h, i)) - top);
    }
    lse[i] = top + std::log(sum);
  }
}

// The weights of one position.
inline void position_weights(const AnyRows<const void>& k, const double* lse, std::int64_t n,
                             double* p) {
  read(k, n, p);
  for (std::int64_t i = 0; i < n; ++i) p[i] = std::exp(p[i] - lse[i]);
}

// From the gradient of a position's weights to that of its keys: p (d - sum over positions of p d),
// the sum given.
inline void position_adjoint(const double* p, const double* sum, std::int64_t n, double* d) {
  for (std::int64_t i = 0; i < n; ++i) d[i] = p[i] * (d[i] - sum[i]);
}

}  // namespace ouzel
