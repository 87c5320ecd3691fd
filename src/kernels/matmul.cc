// The register tile: every element of C is one chain of multiply-adds over k in order, so neither
// the shape of the tile nor its neighbours change a bit of it.
#include "src/kernels/matmul.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/matmul.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int kPanelVectors = static_cast<int>(kPanelWidth) / kLanes;

// Accumulators that fit beside the row of B and the broadcast of A: 28 + 2 + 1 of 32 registers of
// AVX-512, 12 + 2 + 1 of 16. The full tile is two vectors wide: 14 x 2 loads 16 times per 28
// multiply-adds, 6 x 2 8 times per 12, below the two loads a cycle that the machines have.
constexpr int kAccumulators = kLanes == 16 ? 28 : 12;
constexpr int kFullRows = kAccumulators / 2;
static_assert(kFullRows <= kTileMaxRows);

// Few rows take more panels at once: enough chains to cover the latency of the multiply-add, and
// several streams in flight where memory is the limit.
constexpr int vectors_for(int rows) {
  int vectors = 2;
  while (vectors < 4 * kPanelVectors && 2 * vectors * rows <= kAccumulators) vectors *= 2;
  return std::max(vectors, std::min(kPanelVectors, 2));
}

HWY_INLINE auto first_lanes(int64_t count) {
  return hn::FirstN(D(), static_cast<size_t>(std::clamp<int64_t>(count, 0, kLanes)));
}

template <int kRows, int kVectors, TileLayout kLayout>
HWY_INLINE void Multiply(const RowTile& t, const float* HWY_RESTRICT b, float* HWY_RESTRICT c,
                         int64_t columns) {
  const D d;
  constexpr int64_t kRowStep = kLayout == TileLayout::kRowMajor ? kTileRowStride : 1;
  constexpr int64_t kInnerStep = kLayout == TileLayout::kRowMajor ? 1 : kTileMaxRows;
  const int64_t c_stride = t.c_stride;
  const bool whole = columns >= kVectors * kLanes;
  V acc[kRows][kVectors];
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < kVectors; ++v) {
      const float* from = c + r * c_stride + v * kLanes;
      if (t.sum != TileSum::kContinue) {
        acc[r][v] = hn::Zero(d);
      } else if (whole) {
        acc[r][v] = hn::LoadU(d, from);
      } else {
        acc[r][v] = hn::MaskedLoad(first_lanes(columns - v * kLanes), d, from);
      }
    }
  }
  const float* HWY_RESTRICT a = t.a;
  const int64_t panel_stride = t.panel_stride;
  for (int64_t begin = 0; begin < t.inner; begin += kFetchInner) {
    // The lines of C, one row after the other: its stores would wait for them.
    if (begin / kFetchInner < kRows) {
      const float* row = c + begin / kFetchInner * c_stride;
      for (int v = 0; v < kVectors * kLanes; v += 16) hwy::Prefetch(row + v);
    }
    if (t.ahead != nullptr) t.ahead->advance();
    const int64_t count = std::min(kFetchInner, t.inner - begin);
    for (int64_t k = 0; k < count; ++k) {
      V row[kVectors];
      HWY_UNROLL(16)
      for (int v = 0; v < kVectors; ++v) {
        row[v] = hn::Load(d, b + v / kPanelVectors * panel_stride + v % kPanelVectors * kLanes);
      }
      HWY_UNROLL(16)
      for (int r = 0; r < kRows; ++r) {
        const V x = hn::Set(d, a[r * kRowStep]);
        HWY_UNROLL(16)
        for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(x, row[v], acc[r][v]);
      }
      a += kInnerStep;
      b += kPanelWidth;
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * c_stride + v * kLanes;
      if (whole) {
        if (t.sum == TileSum::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, to), acc[r][v]);
        hn::StoreU(acc[r][v], d, to);
      } else {
        const auto mask = first_lanes(columns - v * kLanes);
        if (t.sum == TileSum::kAdd) acc[r][v] = hn::Add(hn::MaskedLoad(mask, d, to), acc[r][v]);
        hn::BlendedStore(acc[r][v], mask, d, to);
      }
    }
  }
}

