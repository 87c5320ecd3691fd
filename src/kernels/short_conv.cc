// Four tokens at a time, so that weights and inputs are loaded once for the four; every output is
// the same chain of multiply-adds, oldest input first, whatever its neighbours.
#include "src/kernels/short_conv.h"

#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/short_conv.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/scan-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr int kTokens = 4;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
// Vectors of a cache line. Rows of many channels fall into the same sets of the first-level cache,
// more of them than it has ways: the whole line is used before the next row's.
// Single floats (of the fallback) go alone: sixteen side by side would take a minute to compile.
constexpr int kLine = kLanes == 1 ? 1 : HWY_MAX(1, 16 / kLanes);

// z of kCount tokens from `x` on. kWidth 0: the width is known at run time only.
template <int kCount, int kWidth, class In, class Lanes>
HWY_INLINE void Convolve(D d, const ConvTokens& c, const In* const* x, int64_t i, Lanes lanes,
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

// Rows of inputs, from a token on.
template <class In>
HWY_INLINE const In* const* RowsFrom(const void* const* rows, int64_t token) {
  return reinterpret_cast<const In* const*>(rows + token);
}
// The row that a token is the first to read, or the last there is.
HWY_INLINE const void* NextRow(const ConvTokens& c, int64_t token) {
  return c.x[HWY_MIN(token, c.tokens - 1) + c.width - 1];
}

template <int kCount, int kWidth, bool kSilu, class In, class Out>
void ConvBlock(const ConvTokens& c, int64_t token, Out* y, int64_t y_stride) {
  const D d;
  // Local copies of the pointers: the stores to y could change the array.
  constexpr int kRows = kCount + (kWidth == 0 ? 0 : kWidth - 1);
  const In* rows[kRows];
  for (int t = 0; t < kRows; ++t) rows[t] = static_cast<const In*>(c.x[token + t]);
  const In* const* x = kWidth == 0 ? RowsFrom<In>(c.x, token) : rows;
  const In* next[kCount];
  for (int t = 0; t < kCount; ++t) {
    next[t] = static_cast<const In*>(NextRow(c, token + kCount + t));
  }
  ForGroups<kLine>(d, c.channels, [&](int64_t i, auto lanes, auto vectors) HWY_ATTR {
    constexpr int kVectors = vectors;
    V z[kVectors][kCount], out[kCount][kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      Convolve<kCount, kWidth>(d, c, x, i + j * kLanes, lanes, z[j]);
    }
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) hwy::Prefetch(next[t] + i);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) out[t][j] = kSilu ? math::silu(d, z[j][t]) : z[j][t];
    }
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) lanes.Output(out[t], d, y + t * y_stride + i, c.stream);
  });
}

template <int kWidth, bool kSilu, class In, class Out>
void ConvAll(const ConvTokens& c, Out* y, int64_t y_stride) {
  int64_t t = 0;
  for (; t + kTokens <= c.tokens; t += kTokens) {
    ConvBlock<kTokens, kWidth, kSilu, In>(c, t, y + t * y_stride, y_stride);
  }
  for (; t < c.tokens; ++t) ConvBlock<1, kWidth, kSilu, In>(c, t, y + t * y_stride, y_stride);
  if (c.stream) hwy::FlushStream();
}

template <int kWidth, class In, class Out>
void ConvOfWidth(const ConvTokens& c, Out* y, int64_t y_stride) {
  c.silu ? ConvAll<kWidth, true, In>(c, y, y_stride) : ConvAll<kWidth, false, In>(c, y, y_stride);
}

template <class In, class Out>
void ConvAs(const ConvTokens& c, void* y, int64_t y_stride) {
  Out* to = static_cast<Out*>(y);
  if (c.width == 4) return ConvOfWidth<4, In>(c, to, y_stride);
  if constexpr (std::is_same_v<Out, float>) {
    if (c.width == 2) return ConvOfWidth<2, In>(c, to, y_stride);
    if (c.width == 3) return ConvOfWidth<3, In>(c, to, y_stride);
  }
  ConvOfWidth<0, In>(c, to, y_stride);
}

void Conv(const ConvTokens& c, void* y, DType y_type, int64_t y_stride) {
  if (c.dtype == DType::kBF16) return ConvAs<BFloat16, BFloat16>(c, y, y_stride);
  if (c.dtype == DType::kF16) return ConvAs<Float16, Float16>(c, y, y_stride);
  if (y_type == DType::kBF16) return ConvAs<float, BFloat16>(c, y, y_stride);
  if (y_type == DType::kF16) return ConvAs<float, Float16>(c, y, y_stride);
  ConvAs<float, float>(c, y, y_stride);
}

