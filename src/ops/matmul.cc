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
// The weight gradient: the largest rectangle of one task, and the tokens of one block. Packed, the
// block is 0.65 MiB; with the rectangle and the next block, still in its rows, it fits the
// second-level cache.
constexpr std::int64_t kWeightRows = 384;
constexpr std::int64_t kWeightColumns = 192;
constexpr std::int64_t kWeightTokens = 256;
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

// Lines to fetch at each of the steps of kFetchInner in `inner` x `columns` multiply-adds per row,
// so that `floats` are there at the end; one line in four more, for rows that begin within a line.
std::int64_t fetch_rate(std::int64_t floats, std::int64_t inner, std::int64_t columns) {
  const std::int64_t steps = ceil_div(inner, kFetchInner) * ceil_div(columns, kPanelWidth);
  return ceil_div(floats * 5, steps * 16 * 4);
}

// A stride between panels or tiles that are written side by side, row by row: multiples of 4 KiB
// would put all of them into one set of the first-level cache (measured: packing takes 4 times as
// long).
std::int64_t padded(std::int64_t stride) { return stride + kPanelWidth; }

// C [M, N] = A [M, inner] B, from C instead of 0 if accumulate.
void multiply_rows(Context& context, View<const float, 2> a, const float* panels,
                   std::int64_t panel_stride, View<float, 2> c, bool accumulate) {
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
      t.panel_stride = panel_stride;
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
          const std::int64_t next =
              row + tile < row_end ? row + tile : row + tile + (context.threads() - 1) * task_rows;
          FetchAhead ahead;
          if (!few && next < rows) {
            ahead = {a(next, k), std::min(tile, rows - next), a.stride[0], t.inner,
                     fetch_rate(tile * t.inner, t.inner, t.columns)};
            t.ahead = &ahead;
          } else {
            t.ahead = nullptr;
          }
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
  multiply_rows(context, x, w.panels(), w.inputs() * kPanelWidth, y, accumulate);
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
  const std::int64_t panel_stride = padded(inner * kPanelWidth);
  float* panels = impl.shared<float>(ceil_div(columns, kPanelWidth) * panel_stride);
  const Isa isa = context.isa();
  impl.run(ceil_div(inner, kPackRows), [&](std::int64_t task, Scratch&) {
    const std::int64_t end = std::min((task + 1) * kPackRows, inner);
    for (std::int64_t k = task * kPackRows; k < end; ++k) {
      pack_row(isa, w(k), columns, kPanelWidth, kPanelWidth, panels + k * kPanelWidth,
               panel_stride);
    }
  });
  multiply_rows(context, dy, panels, panel_stride, dx, accumulate);
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
  // A task owns a rectangle of dw and passes over all tokens in blocks: its columns of dy and x are
  // packed, then every tile of the rectangle takes the block's sum, while the next block is
  // fetched.
  const std::int64_t task_tiles = ceil_div(kWeightRows, tile), task_rows = task_tiles * tile;
  const std::int64_t row_tasks = ceil_div(rows, task_rows);
  const std::int64_t panel_stride = padded(kPanelWidth * kWeightTokens);
  const std::int64_t tile_stride = padded(kTileMaxRows * kWeightTokens);
  const std::int64_t panel_floats = kWeightColumns / kPanelWidth * panel_stride;
  impl.reserve(Scratch::rounded(static_cast<std::size_t>(panel_floats + task_tiles * tile_stride) *
                                sizeof(float)));
  impl.run(row_tasks * ceil_div(columns, kWeightColumns), [&](std::int64_t task, Scratch& scratch) {
    float* b = scratch.take<float>(panel_floats + task_tiles * tile_stride);
    float* a = b + panel_floats;
    const std::int64_t row_begin = task % row_tasks * task_rows;
    const std::int64_t column = task / row_tasks * kWeightColumns;
    const std::int64_t own_rows = std::min(task_rows, rows - row_begin);
    const std::int64_t own_columns = std::min(kWeightColumns, columns - column);
    for (std::int64_t begin = 0; begin < tokens; begin += kWeightTokens) {
      const std::int64_t inner = std::min(kWeightTokens, tokens - begin);
      for (std::int64_t k = 0; k < inner; ++k) {
        pack_row(isa, x(begin + k, column), own_columns, kPanelWidth, kPanelWidth,
                 b + k * kPanelWidth, panel_stride);
        pack_row(isa, dy(begin + k, row_begin), own_rows, tile, kTileMaxRows, a + k * kTileMaxRows,
                 tile_stride);
      }
      const std::int64_t next = begin + inner, next_tokens = std::min(kWeightTokens, tokens - next);
      // Tiles alternate between the two matrices, so each has half of the steps.
      FetchAhead ahead[2] = {
          {dy(next, row_begin), next_tokens, dy.stride[0], own_rows,
           2 * fetch_rate(next_tokens * tile, inner, own_columns)},
          {x(next, column), next_tokens, x.stride[0], own_columns,
           2 * fetch_rate(next_tokens * ceil_div(own_columns, ceil_div(own_rows, tile)), inner,
                          own_columns)}};
      for (std::int64_t i = 0; i * tile < own_rows; ++i) {
        RowTile t;
        t.a = a + i * tile_stride;
        t.rows = std::min(tile, own_rows - i * tile);
        t.inner = inner;
        t.panel_stride = panel_stride;
        t.b = b;
        t.columns = own_columns;
        t.c = dw(row_begin + i * tile, column);
        t.c_stride = dw.stride[0];
        t.sum = TileSum::kAdd;
        t.ahead = &ahead[i % 2];
        multiply_tile(isa, TileLayout::kInnerMajor, t);
      }
    }
  });
}

}  // namespace ouzel
