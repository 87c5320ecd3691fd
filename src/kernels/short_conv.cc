// Four tokens at a time, so that weights and inputs are loaded once for the four; every output is
// the same chain of multiply-adds, oldest input first, whatever its neighbours.
#include "src/kernels/short_conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/short_conv.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr int kTokens = 4;

// z of kCount tokens from `x` on. kWidth 0: the width is known at run time only.
template <int kCount, int kWidth, class Lanes>
HWY_INLINE void Convolve(D d, const ConvTokens& c, const float* const* x, int64_t i, Lanes lanes,
                         V* z) {
  const V bias = lanes.Load(d, c.bias + i);
  HWY_UNROLL(4)
  for (int t = 0; t < kCount; ++t) z[t] = bias;
  if constexpr (kWidth == 0) {
    for (int64_t j = 0; j < c.width; ++j) {
      const V w = lanes.Load(d, c.weight + j * c.channels + i);
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) z[t] = hn::MulAdd(w, lanes.Load(d, x[t + j] + i), z[t]);
    }
  } else {
    V input[kCount + kWidth - 1];
    HWY_UNROLL(8)
    for (int t = 0; t < kCount + kWidth - 1; ++t) input[t] = lanes.Load(d, x[t] + i);
    HWY_UNROLL(4)
    for (int j = 0; j < kWidth; ++j) {
      const V w = lanes.Load(d, c.weight + j * c.channels + i);
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) z[t] = hn::MulAdd(w, input[t + j], z[t]);
    }
  }
}

// The row that a token is the first to read, or the last there is.
HWY_INLINE const float* NextRow(const ConvTokens& c, int64_t token) {
  return c.x[HWY_MIN(token, c.tokens - 1) + c.width - 1];
}

template <int kCount, int kWidth, bool kSilu>
void ConvBlock(const ConvTokens& c, int64_t token, float* y, int64_t y_stride) {
  const D d;
  // Local copies of the pointers: the stores to y could change the array.
  constexpr int kRows = kCount + (kWidth == 0 ? 0 : kWidth - 1);
  const float* rows[kRows];
  for (int t = 0; t < kRows; ++t) rows[t] = c.x[token + t];
  const float* const* x = kWidth == 0 ? c.x + token : rows;
  const float* next[kCount];
  for (int t = 0; t < kCount; ++t) next[t] = NextRow(c, token + kCount + t);
  ForVectors(d, c.channels, [&](int64_t i, auto lanes) HWY_ATTR {
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) hwy::Prefetch(next[t] + i);
    V z[kCount];
    Convolve<kCount, kWidth>(d, c, x, i, lanes, z);
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) {
      lanes.Output(kSilu ? math::silu(d, z[t]) : z[t], d, y + t * y_stride + i, c.stream);
    }
  });
}

template <int kWidth, bool kSilu>
void ConvAll(const ConvTokens& c, float* y, int64_t y_stride) {
  int64_t t = 0;
  for (; t + kTokens <= c.tokens; t += kTokens) {
    ConvBlock<kTokens, kWidth, kSilu>(c, t, y + t * y_stride, y_stride);
  }
  for (; t < c.tokens; ++t) ConvBlock<1, kWidth, kSilu>(c, t, y + t * y_stride, y_stride);
  if (c.stream) hwy::FlushStream();
}

void Conv(const ConvTokens& c, float* y, int64_t y_stride) {
  switch (c.width) {
    case 2:
      return c.silu ? ConvAll<2, true>(c, y, y_stride) : ConvAll<2, false>(c, y, y_stride);
    case 3:
      return c.silu ? ConvAll<3, true>(c, y, y_stride) : ConvAll<3, false>(c, y, y_stride);
    case 4:
      return c.silu ? ConvAll<4, true>(c, y, y_stride) : ConvAll<4, false>(c, y, y_stride);
    default:
      return c.silu ? ConvAll<0, true>(c, y, y_stride) : ConvAll<0, false>(c, y, y_stride);
  }
}

template <int kCount, bool kSilu>
HWY_INLINE void GradientBlock(const ConvTokens& c, int64_t token, const float* const* dy, float* dz,
                              float* sums) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const float* const* x = c.x + token;
  const float *next_x[kCount], *next_dy[kCount];
  for (int t = 0; t < kCount; ++t) {
    next_x[t] = NextRow(c, token + kCount + t);
    next_dy[t] = dy[HWY_MIN(token + kCount + t, c.tokens - 1)];
  }
  ForVectors(d, c.channels, [&](int64_t i, auto lanes) HWY_ATTR {
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) {
      hwy::Prefetch(next_x[t] + i);
      hwy::Prefetch(next_dy[t] + i);
    }
    V g[kCount];
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) g[t] = lanes.Load(d, dy[token + t] + i);
    if constexpr (kSilu) {
      V z[kCount];
      Convolve<kCount, 0>(d, c, x, i, lanes, z);
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) {
        // silu'(z) = s + z s (1 - s)
        const V s = math::sigmoid(d, z[t]);
        g[t] = hn::Mul(g[t], hn::MulAdd(hn::Mul(z[t], s), hn::Sub(one, s), s));
        lanes.Store(g[t], d, dz + (token + t) * c.channels + i);
      }
    }
    if (sums != nullptr) {
      for (int64_t j = 0; j < c.width; ++j) {
        V sum = lanes.Load(d, sums + j * c.channels + i);
        HWY_UNROLL(4)
        for (int t = 0; t < kCount; ++t) sum = hn::MulAdd(g[t], lanes.Load(d, x[t + j] + i), sum);
        lanes.Store(sum, d, sums + j * c.channels + i);
      }
      V sum = lanes.Load(d, sums + c.width * c.channels + i);
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) sum = hn::Add(sum, g[t]);
      lanes.Store(sum, d, sums + c.width * c.channels + i);
    }
  });
}

template <bool kSilu>
void GradientAll(const ConvTokens& c, const float* const* dy, float* dz, float* sums) {
  int64_t t = 0;
  for (; t + kTokens <= c.tokens; t += kTokens) GradientBlock<kTokens, kSilu>(c, t, dy, dz, sums);
  for (; t < c.tokens; ++t) GradientBlock<1, kSilu>(c, t, dy, dz, sums);
}

void ConvGradients(const ConvTokens& c, const float* const* dy, float* dz, float* sums) {
  c.silu ? GradientAll<true>(c, dy, dz, sums) : GradientAll<false>(c, dy, dz, sums);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Conv);
HWY_EXPORT(ConvGradients);

void conv_tokens(Isa isa, const ConvTokens& conv, float* y, std::int64_t y_stride) {
  OUZEL_DISPATCH(isa, Conv)(conv, y, y_stride);
}
void conv_gradients(Isa isa, const ConvTokens& conv, const float* const* dy, float* dz,
                    float* sums) {
  OUZEL_DISPATCH(isa, ConvGradients)(conv, dy, dz, sums);
}

}  // namespace ouzel
#endif
