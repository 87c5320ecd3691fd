#include "src/ops/matmul.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/matmul.h"
#include "src/kernels/pointwise.h"

namespace ouzel {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Columns of C that one task passes for each tile of A: their panels of kTileInner, 768 KiB, stay
// in the second-level cache from task to task.
constexpr std::int64_t kTaskColumns = 384;
// Columns of a task when there are few rows and the panels are read once, from memory.
constexpr std::int64_t kFewRowsColumns = 256;
// Tiles of a task, at least, and tasks that many rows should give.
constexpr std::int64_t kTaskTiles = 4;
constexpr std::int64_t kLeastTasks = 8;
// The weight gradient: the tokens of one block.
constexpr std::int64_t kWeightTokens = 192;
// Where rectangles are too few to keep threads busy, the tokens are cut into parts of their own
// sums, no shorter than this.
constexpr std::int64_t kWeightTasks = 8;
constexpr std::int64_t kWeightPartTokens = 1024;
// Rows of a matrix that one task packs.
constexpr std::int64_t kPackRows = 16;

void check(bool agrees, const char* op, const char* what, std::int64_t expected,
           std::int64_t found) {
  if (agrees) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: {} should be {}, not {}", op, what, expected, found));
}

// The inner dimension in equal blocks of at most `most`, multiples of 16.
std::int64_t inner_block(std::int64_t inner, std::int64_t most) {
  if (inner <= most) return inner;
  const std::int64_t blocks = ceil_div(inner, most);
  return ceil_div(ceil_div(inner, blocks), 16) * 16;
}

// Lines to fetch at each of the steps of kFetchInner in `inner` x `columns` multiply-adds per row,
// so that `floats` are there at the end; one line in four more, for rows that begin within a line.
std::int64_t fetch_rate(std::int64_t floats, std::int64_t inner, std::int64_t columns) {
  const std::int64_t steps =
      std::max<std::int64_t>(1, ceil_div(inner, kFetchInner) * ceil_div(columns, kPanelWidth));
  return ceil_div(floats * 5, steps * 16 * 4);
}

// A stride between panels or tiles that are written side by side, row by row: multiples of 4 KiB
// would put all of them into one set of the first-level cache (measured: packing takes 4 times as
// long).
std::int64_t padded(std::int64_t stride) { return stride + kPanelWidth; }

// The stride between the panels of a whole matrix. What is read of them together, a block of inner
// indices of each, would fall into the same sets of the second-level cache at multiples of 64 KiB
// and drive the rest out of them.
std::int64_t panel_stride_of(std::int64_t inner) {
  constexpr std::int64_t kWay = 64 * 1024 / sizeof(float);
  const std::int64_t stride = padded(inner * kPanelWidth);
  const std::int64_t beyond = stride % kWay;
  const bool collides = stride > kWay && (beyond < kWay / 4 || beyond > 3 * kWay / 4);
  return collides ? stride + 3 * kWay / 8 : stride;
}

// Rows [row, row + rows) of columns [column, column + columns), into panels.
PanelPack into_panels(View<const float, 2> matrix, std::int64_t row, std::int64_t rows,
                      std::int64_t column, std::int64_t columns, float* to,
                      std::int64_t panel_stride) {
  PanelPack pack;
  pack.row = matrix(row, column);
  pack.rows = rows;
  pack.stride = matrix.stride[0];
  pack.columns = columns;
  pack.step = pack.width = kPanelWidth;
  pack.to = pack.piece = to;
  pack.to_step = panel_stride;
  return pack;
}

// The same, into inner-major tiles.
PanelPack into_tiles(const TileShape& shape, View<const float, 2> matrix, std::int64_t row,
                     std::int64_t rows, std::int64_t column, std::int64_t columns, float* to,
                     std::int64_t tile_stride) {
  PanelPack pack = into_panels(matrix, row, rows, column, columns, to, tile_stride);
  pack.step = shape.rows;
  pack.width = shape.width;
  return pack;
}

// C [M, N] = A [M, inner] B, from C instead of 0 if accumulate.
void multiply_rows(Context& context, View<const float, 2> a, const float* panels,
                   std::int64_t panel_stride, View<float, 2> c, bool accumulate) {
  const std::int64_t rows = a.extent[0], inner = a.extent[1], columns = c.extent[1];
  if (rows == 0 || columns == 0) return;
  Context::Impl& impl = context.impl();
  const Isa isa = context.isa();
  const TileShape shape = tile_shape(isa);
  const std::int64_t tile = shape.rows;
  // With few rows the panels are read once: a task takes its columns over the whole inner
  // dimension. With many and a group of one, each inner block is a round of its own, so that its
  // panels are reused from cache; a larger group reuses them itself.
  const bool few = rows <= kTaskTiles * tile;
  const std::int64_t most = ceil_div(ceil_div(rows, tile), kLeastTasks);
  const std::int64_t group = few ? 1 : std::min(shape.group, std::max(kTaskTiles, most));
  const std::int64_t block = inner_block(inner, few ? kTileInner : shape.inner);
  const std::int64_t task_rows = std::max(kTaskTiles, group) * tile;
  const std::int64_t task_columns = few ? kFewRowsColumns : kTaskColumns;
  const std::int64_t row_tasks = ceil_div(rows, task_rows);
  const std::int64_t column_tasks = ceil_div(columns, task_columns);
  const std::int64_t round_inner = few || shape.group > 1 ? inner : block;
  const auto packed_floats = static_cast<std::size_t>(group * tile * kTileRowStride);
  impl.reserve(Scratch::rounded(packed_floats * sizeof(float)));

  std::int64_t begin = 0;
  do {  // once at least: an inner dimension of 0 gives zeros
    const std::int64_t end = std::min(begin + round_inner, inner);
    impl.run(row_tasks * column_tasks, [&](std::int64_t task, Scratch& scratch) {
      float* packed = scratch.take<float>(static_cast<std::int64_t>(packed_floats));
      const std::int64_t column = task / row_tasks * task_columns;
      const std::int64_t row_begin = task % row_tasks * task_rows;
      const std::int64_t row_end = std::min(row_begin + task_rows, rows);
      RowTile t;
      t.tile_stride = tile * kTileRowStride;
      t.panel_stride = panel_stride;
      t.columns = std::min(task_columns, columns - column);
      t.c_stride = c.stride[0];
      std::int64_t k = begin;
      do {
        t.inner = std::min(block, end - k);
        t.b = panels + column / kPanelWidth * t.panel_stride + k * kPanelWidth;
        t.sum = accumulate || k != 0 ? TileSum::kContinue : TileSum::kAssign;
        for (std::int64_t row = row_begin; row < row_end; row += group * tile) {
          t.rows = std::min(group * tile, row_end - row);
          if (t.rows == 1) {
            t.a = a(row, k);
          } else {
            for (std::int64_t r = 0; r < t.rows; ++r) {
              std::memcpy(packed + r * kTileRowStride, a(row + r, k),
                          static_cast<std::size_t>(t.inner) * sizeof(float));
            }
            t.a = packed;
          }
          // What is packed next: of this task, or the first of the one that this thread likely
          // takes next.
          std::int64_t next = row + group * tile, next_k = k;
          if (next >= row_end && k + block < end) {
            next = row_begin;
            next_k = k + block;
          } else if (next >= row_end) {
            next += (context.threads() - 1) * task_rows;
            next_k = begin;
          }
          FetchAhead ahead;
          if (!few && next < rows) {
            ahead = {a(next, next_k), std::min(group * tile, rows - next), a.stride[0],
                     std::min(block, end - next_k), fetch_rate(tile * t.inner, t.inner, t.columns)};
            t.fetch = &ahead;
          } else {
            t.fetch = nullptr;
          }
          t.c = c(row, column);
          multiply_tiles(isa, TileLayout::kRowMajor, t);
        }
        k += block;
      } while (k < end);
    });
    begin = end;
  } while (begin < inner);
}

}  // namespace

