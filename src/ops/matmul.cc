#include "src/ops/matmul.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/matmul.h"

namespace ouzel {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Columns of C that one task passes for each tile of A: their panels of kTileInner, 768 KiB, stay
// in the second-level cache from task to task.
constexpr std::int64_t kTaskColumns = 384;
// Columns of a task when there are few rows and the panels are read once, from memory.
constexpr std::int64_t kFewRowsColumns = 256;
// Tiles of a task. Small enough that 4,096 rows give every thread many tasks.
constexpr std::int64_t kTaskTiles = 4;
// Columns of a task of the weight gradient, whose tasks are one tile high.
constexpr std::int64_t kWeightColumns = 192;
// Rows of a matrix that one task packs.
constexpr std::int64_t kPackRows = 16;

void check(bool agrees, const char* op, const char* what, std::int64_t expected,
           std::int64_t found) {
  if (agrees) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: {} should be {}, not {}", op, what, expected, found));
}

// The inner dimension in equal blocks of at most kTileInner, multiples of 16.
std::int64_t inner_block(std::int64_t inner) {
  if (inner <= kTileInner) return inner;
  const std::int64_t blocks = ceil_div(inner, kTileInner);
  return ceil_div(ceil_div(inner, blocks), 16) * 16;
}

// C [M, N] = A [M, inner] B, from C instead of 0 if accumulate.
void multiply_rows(Context& context, View<const float, 2> a, const float* panels, View<float, 2> c,
                   bool accumulate) {
  const std::int64_t rows = a.extent[0], inner = a.extent[1], columns = c.extent[1];
  if (rows == 0 || columns == 0) return;
  Context::Impl& impl = context.impl();
  const Isa isa = context.isa();
  const std::int64_t tile = tile_rows(isa), block = inner_block(inner);
  const std::int64_t task_rows = kTaskTiles * tile;
  // With few rows the panels are read once: a task takes its columns over the whole inner
  // dimension. With many, each inner block is a round of its own, so that its panels are reused
  // from cache.
  const bool few = rows <= task_rows;
  const std::int64_t task_columns = few ? kFewRowsColumns : kTaskColumns;
  const std::int64_t row_tasks = ceil_div(rows, task_rows);
  const std::int64_t column_tasks = ceil_div(columns, task_columns);
  const std::int64_t round_inner = few ? inner : block;
  const auto tile_floats = static_cast<std::size_t>(tile * kTileRowStride);
  impl.reserve(Scratch::rounded(tile_floats * sizeof(float)));

  std::int64_t begin = 0;
  do {  // once at least: an inner dimension of 0 gives zeros
    const std::int64_t end = std::min(begin + round_inner, inner);
    impl.run(row_tasks * column_tasks, [&](std::int64_t task, Scratch& scratch) {
      float* packed = scratch.take<float>(static_cast<std::int64_t>(tile_floats));
      const std::int64_t column = task / row_tasks * task_columns;
      const std::int64_t row_begin = task % row_tasks * task_rows;
      const std::int64_t row_end = std::min(row_begin + task_rows, rows);
      RowTile t;
      t.panel_stride = inner * kPanelWidth;
      t.columns = std::min(task_columns, columns - column);
      t.c_stride = c.stride[0];
      std::int64_t k = begin;
      do {
        t.inner = std::min(block, end - k);
        t.b = panels + column / kPanelWidth * t.panel_stride + k * kPanelWidth;
        t.sum = accumulate || k != 0 ? TileSum::kContinue : TileSum::kAssign;
        for (std::int64_t row = row_begin; row < row_end; row += tile) {
          t.rows = std::min(tile, row_end - row);
          if (t.rows == 1) {
            t.a = a(row, k);
          } else {
            for (std::int64_t r = 0; r < t.rows; ++r) {
              std::memcpy(packed + r * kTileRowStride, a(row + r, k),
                          static_cast<std::size_t>(t.inner) * sizeof(float));
            }
            t.a = packed;
          }
          // The next tile: of this task, or the first of the one that this thread likely takes
          // next.
          std::int64_t next = row + tile;
          if (next >= row_end) next += (context.threads() - 1) * task_rows;
          t.next_rows = few ? 0 : std::clamp<std::int64_t>(rows - next, 0, tile);
          t.next = t.next_rows > 0 ? a(next, k) : nullptr;
          t.next_stride = a.stride[0];
          t.c = c(row, column);
          multiply_tile(isa, TileLayout::kRowMajor, t);
        }
        k += block;
      } while (k < end);
    });
    begin = end;
  } while (begin < inner);
}

}  // namespace

std::size_t PackedMatrix::bytes(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(ceil_div(n, kPanelWidth) * kPanelWidth * k) * sizeof(float);
}

