// The register tile: every element of C is one chain of multiply-adds over k in order, so neither
// the shape of the tile nor its neighbours change a bit of it.
#include "src/kernels/matmul.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/matmul.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/cache_control.h"
#include "src/kernels/partial-inl.h"

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
constexpr int kTileWidth = (kFullRows + kLanes - 1) / kLanes * kLanes;

// Few rows take more panels at once: enough chains to cover the latency of the multiply-add, and
// several streams in flight where memory is the limit.
constexpr int vectors_for(int rows) {
  int vectors = 2;
  while (vectors < 4 * kPanelVectors && 2 * vectors * rows <= kAccumulators) vectors *= 2;
  return std::max(vectors, std::min(kPanelVectors, 2));
}

template <int kWidth>
HWY_INLINE void PackPieces(PanelPack& pack, int64_t count) {
  const D d;
  for (; count > 0 && pack.rows > 0; --count) {
    const float* from = pack.row + pack.column;
    const int64_t left = pack.columns - pack.column;
    HWY_UNROLL(4)
    for (int i = 0; i < kWidth; i += kLanes) {
      if (i % 16 == 0) hwy::Prefetch(from + pack.stride + i);
      hn::Store(load_first(d, from + i, left - i), d, pack.piece + i);
    }
    pack.column += pack.step;
    pack.piece += pack.to_step;
    if (pack.column >= pack.columns) {
      pack.column = 0;
      pack.row += pack.stride;
      pack.to += kWidth;
      pack.piece = pack.to;
      --pack.rows;
    }
  }
}

// The width is a constant in the copies: as a variable they become calls of memcpy, three times as
// slow.
HWY_INLINE void PackSome(PanelPack& pack, int64_t count) {
  if (pack.width == kPanelWidth) {
    PackPieces<kPanelWidth>(pack, count);
  } else {
    PackPieces<kTileWidth>(pack, count);
  }
}

template <int kRows, int kVectors, TileLayout kLayout>
HWY_INLINE void Multiply(const RowTile& t, const float* HWY_RESTRICT b, float* HWY_RESTRICT c,
                         int64_t columns) {
  const D d;
  constexpr int64_t kRowStep = kLayout == TileLayout::kRowMajor ? kTileRowStride : 1;
  constexpr int64_t kInnerStep = kLayout == TileLayout::kRowMajor ? 1 : kTileWidth;
  const int64_t c_stride = t.c_stride;
  const TileSum sum = t.sum;
  const bool whole = columns >= kVectors * kLanes;
  V acc[kRows][kVectors];
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < kVectors; ++v) {
      const float* from = c + r * c_stride + v * kLanes;
      if (sum != TileSum::kContinue) {
        acc[r][v] = hn::Zero(d);
      } else if (whole) {
        acc[r][v] = hn::LoadU(d, from);
      } else {
        acc[r][v] = load_first(d, from, columns - v * kLanes);
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
    if constexpr (kLayout == TileLayout::kRowMajor) {
      if (t.fetch != nullptr) t.fetch->advance();
    } else {
      if (t.pack != nullptr) PackSome(*t.pack, t.pack->rate);
    }
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
        if (sum == TileSum::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, to), acc[r][v]);
        hn::StoreU(acc[r][v], d, to);
      } else {
        const int64_t left = columns - v * kLanes;
        if (sum == TileSum::kAdd) acc[r][v] = hn::Add(load_first(d, to, left), acc[r][v]);
        store_first(d, acc[r][v], to, left);
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

template <TileLayout kLayout>
void MultiplyTilesOf(const RowTile& t) {
  constexpr std::make_integer_sequence<int, kFullRows> rows;
  if (t.rows <= kFullRows) {
    MultiplyAnyRows<kLayout>(t, rows);
    return;
  }
  RowTile tile = t;
  for (int64_t column = 0; column < t.columns; column += kPanelWidth) {
    tile.columns = std::min(kPanelWidth, t.columns - column);
    tile.a = t.a;
    tile.b = t.b + column / kPanelWidth * t.panel_stride;
    tile.c = t.c + column;
    for (int64_t row = 0; row < t.rows; row += kFullRows) {
      tile.rows = std::min<int64_t>(kFullRows, t.rows - row);
      MultiplyAnyRows<kLayout>(tile, rows);
      tile.a += t.tile_stride;
      tile.c += kFullRows * t.c_stride;
    }
  }
}

void MultiplyTiles(TileLayout layout, const RowTile& t) {
  if (layout == TileLayout::kRowMajor) {
    MultiplyTilesOf<TileLayout::kRowMajor>(t);
  } else {
    MultiplyTilesOf<TileLayout::kInnerMajor>(t);
  }
}

void PackRows(PanelPack& pack) { PackSome(pack, std::numeric_limits<int64_t>::max()); }

TileShape Shape() {
  TileShape shape;
  shape.rows = kFullRows;
  shape.width = kTileWidth;
  shape.weight_rows = shape.weight_columns = 384;
  if constexpr (kFullRows < 14) {
    shape.inner = 192;
    shape.group = 16;
  }
  return shape;
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(MultiplyTiles);
HWY_EXPORT(Shape);
HWY_EXPORT(PackRows);

TileShape tile_shape(Isa isa) { return OUZEL_DISPATCH(isa, Shape)(); }
void multiply_tiles(Isa isa, TileLayout layout, const RowTile& tiles) {
  OUZEL_DISPATCH(isa, MultiplyTiles)(layout, tiles);
}

void pack_panel_transposed(const float* w, std::int64_t stride, std::int64_t inner,
                           std::int64_t columns, float* panel) {
  for (std::int64_t k = 0; k < inner; ++k) {
    float* to = panel + k * kPanelWidth;
    for (std::int64_t j = 0; j < columns; ++j) to[j] = w[j * stride + k];
    std::fill(to + columns, to + kPanelWidth, 0.0f);
  }
}

void pack_rows(Isa isa, PanelPack& pack) { OUZEL_DISPATCH(isa, PackRows)(pack); }

}  // namespace ouzel
#endif