std::size_t PackedMatrix::bytes(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(ceil_div(n, kPanelWidth) * panel_stride_of(k)) * sizeof(float);
}

void PackedMatrix::pack(Context& context, View<const float, 2> w) {
  n_ = w.extent[0];
  k_ = w.extent[1];
  if (memory_.bytes() < bytes(n_, k_)) {
    memory_ = Buffer();
    memory_ = Buffer(bytes(n_, k_));
  }
  float* panels = memory_.f32();
  const std::int64_t stride = panel_stride_of(k_);
  context.impl().run(ceil_div(n_, kPanelWidth), [&](std::int64_t panel, Scratch&) {
    const std::int64_t row = panel * kPanelWidth;
    pack_panel_transposed(w(row), w.stride[0], k_, std::min(kPanelWidth, n_ - row),
                          panels + panel * stride);
  });
}

void linear(Context& context, View<const float, 2> x, const PackedMatrix& w, View<float, 2> y,
            bool accumulate) {
  check(x.extent[1] == w.inputs(), "linear", "the columns of x", w.inputs(), x.extent[1]);
  check(y.extent[0] == x.extent[0], "linear", "the rows of y", x.extent[0], y.extent[0]);
  check(y.extent[1] == w.outputs(), "linear", "the columns of y", w.outputs(), y.extent[1]);
  multiply_rows(context, x, w.panels(), panel_stride_of(w.inputs()), y, accumulate);
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
  const std::int64_t panel_stride = panel_stride_of(inner);
  float* panels = impl.shared<float>(ceil_div(columns, kPanelWidth) * panel_stride);
  const Isa isa = context.isa();
  impl.run(ceil_div(inner, kPackRows), [&](std::int64_t task, Scratch&) {
    const std::int64_t k = task * kPackRows;
    PanelPack pack = into_panels(w, k, std::min(kPackRows, inner - k), 0, columns,
                                 panels + k * kPanelWidth, panel_stride);
    pack_rows(isa, pack);
  });
  multiply_rows(context, dy, panels, panel_stride, dx, accumulate);
}

