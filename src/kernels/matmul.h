// Kernels of the tile GEMM: C = A B in register tiles of kRows x 32 columns. B stands in panels of
// 32 columns, [panel][k][32], zero beyond its last column; A in a tile of a few rows, or a single
// row.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

inline constexpr std::int64_t kPanelWidth = 32;
// The inner indices of one packed tile of A: 14 rows of 512 are 28 KiB, which stay in the
// first-level cache while the panels of B stream past from the second.
inline constexpr std::int64_t kTileInner = 512;
// Row stride of a packed row-major tile: 33 cache lines, so that its rows fall into different sets.
inline constexpr std::int64_t kTileRowStride = kTileInner + 16;
enum class TileLayout {
  kRowMajor,    // A(i, k) = a[i * kTileRowStride + k]
  kInnerMajor,  // A(i, k) = a[k * tile_width(isa) + i]
};

// Where the chain of multiply-adds of an element starts and what becomes of its sum s.
enum class TileSum {
  kAssign,    // from 0; C = s
  kContinue,  // from C; C = s
  kAdd,       // from 0; C += s
};

// Rows of a matrix that will be packed next. They are fetched into the second-level cache while
// tiles are computed, `rate` cache lines for every kFetchInner inner indices.
struct FetchAhead {
  const float* row = nullptr;
  std::int64_t rows = 0, stride = 0, columns = 0;
  std::int64_t rate = 0;
  std::int64_t column = 0;  // where in the row it stands

  void advance() {
    for (std::int64_t i = 0; i < rate && rows > 0; ++i) {
      __builtin_prefetch(row + column, 0, 2);
      column += 16;
      if (column >= columns) {
        column = 0;
        row += stride;
        --rows;
      }
    }
  }
};
inline constexpr std::int64_t kFetchInner = 16;

// Rows of a matrix on their way into panels or inner-major tiles. Piece p of a row, `width` floats
// from column p * step on (zero beyond the row's end), goes to to + p * to_step; the next row's
// pieces follow the pieces of this one. Panels are pieces of step = width = kPanelWidth, tiles of
// step = tile_rows(isa), width = tile_width(isa).
//
// While tiles are computed, `rate` pieces move for every kFetchInner inner indices, and the same
// pieces of the next row are fetched: copy and latency hide behind the arithmetic.
struct PanelPack {
  const float* row = nullptr;
  std::int64_t rows = 0, stride = 0, columns = 0;
  std::int64_t step = 0, width = 0;
  float* to = nullptr;
  std::int64_t to_step = 0;
  std::int64_t rate = 0;
  // Where it stands: the piece's column and place.
  std::int64_t column = 0;
  float* piece = nullptr;
};

// Rows [0, rows) of A times columns [0, columns) of consecutive panels.
struct RowTile {
  const float* a = nullptr;
  std::int64_t rows = 0;  // 1 ... tile_rows(isa)
  std::int64_t inner = 0;
  const float* b = nullptr;
  std::int64_t panel_stride = 0;  // from panel to panel
  std::int64_t columns = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;  // from row to row
  TileSum sum = TileSum::kAssign;
  FetchAhead* fetch = nullptr;  // with kRowMajor
  PanelPack* pack = nullptr;    // with kInnerMajor
};

// Rows of a full tile, and the floats that hold them in an inner-major tile.
int tile_rows(Isa isa);
int tile_width(Isa isa);
void multiply_tile(Isa isa, TileLayout layout, const RowTile& tile);

// Panel of B(k, j) = w[j * stride + k] for `columns` <= 32 columns: rows of w become columns.
void pack_panel_transposed(const float* w, std::int64_t stride, std::int64_t inner,
                           std::int64_t columns, float* panel);
// Packs the rows that are left.
void pack_rows(Isa isa, PanelPack& pack);

}  // namespace ouzel