template <int kCount, int kWidth, bool kSilu, class In>
void GradientBlock(const ConvTokens& c, int64_t token, const void* const* dy, float* dz,
                   float* sums) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  constexpr int kRows = kCount + (kWidth == 0 ? 0 : kWidth - 1);
  const In* rows[kRows];
  for (int t = 0; t < kRows; ++t) rows[t] = static_cast<const In*>(c.x[token + t]);
  const In* const* x = kWidth == 0 ? RowsFrom<In>(c.x, token) : rows;
  const int64_t width = kWidth == 0 ? c.width : kWidth;
  const In *given[kCount], *next_x[kCount], *next_dy[kCount];
  for (int t = 0; t < kCount; ++t) {
    given[t] = static_cast<const In*>(dy[token + t]);
    next_x[t] = static_cast<const In*>(NextRow(c, token + kCount + t));
    next_dy[t] = static_cast<const In*>(dy[HWY_MIN(token + kCount + t, c.tokens - 1)]);
  }
  ForGroups<kLine>(d, c.channels, [&](int64_t first, auto lanes, auto vectors) HWY_ATTR {
    constexpr int kVectors = vectors;
    V z[kVectors][kCount];
    OUZEL_UNROLL
    for (int j = 0; kSilu && j < kVectors; ++j) {
      Convolve<kCount, kWidth>(d, c, x, first + j * kLanes, lanes, z[j]);
    }
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) {
      hwy::Prefetch(next_x[t] + first);
      hwy::Prefetch(next_dy[t] + first);
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const int64_t i = first + j * kLanes;
      V g[kCount];
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) g[t] = lanes.Load(d, given[t] + i);
      if constexpr (kSilu) {
        V s[kCount];
        sigmoids<kCount>(d, z[j], s);
        HWY_UNROLL(4)
        for (int t = 0; t < kCount; ++t) {
          // silu'(z) = s + z s (1 - s)
          g[t] = hn::Mul(g[t], hn::MulAdd(hn::Mul(z[j][t], s[t]), hn::Sub(one, s[t]), s[t]));
          lanes.Store(g[t], d, dz + (token + t) * c.channels + i);
        }
      }
      if (sums == nullptr) continue;
      HWY_UNROLL(4)
      for (int64_t column = 0; column < width; ++column) {
        V sum = lanes.Load(d, sums + column * c.channels + i);
        HWY_UNROLL(4)
        for (int t = 0; t < kCount; ++t)
          sum = hn::MulAdd(g[t], lanes.Load(d, x[t + column] + i), sum);
        lanes.Store(sum, d, sums + column * c.channels + i);
      }
      V sum = lanes.Load(d, sums + c.width * c.channels + i);
      HWY_UNROLL(4)
      for (int t = 0; t < kCount; ++t) sum = hn::Add(sum, g[t]);
      lanes.Store(sum, d, sums + c.width * c.channels + i);
    }
  });
}

template <int kWidth, bool kSilu, class In>
void GradientAll(const ConvTokens& c, const void* const* dy, float* dz, float* sums) {
  int64_t t = 0;
  for (; t + kTokens <= c.tokens; t += kTokens) {
    GradientBlock<kTokens, kWidth, kSilu, In>(c, t, dy, dz, sums);
  }
  for (; t < c.tokens; ++t) GradientBlock<1, kWidth, kSilu, In>(c, t, dy, dz, sums);
}

template <bool kSilu, class In>
void GradientsOfWidth(const ConvTokens& c, const void* const* dy, float* dz, float* sums) {
  c.width == 4 ? GradientAll<4, kSilu, In>(c, dy, dz, sums)
               : GradientAll<0, kSilu, In>(c, dy, dz, sums);
}

template <class In>
void GradientsAs(const ConvTokens& c, const void* const* dy, float* dz, float* sums) {
  c.silu ? GradientsOfWidth<true, In>(c, dy, dz, sums)
         : GradientsOfWidth<false, In>(c, dy, dz, sums);
}

void ConvGradients(const ConvTokens& c, const void* const* dy, float* dz, float* sums) {
  if (c.dtype == DType::kBF16) return GradientsAs<BFloat16>(c, dy, dz, sums);
  if (c.dtype == DType::kF16) return GradientsAs<Float16>(c, dy, dz, sums);
  GradientsAs<float>(c, dy, dz, sums);
}