namespace {

// Rows of a rectangle of dw: whole tiles.
std::int64_t rectangle_rows(const TileShape& shape) {
  return ceil_div(shape.weight_rows, shape.rows) * shape.rows;
}

// Tokens of a part, whole blocks, by the shape alone.
std::int64_t weight_part_tokens(std::int64_t rectangles, std::int64_t tokens) {
  const std::int64_t parts =
      std::clamp<std::int64_t>(tokens / kWeightPartTokens, 1, ceil_div(kWeightTasks, rectangles));
  return std::max<std::int64_t>(1, ceil_div(ceil_div(tokens, parts), kWeightTokens)) *
         kWeightTokens;
}

// A rectangle of the sum over some tokens, block by block: every tile takes the block's sum while
// the next block is packed.
struct WeightTask {
  WeightTask(Isa isa, std::int64_t rows, std::int64_t columns)
      : isa(isa),
        shape(tile_shape(isa)),
        rows(rows),
        columns(columns),
        tiles(ceil_div(rows, shape.rows)),
        panels(ceil_div(columns, kPanelWidth)),
        panel_stride(padded(kPanelWidth * kWeightTokens)),
        tile_stride(padded(shape.width * kWeightTokens)),
        block_floats(panels * panel_stride + tiles * tile_stride) {}

  std::int64_t scratch_floats() const { return 2 * block_floats; }