template <int kRows, TileLayout kLayout>
void MultiplyRows(const RowTile& t) {
  constexpr int kVectors = vectors_for(kRows);
  constexpr int64_t kStep = kVectors * kLanes;
  int64_t column = 0;
  // Steps over several panels stop where the panels do.
  constexpr int64_t kPadded = std::min<int64_t>(kStep, kPanelWidth);
  for (; column + (kStep - kPadded) < t.columns; column += kStep) {
    const float* b = t.b + column / kPanelWidth * t.panel_stride + column % kPanelWidth;
    Multiply<kRows, kVectors, kLayout>(t, b, t.c + column, t.columns - column);
  }
  if constexpr (kStep > kPanelWidth) {
    for (; column < t.columns; column += kPanelWidth) {
      const float* b = t.b + column / kPanelWidth * t.panel_stride;
      Multiply<kRows, kPanelVectors, kLayout>(t, b, t.c + column, t.columns - column);
    }
  }
}

template <TileLayout kLayout, int... kRowsMinusOne>
void MultiplyAnyRows(const RowTile& t, std::integer_sequence<int, kRowsMinusOne...>) {
  using Function = void (*)(const RowTile&);
  static constexpr Function kTable[] = {MultiplyRows<kRowsMinusOne + 1, kLayout>...};
  kTable[t.rows - 1](t);
}

void MultiplyTile(TileLayout layout, const RowTile& t) {
  constexpr std::make_integer_sequence<int, kFullRows> rows;
  if (layout == TileLayout::kRowMajor) {
    MultiplyAnyRows<TileLayout::kRowMajor>(t, rows);
  } else {
    MultiplyAnyRows<TileLayout::kInnerMajor>(t, rows);
  }
}

// The width is a constant here: as a variable the copies become calls of memcpy, three times as
// slow.
template <int kWidth>
void PackPieces(const float* HWY_RESTRICT row, int64_t columns, int64_t step,
                float* HWY_RESTRICT to, int64_t to_stride) {
  const D d;
  for (int64_t column = 0; column < columns; column += step, to += to_stride) {
    const float* from = row + column;
    const int64_t left = columns - column;
    HWY_UNROLL(4)
    for (int i = 0; i < kWidth; i += kLanes) {
      const bool whole = left >= i + kLanes;
      hn::Store(whole ? hn::LoadU(d, from + i) : hn::MaskedLoad(first_lanes(left - i), d, from + i),
                d, to + i);
    }
  }
}

void PackRow(const float* row, int64_t columns, int64_t step, int64_t width, float* to,
             int64_t to_stride) {
  if (width == kPanelWidth) {
    PackPieces<kPanelWidth>(row, columns, step, to, to_stride);
  } else {
    PackPieces<kTileMaxRows>(row, columns, step, to, to_stride);
  }
}

int TileRows() { return kFullRows; }

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(MultiplyTile);
HWY_EXPORT(TileRows);
HWY_EXPORT(PackRow);

int tile_rows(Isa isa) { return OUZEL_DISPATCH(isa, TileRows)(); }
void multiply_tile(Isa isa, TileLayout layout, const RowTile& tile) {
  OUZEL_DISPATCH(isa, MultiplyTile)(layout, tile);
}

void pack_panel_transposed(const float* w, std::int64_t stride, std::int64_t inner,
                           std::int64_t columns, float* panel) {
  for (std::int64_t k = 0; k < inner; ++k) {
    float* to = panel + k * kPanelWidth;
    for (std::int64_t j = 0; j < columns; ++j) to[j] = w[j * stride + k];
    std::fill(to + columns, to + kPanelWidth, 0.0f);
  }
}

void pack_row(Isa isa, const float* row, std::int64_t columns, std::int64_t step,
              std::int64_t width, float* to, std::int64_t to_stride) {
  OUZEL_DISPATCH(isa, PackRow)(row, columns, step, width, to, to_stride);
}

}  // namespace ouzel
#endif
