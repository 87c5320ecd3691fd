// Some tokens at a time, so that weights and inputs are loaded once for them; every output is the
// same chain of multiply-adds, oldest input first, whatever its neighbours.
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

constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
// Tokens and vectors side by side. Long runs of a row, since those of several rows that are written
// past the caches by turns would wait for each other.
constexpr int kTokens = 2, kVectors = 4;
// Vectors of a cache line. Rows of many channels fall into the same sets of the first-level cache,
// more of them than it has ways: what goes along the tokens uses a whole line before the next
// row's. Single floats (of the fallback) go alone: sixteen side by side would take a minute to
// compile.
constexpr int kLine = kLanes == 1 ? 1 : HWY_MAX(1, 16 / kLanes);

// z of kCount tokens from `x` on. kWidth 0: the width is known at run time only.
template <int kCount, int kWidth, int kOwn, class In, class Lanes>
HWY_INLINE void Convolve(D d, const ConvTokens& c, const In* const* x, int64_t i, Lanes lanes,
                         V (&z)[kCount][kOwn]) {
  OUZEL_UNROLL
  for (int j = 0; j < kOwn; ++j) {
    const V bias = lanes.Load(d, c.bias + i + j * kLanes);
    OUZEL_UNROLL
    for (int t = 0; t < kCount; ++t) z[t][j] = bias;
  }
  const int64_t width = kWidth == 0 ? c.width : kWidth;
  HWY_UNROLL(4)
  for (int64_t column = 0; column < width; ++column) {
    OUZEL_UNROLL
    for (int j = 0; j < kOwn; ++j) {
      const int64_t at = i + j * kLanes;
      const V w = lanes.Load(d, c.weight + column * c.channels + at);
      OUZEL_UNROLL
      for (int t = 0; t < kCount; ++t) {
        z[t][j] = hn::MulAdd(w, lanes.Load(d, x[t + column] + at), z[t][j]);
      }
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
  ForGroups<kVectors>(d, c.channels, [&](int64_t i, auto lanes, auto vectors) HWY_ATTR {
    constexpr int kOwn = vectors;
    V z[kCount][kOwn];
    Convolve<kCount, kWidth>(d, c, x, i, lanes, z);
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) {
      OUZEL_UNROLL
      for (int j = 0; j < kOwn; ++j) hwy::Prefetch(next[t] + i + j * kLanes);
      if constexpr (kSilu) silus<kOwn>(d, z[t]);
      lanes.Output(z[t], d, y + t * y_stride + i, c.stream);
    }
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

// dz = dy silu'(z) of kCount tokens.
template <int kCount, int kWidth, class In>
void GradientBlock(const ConvTokens& c, int64_t token, const void* const* dy, float* dz) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  constexpr int kRows = kCount + (kWidth == 0 ? 0 : kWidth - 1);
  const In* rows[kRows];
  for (int t = 0; t < kRows; ++t) rows[t] = static_cast<const In*>(c.x[token + t]);
  const In* const* x = kWidth == 0 ? RowsFrom<In>(c.x, token) : rows;
  const In *given[kCount], *next_x[kCount], *next_dy[kCount];
  for (int t = 0; t < kCount; ++t) {
    given[t] = static_cast<const In*>(dy[token + t]);
    next_x[t] = static_cast<const In*>(NextRow(c, token + kCount + t));
    next_dy[t] = static_cast<const In*>(dy[HWY_MIN(token + kCount + t, c.tokens - 1)]);
  }
  ForGroups<kVectors>(d, c.channels, [&](int64_t first, auto lanes, auto vectors) HWY_ATTR {
    constexpr int kOwn = vectors;
    V z[kCount][kOwn];
    Convolve<kCount, kWidth>(d, c, x, first, lanes, z);
    HWY_UNROLL(4)
    for (int t = 0; t < kCount; ++t) {
      V s[kOwn];
      sigmoids<kOwn>(d, z[t], s);
      OUZEL_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int64_t i = first + j * kLanes;
        hwy::Prefetch(next_x[t] + i);
        hwy::Prefetch(next_dy[t] + i);
        // silu'(z) = s + z s (1 - s)
        const V slope = hn::MulAdd(hn::Mul(z[t][j], s[j]), hn::Sub(one, s[j]), s[j]);
        lanes.Store(hn::Mul(lanes.Load(d, given[t] + i), slope), d, dz + t * c.channels + i);
      }
    }
  });
}

template <int kWidth, class In>
void GradientAll(const ConvTokens& c, const void* const* dy, float* dz) {
  int64_t t = 0;
  for (; t + kTokens <= c.tokens; t += kTokens) {
    GradientBlock<kTokens, kWidth, In>(c, t, dy, dz + t * c.channels);
  }
  for (; t < c.tokens; ++t) GradientBlock<1, kWidth, In>(c, t, dy, dz + t * c.channels);
}

template <class In>
void Gradients(const ConvTokens& c, const void* const* dy, float* dz) {
  c.width == 4 ? GradientAll<4, In>(c, dy, dz) : GradientAll<0, In>(c, dy, dz);
}

void ConvGradients(const ConvTokens& c, const void* const* dy, float* dz) {
  if (c.dtype == DType::kBF16) return Gradients<BFloat16>(c, dy, dz);
  if (c.dtype == DType::kF16) return Gradients<Float16>(c, dy, dz);
  Gradients<float>(c, dy, dz);
}

// kColumns of the sums from `column` on, and with the first of them the sum of dz.
template <int kColumns, class In>
void AddColumns(const ConvTokens& c, const void* const* dz, int64_t column, float* sums) {
  const D d;
  ForGroups<kLine>(d, c.channels, [&](int64_t first, auto lanes, auto vectors) HWY_ATTR {
    constexpr int kOwn = vectors;
    V sum[kColumns][kOwn], total[kOwn];
    OUZEL_UNROLL
    for (int j = 0; j < kOwn; ++j) {
      const int64_t i = first + j * kLanes;
      total[j] = lanes.Load(d, sums + c.width * c.channels + i);
      OUZEL_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        sum[k][j] = lanes.Load(d, sums + (column + k) * c.channels + i);
      }
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
      const In* const* x = RowsFrom<In>(c.x, t + column);
      OUZEL_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const int64_t i = first + j * kLanes;
        const V g = lanes.Load(d, RowsFrom<float>(dz, t)[0] + i);
        total[j] = hn::Add(total[j], g);
        OUZEL_UNROLL
        for (int k = 0; k < kColumns; ++k) {
          sum[k][j] = hn::MulAdd(g, lanes.Load(d, x[k] + i), sum[k][j]);
        }
      }
    }
    OUZEL_UNROLL
    for (int j = 0; j < kOwn; ++j) {
      const int64_t i = first + j * kLanes;
      if (column == 0) lanes.Store(total[j], d, sums + c.width * c.channels + i);
      OUZEL_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        lanes.Store(sum[k][j], d, sums + (column + k) * c.channels + i);
      }
    }
  });
}