// Columns of dense rows, [lanes][kColumns].
template <int kColumns>
HWY_INLINE void LoadColumns(D d, const float* rows, V (&x)[kColumns]) {
  if constexpr (kColumns == 1) x[0] = hn::LoadU(d, rows);
  if constexpr (kColumns == 2) hn::LoadInterleaved2(d, rows, x[0], x[1]);
  if constexpr (kColumns == 3) hn::LoadInterleaved3(d, rows, x[0], x[1], x[2]);
  if constexpr (kColumns == 4) hn::LoadInterleaved4(d, rows, x[0], x[1], x[2], x[3]);
}
template <int kColumns>
HWY_INLINE void StoreColumns(D d, const V (&x)[kColumns], float* rows) {
  if constexpr (kColumns == 1) hn::StoreU(x[0], d, rows);
  if constexpr (kColumns == 2) hn::StoreInterleaved2(x[0], x[1], d, rows);
  if constexpr (kColumns == 3) hn::StoreInterleaved3(x[0], x[1], x[2], d, rows);
  if constexpr (kColumns == 4) hn::StoreInterleaved4(x[0], x[1], x[2], x[3], d, rows);
}

// Whole vectors of channels, where rows are dense. Returns how many channels that were.
template <int kWidth, int kColumns, bool kSilu>
int64_t StepVectors(const ConvStep& c, float* y) {
  const D d;
  const int64_t lanes = hn::Lanes(d);
  if (c.weight_row != kWidth || c.weight_column != 1 || c.window_row != kColumns ||
      c.window_column != 1 || (c.bias != nullptr && c.bias_stride != 1)) {
    return 0;
  }
  int64_t i = 0;
  for (; i + lanes <= c.channels; i += lanes) {
    V w[kWidth], window[kColumns];
    LoadColumns(d, c.weight + i * kWidth, w);
    LoadColumns(d, c.window + i * kColumns, window);
    const V x = hn::LoadU(d, c.x + i);
    V z = c.bias != nullptr ? hn::LoadU(d, c.bias + i) : hn::Zero(d);
    HWY_UNROLL(4)
    for (int j = 0; j + 1 < kWidth; ++j) {
      z = hn::MulAdd(w[j], window[kColumns - kWidth + 1 + j], z);
    }
    z = hn::MulAdd(w[kWidth - 1], x, z);
    HWY_UNROLL(4)
    for (int j = 0; j + 1 < kColumns; ++j) window[j] = window[j + 1];
    window[kColumns - 1] = x;
    StoreColumns(d, window, c.window + i * kColumns);
    hn::StoreU(kSilu ? math::silu(d, z) : z, d, y + i);
  }
  return i;
}

template <bool kSilu>
void StepAll(const ConvStep& c, float* y) {
  int64_t i = 0;
  switch (10 * c.width + c.columns) {
    case 21:
      i = StepVectors<2, 1, kSilu>(c, y);
      break;
    case 22:
      i = StepVectors<2, 2, kSilu>(c, y);
      break;
    case 32:
      i = StepVectors<3, 2, kSilu>(c, y);
      break;
    case 33:
      i = StepVectors<3, 3, kSilu>(c, y);
      break;
    case 43:
      i = StepVectors<4, 3, kSilu>(c, y);
      break;
    case 44:
      i = StepVectors<4, 4, kSilu>(c, y);
      break;
    default:
      break;
  }
  const hn::CappedTag<float, 1> d;
  for (; i < c.channels; ++i) {
    const float* w = c.weight + i * c.weight_row;
    float* window = c.window + i * c.window_row;
    const float x = c.x[i];
    auto z = hn::Set(d, c.bias != nullptr ? c.bias[i * c.bias_stride] : 0.0f);
    for (int64_t j = 0; j < c.width; ++j) {
      const int64_t at = c.columns - c.width + 1 + j;
      const float input = at < c.columns ? window[at * c.window_column] : x;
      z = hn::MulAdd(hn::Set(d, w[j * c.weight_column]), hn::Set(d, input), z);
    }
    for (int64_t j = 0; j < c.columns; ++j) {
      window[j * c.window_column] = j + 1 < c.columns ? window[(j + 1) * c.window_column] : x;
    }
    y[i] = hn::GetLane(kSilu ? math::silu(d, z) : z);
  }
}

void Step(const ConvStep& c, float* y) { c.silu ? StepAll<true>(c, y) : StepAll<false>(c, y); }

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Conv);
HWY_EXPORT(ConvGradients);
HWY_EXPORT(Step);

void conv_tokens(Isa isa, const ConvTokens& conv, void* y, DType y_type, std::int64_t y_stride) {
  OUZEL_DISPATCH(isa, Conv)(conv, y, y_type, y_stride);
}
void conv_gradients(Isa isa, const ConvTokens& conv, const void* const* dy, float* dz,
                    float* sums) {
  OUZEL_DISPATCH(isa, ConvGradients)(conv, dy, dz, sums);
}
void conv_step(Isa isa, const ConvStep& step, float* y) { OUZEL_DISPATCH(isa, Step)(step, y); }

}  // namespace ouzel
#endif