void PackedMatrix::pack(Context& context, View<const float, 2> w) {
  n_ = w.extent[0];
  k_ = w.extent[1];
  if (memory_.bytes() < bytes(n_, k_)) {
    memory_ = Buffer();
    memory_ = Buffer(bytes(n_, k_));
  }
  float* panels = memory_.f32();
  context.impl().run(ceil_div(n_, kPanelWidth), [&](std::int64_t panel, Scratch&) {
    const std::int64_t row = panel * kPanelWidth;
    pack_panel_transposed(w(row), w.stride[0], k_, std::min(kPanelWidth, n_ - row),
                          panels + row * k_);
  });
}

void linear(Context& context, View<const float, 2> x, const PackedMatrix& w, View<float, 2> y,
            bool accumulate) {
  check(x.extent[1] == w.inputs(), "linear", "the columns of x", w.inputs(), x.extent[1]);
  check(y.extent[0] == x.extent[0], "linear", "the rows of y", x.extent[0], y.extent[0]);
  check(y.extent[1] == w.outputs(), "linear", "the columns of y", w.outputs(), y.extent[1]);
  multiply_rows(context, x, w.panels(), y, accumulate);
}

void linear_backward_input(Context& context, View<const float, 2> dy, View<const float, 2> w,
                           View<float, 2> dx, bool accumulate) {
  const char* op = "linear_backward_input";
  check(dy.extent[1] == w.extent[0], op, "the columns of dy", w.extent[0], dy.extent[1]);
  check(dx.extent[0] == dy.extent[0], op, "the rows of dx", dy.extent[0], dx.extent[0]);
  check(dx.extent[1] == w.extent[1], op, "the columns of dx", w.extent[1], dx.extent[1]);
  if (dx.size() == 0) return;
  const std::int64_t inner = w.extent[0], columns = w.extent[1];
  Context::Impl& impl = context.impl();
  const std::int64_t count = ceil_div(columns, kPanelWidth);
  float* panels = impl.shared<float>(count * kPanelWidth * inner);
  const Isa isa = context.isa();
  impl.run(ceil_div(inner, kPackRows), [&](std::int64_t task, Scratch&) {
    const std::int64_t end = std::min((task + 1) * kPackRows, inner);
    for (std::int64_t k = task * kPackRows; k < end; ++k) {
      pack_row(isa, w(k), columns, kPanelWidth, kPanelWidth, panels + k * kPanelWidth,
               inner * kPanelWidth);
    }
  });
  multiply_rows(context, dy, panels, dx, accumulate);
}

void linear_backward_weight(Context& context, View<const float, 2> dy, View<const float, 2> x,
                            View<float, 2> dw) {
  const char* op = "linear_backward_weight";
  check(x.extent[0] == dy.extent[0], op, "the rows of x", dy.extent[0], x.extent[0]);
  check(dw.extent[0] == dy.extent[1], op, "the rows of dw", dy.extent[1], dw.extent[0]);
  check(dw.extent[1] == x.extent[1], op, "the columns of dw", x.extent[1], dw.extent[1]);
  const std::int64_t tokens = x.extent[0], rows = dw.extent[0], columns = dw.extent[1];
  if (rows == 0 || columns == 0) return;
  Context::Impl& impl = context.impl();
  const Isa isa = context.isa();
  const std::int64_t tile = tile_rows(isa);
  const std::int64_t tiles = ceil_div(rows, tile), panels = ceil_div(columns, kPanelWidth);
  const std::int64_t column_tasks = ceil_div(columns, kWeightColumns);
  // Blocks of kTileInner tokens: dy and x are packed, then every tile of dw takes the block's sum.
  float* a = impl.shared<float>((tiles * kTileMaxRows + panels * kPanelWidth) * kTileInner);
  float* b = a + tiles * kTileMaxRows * kTileInner;
  for (std::int64_t begin = 0; begin < tokens; begin += kTileInner) {
    const std::int64_t inner = std::min(kTileInner, tokens - begin);
    impl.run(ceil_div(inner, kPackRows), [&](std::int64_t task, Scratch&) {
      const std::int64_t end = std::min((task + 1) * kPackRows, inner);
      for (std::int64_t k = task * kPackRows; k < end; ++k) {
        pack_row(isa, x(begin + k), columns, kPanelWidth, kPanelWidth, b + k * kPanelWidth,
                 kTileInner * kPanelWidth);
        pack_row(isa, dy(begin + k), rows, tile, kTileMaxRows, a + k * kTileMaxRows,
                 kTileInner * kTileMaxRows);
      }
    });
    impl.run(tiles * column_tasks, [&](std::int64_t task, Scratch&) {
      const std::int64_t column = task / tiles * kWeightColumns, row = task % tiles * tile;
      RowTile t;
      t.a = a + task % tiles * kTileMaxRows * kTileInner;
      t.rows = std::min(tile, rows - row);
      t.inner = inner;
      t.panel_stride = kTileInner * kPanelWidth;
      t.b = b + column / kPanelWidth * t.panel_stride;
      t.columns = std::min(kWeightColumns, columns - column);
      t.c = dw(row, column);
      t.c_stride = dw.stride[0];
      t.sum = TileSum::kAdd;
      multiply_tile(isa, TileLayout::kInnerMajor, t);
    });
  }
}

}  // namespace ouzel
