#include "src/ops/pointwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/pointwise.h"

namespace ouzel {
namespace {

// Elements of one task: its arrays stay in the second-level cache, and handing it out costs
// nothing.
constexpr std::int64_t kTaskElements = 1 << 15;
// Columns of dtable that one task of embed_backward owns: four cache lines.
constexpr std::int64_t kTableColumns = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check(bool agrees, const char* op, const char* what, std::int64_t expected,
           std::int64_t found) {
  if (agrees) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: {} should be {}, not {}", op, what, expected, found));
}

template <class T>
void check_shape(const char* op, const char* name, const View<T, 2>& view, std::int64_t rows,
                 std::int64_t columns) {
  if (view.extent[0] == rows && view.extent[1] == columns) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: {} should be [{}, {}], not [{}, {}]", op, name, rows, columns,
                          view.extent[0], view.extent[1]));
}

// body(row) for every row of `size` elements, in tasks of whole rows.
template <class Body>
void for_rows(Context& context, std::int64_t rows, std::int64_t size, Body body) {
  if (rows == 0 || size == 0) return;
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / size);
  context.impl().run(ceil_div(rows, step), [&](std::int64_t task, Scratch&) {
    const std::int64_t end = std::min((task + 1) * step, rows);
    for (std::int64_t row = task * step; row < end; ++row) body(row);
  });
}

}  // namespace

void swiglu(Context& context, View<const float, 2> gate, View<const float, 2> up,
            View<float, 2> y) {
  const auto [rows, size] = gate.extent;
  check_shape("swiglu", "up", up, rows, size);
  check_shape("swiglu", "y", y, rows, size);
  for_rows(context, rows, size, [&, size = size](std::int64_t row) {
    swiglu_row(context.isa(), gate(row), up(row), y(row), size);
  });
}

void swiglu_backward(Context& context, View<const float, 2> gate, View<const float, 2> up,
                     View<const float, 2> dy, View<float, 2> dgate, View<float, 2> dup) {
  const auto [rows, size] = gate.extent;
  check_shape("swiglu_backward", "up", up, rows, size);
  check_shape("swiglu_backward", "dy", dy, rows, size);
  check_shape("swiglu_backward", "dgate", dgate, rows, size);
  check_shape("swiglu_backward", "dup", dup, rows, size);
  for_rows(context, rows, size, [&, size = size](std::int64_t row) {
    swiglu_backward_row(context.isa(), gate(row), up(row), dy(row), dgate(row), dup(row), size);
  });
}

void rotary(Context& context, View<float, 3> x, std::span<const std::int64_t> positions,
            double base, bool inverse) {
  const auto [rows, heads, size] = x.extent;
  const auto count = static_cast<std::int64_t>(positions.size());
  check(count == rows, "rotary", "the number of positions", rows, count);
  if (size % 2 != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("rotary: the head size should be even, not {}", size));
  }
  if (x.size() == 0) return;
  Context::Impl& impl = context.impl();
  const std::int64_t half = size / 2, padded = ceil_div(half, kAngleBlock) * kAngleBlock;
  double* frequency = impl.shared<double>(padded);
  for (std::int64_t i = 0; i < padded; ++i) {
    frequency[i] =
        i < half ? std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(size)) : 0;
  }
  impl.reserve(Scratch::rounded(static_cast<std::size_t>(2 * padded) * sizeof(float)));
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / (heads * size));
  impl.run(ceil_div(rows, step), [&, rows = rows](std::int64_t task, Scratch& scratch) {
    rotary_rows(context.isa(), x, positions.data(), frequency, inverse, task * step,
                std::min((task + 1) * step, rows), scratch.take<float>(2 * padded));
  });
}

void embed(Context& context, std::span<const std::int32_t> tokens, View<const float, 2> table,
           View<float, 2> y) {
  const auto rows = static_cast<std::int64_t>(tokens.size());
  const std::int64_t size = table.extent[1];
  check_shape("embed", "y", y, rows, size);
  for_rows(context, rows, size, [&](std::int64_t row) {
    std::memcpy(y(row), table(tokens[static_cast<std::size_t>(row)]),
                static_cast<std::size_t>(size) * sizeof(float));
  });
}

void embed_backward(Context& context, std::span<const std::int32_t> tokens, View<const float, 2> dy,
                    View<float, 2> dtable) {
  const auto rows = static_cast<std::int64_t>(tokens.size());
  const std::int64_t size = dtable.extent[1];
  check_shape("embed_backward", "dy", dy, rows, size);
  // A task owns columns of the table and passes over all rows in order.
  context.impl().run(ceil_div(size, kTableColumns), [&](std::int64_t task, Scratch&) {
    const std::int64_t column = task * kTableColumns;
    const std::int64_t count = std::min(kTableColumns, size - column);
    for (std::int64_t row = 0; row < rows; ++row) {
      check_cancelled_at(row);
      add_to(context.isa(), dy(row, column), dtable(tokens[static_cast<std::size_t>(row)], column),
             count);
    }
  });
}

void cross_entropy(Context& context, View<const float, 2> logits,
                   std::span<const std::int32_t> targets, float weight, float* losses,
                   View<float, 2>* dlogits) {
  const auto [rows, size] = logits.extent;
  const auto count = static_cast<std::int64_t>(targets.size());
  check(count == rows, "cross_entropy", "the number of targets", rows, count);
  if (dlogits != nullptr) check_shape("cross_entropy", "dlogits", *dlogits, rows, size);
  for_rows(context, rows, size, [&, size = size](std::int64_t row) {
    const std::int64_t target = targets[static_cast<std::size_t>(row)];
    float* gradient = dlogits != nullptr ? (*dlogits)(row) : nullptr;
    if (target >= 0) {
      losses[row] = cross_entropy_row(context.isa(), logits(row), size, target, weight, gradient);
    } else {
      losses[row] = 0;
      if (gradient != nullptr) std::fill(gradient, gradient + size, 0.0f);
    }
  });
}

void add(Context& context, View<const float, 2> x, View<float, 2> y) {
  const auto [rows, size] = x.extent;
  check_shape("add", "y", y, rows, size);
  for_rows(context, rows, size,
           [&, size = size](std::int64_t row) { add_to(context.isa(), x(row), y(row), size); });
}

}  // namespace ouzel
