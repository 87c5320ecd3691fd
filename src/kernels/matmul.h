// Kernels of the tile GEMM: C = A B in register tiles of kRows x 32 columns. B stands in panels of
// 32 columns, [panel][k][32], zero beyond its last column; A in a tile of a few rows, or a single
// row.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

inline constexpr std::int64_t kPanelWidth = 32;
// The most inner indices of one packed tile of A.
inline constexpr std::int64_t kTileInner = 512;
// Row stride of a packed row-major tile: 33 cache lines, so that its rows fall into different sets.
inline constexpr std::int64_t kTileRowStride = kTileInner + 16;
enum class TileLayout {
  kRowMajor,    // A(i, k) = a[i * kTileRowStride + k]
  kInnerMajor,  // A(i, k) = a[k * width + i], tile by tile
};

// How an instruction set takes a matrix product.
struct TileShape {
  std::int64_t rows = 0;   // of a full tile
  std::int64_t width = 0;  // the floats that hold them in an inner-major tile
  // Many rows: the inner indices of a block, and the most tiles that pass one panel of B after the
  // other. With 14 rows a tile of A (28 KiB of 512 indices) stays in the first-level cache while
  // the panels of B pass from the second. With 3 rows they would bring two cache lines every 6
  // cycles, more than the second level gives beside other work; so a panel of B (24 KiB of 192
  // indices) stays, and the tiles of A pass, a tenth as many bytes.
  std::int64_t inner = kTileInner;
  std::int64_t group = 1;
  // The weight gradient: the rows and columns of the largest rectangle of one task.
  std::int64_t weight_rows = 0, weight_columns = 0;
};
TileShape tile_shape(Isa isa);

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
// step = rows and width = width of the shape.
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
  std::int64_t tile_stride = 0;  // from tile to tile of A, where rows are more than one tile's
  std::int64_t rows = 0;
  std::int64_t inner = 0;
  const float* b = nullptr;
  std::int64_t panel_stride = 0;  // from panel to panel
  const float* next_b = nullptr;  // lines of the next panel to fetch beside this tile; null: none
  std::int64_t columns = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;  // from row to row
  TileSum sum = TileSum::kAssign;
  FetchAhead* fetch = nullptr;  // with kRowMajor
  PanelPack* pack = nullptr;    // with kInnerMajor
};

void multiply_tiles(Isa isa, TileLayout layout, const RowTile& tiles);

// Panel of B(k, j) = w[j * stride + k] for `columns` <= 32 columns: rows of w become columns.
void pack_panel_transposed(const float* w, std::int64_t stride, std::int64_t inner,
                           std::int64_t columns, float* panel);
// Packs the rows that are left.
void pack_rows(Isa isa, PanelPack& pack);

}  // namespace ouzel
