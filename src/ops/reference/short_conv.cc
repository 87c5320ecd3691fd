#include "src/ops/reference/short_conv.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ouzel::reference {
namespace {

using Int = std::int64_t;

// e of one channel of one sequence: W inputs of the state, then those of the sequence.
template <class Real>
std::vector<Real> extended(const ShortConvArguments<Real>& a, Int n, const Segment& segment,
                           Int d) {
  std::vector<Real> e;
  for (Int j = 0; j < a.weight.extent(1); ++j) e.push_back(a.s0.present() ? a.s0(n, d, j) : 0);
  for (Int t = 0; t < segment.length; ++t) e.push_back(a.x(segment.batch, segment.begin + t, d));
  return e;
}

// bias + sum_j w[d, j] e_{t+1+j}, before the activation.
template <class Real>
Real convolve(const ShortConvArguments<Real>& a, const std::vector<Real>& e, Int d, Int t) {
  Real sum = a.bias.present() ? a.bias(d) : 0;
  for (Int j = 0; j < a.weight.extent(1); ++j) {
    sum += a.weight(d, j) * e[static_cast<std::size_t>(t + 1 + j)];
  }
  return sum;
}

template <class Real>
Real sigmoid(Real x) {
  return 1 / (1 + std::exp(-x));
}

}  // namespace

template <class Real>
ShortConvResults<Real> short_conv(const ShortConvArguments<Real>& a) {
  const Int channels = a.weight.extent(0), width = a.weight.extent(1);
  ShortConvResults<Real> r{Array<Real>::like(a.x),
                           Array<Real>({a.segments.count(), channels, width})};
  for (Int n = 0; n < a.segments.count(); ++n) {
    const Segment& segment = a.segments.list[static_cast<std::size_t>(n)];
    for (Int d = 0; d < channels; ++d) {
      const std::vector<Real> e = extended(a, n, segment, d);
      for (Int t = 0; t < segment.length; ++t) {
        const Real u = convolve(a, e, d, t);
        r.y(segment.batch, segment.begin + t, d) = a.silu ? u * sigmoid(u) : u;
      }
      for (Int j = 0; j < width; ++j) {
        r.s(n, d, j) = e[static_cast<std::size_t>(segment.length + j)];
      }
    }
  }
  return r;
}

template <class Real>
ShortConvGradients<Real> short_conv_backward(const ShortConvArguments<Real>& a,
                                             const ShortConvResults<Real>& upstream) {
  const Int channels = a.weight.extent(0), width = a.weight.extent(1);
  ShortConvGradients<Real> r{Array<Real>::like(a.x), Array<Real>::like(a.weight),
                             Array<Real>::like(a.bias),
                             Array<Real>({a.segments.count(), channels, width})};
  for (Int n = 0; n < a.segments.count(); ++n) {
    const Segment& segment = a.segments.list[static_cast<std::size_t>(n)];
    for (Int d = 0; d < channels; ++d) {
      const std::vector<Real> e = extended(a, n, segment, d);
      std::vector<Real> de(e.size());
      for (Int t = 0; t < segment.length && upstream.y.present(); ++t) {
        Real du = upstream.y(segment.batch, segment.begin + t, d);
        if (a.silu) {
          const Real u = convolve(a, e, d, t), p = sigmoid(u);
          du *= p * (1 + u * (1 - p));
        }
        if (r.bias.present()) r.bias(d) += du;
        for (Int j = 0; j < width; ++j) {
          r.weight(d, j) += du * e[static_cast<std::size_t>(t + 1 + j)];
          de[static_cast<std::size_t>(t + 1 + j)] += du * a.weight(d, j);
        }
      }
      for (Int j = 0; j < width && upstream.s.present(); ++j) {
        de[static_cast<std::size_t>(segment.length + j)] += upstream.s(n, d, j);
      }
      for (Int j = 0; j < width; ++j) r.s0(n, d, j) = de[static_cast<std::size_t>(j)];
      for (Int t = 0; t < segment.length; ++t) {
        r.x(segment.batch, segment.begin + t, d) = de[static_cast<std::size_t>(width + t)];
      }
    }
  }
  return r;
}

#define OUZEL_INSTANTIATE(Real)                                                          \
  template ShortConvResults<Real> short_conv(const ShortConvArguments<Real>&);           \
  template ShortConvGradients<Real> short_conv_backward(const ShortConvArguments<Real>&, \
                                                        const ShortConvResults<Real>&);
OUZEL_INSTANTIATE(double)
OUZEL_INSTANTIATE(long double)
#undef OUZEL_INSTANTIATE

}  // namespace ouzel::reference