template <class In>
void AddAll(const ConvTokens& c, const void* const* dz, float* sums) {
  int64_t column = 0;
  for (; column + 4 <= c.width; column += 4) AddColumns<4, In>(c, dz, column, sums);
  for (; column < c.width; ++column) AddColumns<1, In>(c, dz, column, sums);
}

void ConvSums(const ConvTokens& c, const void* const* dz, float* sums) {
  if (c.dtype == DType::kBF16) return AddAll<BFloat16>(c, dz, sums);
  if (c.dtype == DType::kF16) return AddAll<Float16>(c, dz, sums);
  AddAll<float>(c, dz, sums);
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
    if constexpr (kSilu) silus<1>(d, &z);
    hn::StoreU(z, d, y + i);
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
    if constexpr (kSilu) silus<1>(d, &z);
    y[i] = hn::GetLane(z);
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
HWY_EXPORT(ConvSums);
HWY_EXPORT(Step);

void conv_tokens(Isa isa, const ConvTokens& conv, void* y, DType y_type, std::int64_t y_stride) {
  OUZEL_DISPATCH(isa, Conv)(conv, y, y_type, y_stride);
}
void conv_gradients(Isa isa, const ConvTokens& conv, const void* const* dy, float* dz) {
  OUZEL_DISPATCH(isa, ConvGradients)(conv, dy, dz);
}
void conv_sums(Isa isa, const ConvTokens& conv, const void* const* dz, float* sums) {
  OUZEL_DISPATCH(isa, ConvSums)(conv, dz, sums);
}
void conv_step(Isa isa, const ConvStep& step, float* y) { OUZEL_DISPATCH(isa, Step)(step, y); }

}  // namespace ouzel
#endif