  // sum [rows, columns] += dy^T x, or = where it is `fresh`.
  void run(View<const float, 2> dy, View<const float, 2> x, View<float, 2> sum, bool fresh,
           float* scratch) const {
    const std::int64_t tokens = x.extent[0];
    float *block = scratch, *other = scratch + block_floats;
    PanelPack pack[2];
    const auto start = [&](std::int64_t begin, float* to) {
      const std::int64_t count = std::min(kWeightTokens, tokens - begin);
      pack[0] =
          into_tiles(shape, dy, begin, count, 0, rows, to + panels * panel_stride, tile_stride);
      pack[1] = into_panels(x, begin, count, 0, columns, to, panel_stride);
      // Tiles alternate between the two matrices, so each has half of the steps.
      const std::int64_t steps =
          std::max<std::int64_t>(1, tiles / 2) * panels * ceil_div(kWeightTokens, kFetchInner);
      pack[0].rate = ceil_div(count * tiles, steps);
      pack[1].rate = ceil_div(count * panels, steps);
    };
    const auto finish = [&] {
      for (PanelPack& matrix : pack) pack_rows(isa, matrix);
    };
    start(0, block);
    finish();
    for (std::int64_t begin = 0; begin < tokens; begin += kWeightTokens) {
      check_cancelled();
      const std::int64_t inner = std::min(kWeightTokens, tokens - begin);
      start(std::min(begin + inner, tokens), other);
      // A group of tiles passes a panel together; at least two groups, one for each pack.
      const std::int64_t group =
          shape.group == 1 ? 1 : std::max<std::int64_t>(1, ceil_div(tiles, 2));
      for (std::int64_t i = 0; i < tiles; i += group) {
        RowTile t;
        t.a = block + panels * panel_stride + i * tile_stride;
        t.tile_stride = tile_stride;
        t.rows = std::min(group * shape.rows, rows - i * shape.rows);
        t.inner = inner;
        t.panel_stride = panel_stride;
        t.b = block;
        t.columns = columns;
        t.c = sum(i * shape.rows);
        t.c_stride = sum.stride[0];
        t.sum = fresh && begin == 0 ? TileSum::kAssign : TileSum::kAdd;
        t.pack = &pack[i / group % 2];
        multiply_tiles(isa, TileLayout::kInnerMajor, t);
      }
      finish();
      std::swap(block, other);
    }
  }

  Isa isa;
  TileShape shape;
  std::int64_t rows, columns, tiles, panels, panel_stride, tile_stride, block_floats;
};

View<const float, 2> part_of(View<const float, 2> matrix, std::int64_t row, std::int64_t rows,
                             std::int64_t column, std::int64_t columns) {
  return {matrix(row, column), {rows, columns}, matrix.stride};
}

}  // namespace

std::size_t linear_backward_weight_bytes(std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>((kWeightTasks - 1) * n * k) * sizeof(float);
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
  const TileShape shape = tile_shape(isa);
  const std::int64_t task_rows = rectangle_rows(shape), task_columns = shape.weight_columns;
  const std::int64_t row_tasks = ceil_div(rows, task_rows);
  const std::int64_t rectangles = row_tasks * ceil_div(columns, task_columns);
  const std::int64_t part_tokens = weight_part_tokens(rectangles, tokens);
  const std::int64_t parts = std::max<std::int64_t>(1, ceil_div(tokens, part_tokens));
  // The first part goes to dw, the others to sums of their own that are added in order.
  float* sums = parts > 1 ? impl.shared<float>((parts - 1) * rows * columns) : nullptr;
  const WeightTask largest(isa, std::min(rows, task_rows), std::min(columns, task_columns));
  impl.reserve(
      Scratch::rounded(static_cast<std::size_t>(largest.scratch_floats()) * sizeof(float)));
  impl.run(rectangles * parts, [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t part = task / rectangles, rectangle = task % rectangles;
    const std::int64_t row = rectangle % row_tasks * task_rows;
    const std::int64_t column = rectangle / row_tasks * task_columns;
    const std::int64_t first = std::min(part * part_tokens, tokens);
    const std::int64_t count = std::min(part_tokens, tokens - first);
    const WeightTask w(isa, std::min(task_rows, rows - row),
                       std::min(task_columns, columns - column));
    const View<float, 2> sum =
        part == 0 ? dw : View<float, 2>(sums + (part - 1) * rows * columns, {rows, columns});
    w.run(part_of(dy, first, count, row, w.rows), part_of(x, first, count, column, w.columns),
          {sum(row, column), {w.rows, w.columns}, sum.stride}, part != 0,
          scratch.take<float>(w.scratch_floats()));
  });
  if (parts == 1) return;
  impl.run(rows, [&](std::int64_t row, Scratch&) {
    for (std::int64_t part = 1; part < parts; ++part) {
      add_to(isa, sums + ((part - 1) * rows + row) * columns, dw(row), columns);
    }
  });
}

}  // namespace ouzel
