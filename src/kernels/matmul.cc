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

// Accumulators that fit beside operands: 14 x 2 vectors, a row of B and a broadcast of A take 31 of
// the 32 registers of AVX-512; 3 x 4, a column of A and a vector of B all 16 of the others. 3 x 4
// loads 7 times for 12 multiply-adds, 6 x 2 would 8 times: where another thread shares the core,
// the number of instructions is the limit.
constexpr int kAccumulators = kLanes == 16 ? 28 : 12;
constexpr int kFullRows = kLanes == 16 ? 14 : 3;
// Rows of a packed tile, and the floats that hold them.
constexpr int kTileRows = kLanes == 16 ? 14 : 6;
constexpr int kTileWidth = (kTileRows + kLanes - 1) / kLanes * kLanes;
// Inner indices that the compiler unrolls.
constexpr int kUnroll = kLanes == 16 ? 1 : 4;
// Of the next panel of B, what is fetched into the second-level cache for every kFetchInner inner
// indices of a tile: all of it while the first 16 of 32 tiles pass.
constexpr int64_t kFetchFloats = kPanelWidth;

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

template <TileLayout kLayout>
constexpr int64_t kRowStep = kLayout == TileLayout::kRowMajor ? kTileRowStride : 1;

template <int kRows, int kVectors, TileLayout kLayout>
HWY_INLINE void Multiply(const RowTile& t, const float* HWY_RESTRICT b, float* HWY_RESTRICT c,
                         int64_t columns) {
  const D d;
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
    if (t.next_b != nullptr) {
      const float* line = t.next_b + begin / kFetchInner * kFetchFloats;
      for (int64_t i = 0; i < kFetchFloats; i += 16) __builtin_prefetch(line + i, 0, 2);
    }
    if constexpr (kLayout == TileLayout::kRowMajor) {
      if (t.fetch != nullptr) t.fetch->advance();
    } else {
      if (t.pack != nullptr) PackSome(*t.pack, t.pack->rate);
    }
    const auto add_product = [&](int64_t k) HWY_ATTR {
      const float* row = b + k * kPanelWidth;
      const float* column = a + k * kInnerStep;
      if constexpr (kRows < kVectors) {
        V x[kRows];
        HWY_UNROLL(16)
        for (int r = 0; r < kRows; ++r) x[r] = hn::Set(d, column[r * kRowStep<kLayout>]);
        HWY_UNROLL(16)
        for (int v = 0; v < kVectors; ++v) {
          const V y =
              hn::Load(d, row + v / kPanelVectors * panel_stride + v % kPanelVectors * kLanes);
          HWY_UNROLL(16)
          for (int r = 0; r < kRows; ++r) acc[r][v] = hn::MulAdd(x[r], y, acc[r][v]);
        }
      } else {
        V y[kVectors];
        HWY_UNROLL(16)
        for (int v = 0; v < kVectors; ++v) {
          y[v] = hn::Load(d, row + v / kPanelVectors * panel_stride + v % kPanelVectors * kLanes);
        }
        HWY_UNROLL(16)
        for (int r = 0; r < kRows; ++r) {
          const V x = hn::Set(d, column[r * kRowStep<kLayout>]);
          HWY_UNROLL(16)
          for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(x, y[v], acc[r][v]);
        }
      }
    };
    const int64_t count = std::min(kFetchInner, t.inner - begin);
    if (count == kFetchInner) {
      HWY_UNROLL(kUnroll)
      for (int64_t k = 0; k < kFetchInner; ++k) add_product(k);
    } else {
      for (int64_t k = 0; k < count; ++k) add_product(k);
    }
    a += count * kInnerStep;
    b += count * kPanelWidth;
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
    tile.b = t.b + column / kPanelWidth * t.panel_stride;
    tile.c = t.c + column;
    const int64_t tile_floats = (t.inner + kFetchInner - 1) / kFetchInner * kFetchFloats;
    const int64_t next_floats = column + kPanelWidth < t.columns ? t.inner * kPanelWidth : 0;
    for (int64_t row = 0; row < t.rows; row += kFullRows) {
      tile.rows = std::min<int64_t>(kFullRows, t.rows - row);
      const int64_t fetched = row / kFullRows * tile_floats;
      tile.next_b = fetched < next_floats ? tile.b + t.panel_stride + fetched : nullptr;
      tile.a = t.a + row / kTileRows * t.tile_stride + row % kTileRows * kRowStep<kLayout>;
      MultiplyAnyRows<kLayout>(tile, rows);
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
  shape.rows = kTileRows;
  shape.width = kTileWidth;
  shape.weight_rows = shape.weight_columns = 384;
  if constexpr (kLanes < 16) {
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
