#include "src/ops/norm.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/pointwise.h"

namespace ouzel {
namespace {

// Elements of one task: small enough for the second-level cache and many tasks, large enough that
// handing it out costs nothing.
constexpr std::int64_t kTaskElements = 1 << 15;
// Partial sums of dweight: at most this many blocks of rows, at least this many rows each.
constexpr std::int64_t kMaxBlocks = 256;
constexpr std::int64_t kMinBlockRows = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class Void>
void check(const char* op, const char* name, const AnyView<Void, 3>& view,
           const AnyView<const void, 3>& x) {
  const std::array<std::int64_t, 3>& shape = x.extent;
  if (view.dtype != x.dtype) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: {} should be {} like x, not {}", op, name, name_of(x.dtype),
                            name_of(view.dtype)));
  }
  if (view.extent == shape) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("{}: {} should be [{}, {}, {}] like x, not [{}, {}, {}]", op, name, shape[0],
                  shape[1], shape[2], view.extent[0], view.extent[1], view.extent[2]));
}

bool is_empty(const AnyView<const void, 3>& x) { return std::ranges::count(x.extent, 0) != 0; }
template <class Void>
NormRows<Void> rows_of(const AnyView<Void, 3>& view) {
  return {view.data, view.stride[0], view.stride[1]};
}

}  // namespace

void rms_norm(Context& context, const RmsNormOptions& options, AnyView<const void, 3> x,
              const float* weight, AnyView<const void, 3> gate, AnyView<void, 3> y, float* rstd) {
  check("rms_norm", "y", y, x);
  if (gate.data != nullptr) check("rms_norm", "the gate", gate, x);
  if (is_empty(x)) return;
  const std::int64_t size = x.extent[2], work = is_half(x.dtype) ? size : 0;
  const RmsNorm norm{options,       x.dtype, x.extent[1], size, rows_of(x),
                     rows_of(gate), weight,  rows_of(y),  rstd};
  context.impl().reserve(Scratch::rounded(static_cast<std::size_t>(work) * sizeof(float)));
  const std::int64_t rows = x.extent[0];
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / (x.extent[1] * x.extent[2]));
  context.impl().run(ceil_div(rows, step), [&](std::int64_t task, Scratch& scratch) {
    rms_norm_rows(context.isa(), norm, task * step, std::min((task + 1) * step, rows),
                  scratch.take<float>(work));
  });
}

void rms_norm_backward(Context& context, const RmsNormOptions& options, AnyView<const void, 3> x,
                       const float* weight, AnyView<const void, 3> gate, const float* rstd,
                       AnyView<const void, 3> dy, AnyView<void, 3> dx, AnyView<void, 3> dgate,
                       float* dweight) {
  check("rms_norm_backward", "dy", dy, x);
  check("rms_norm_backward", "dx", dx, x);
  if (gate.data != nullptr) {
    check("rms_norm_backward", "the gate", gate, x);
    check("rms_norm_backward", "dgate", dgate, x);
  }
  if (is_empty(x)) return;
  const std::int64_t work = is_half(x.dtype) ? x.extent[2] : 0;
  const RmsNormBackward norm{options,    x.dtype,       x.extent[1],   x.extent[2],
                             rows_of(x), rows_of(gate), rows_of(dy),   weight,
                             rstd,       rows_of(dx),   rows_of(dgate)};
  const std::int64_t rows = x.extent[0];
  const std::int64_t size = x.extent[2] * (options.weight_per_group ? x.extent[1] : 1);
  const std::int64_t step = std::max(kMinBlockRows, ceil_div(rows, kMaxBlocks));
  const std::int64_t blocks = ceil_div(rows, step);
  Context::Impl& impl = context.impl();
  const bool sums = weight != nullptr && dweight != nullptr;
  float* partial = sums ? impl.shared<float>(blocks * size) : nullptr;
  impl.reserve(Scratch::rounded(static_cast<std::size_t>(work) * sizeof(float)));
  impl.run(blocks, [&](std::int64_t block, Scratch& scratch) {
    float* own = sums ? partial + block * size : nullptr;
    if (sums) std::fill(own, own + size, 0.0f);
    rms_norm_backward_rows(context.isa(), norm, block * step, std::min((block + 1) * step, rows),
                           scratch.take<float>(work), own);
  });
  if (sums) {
    impl.run(1, [&](std::int64_t, Scratch&) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        add_to(context.isa(), partial + block * size, dweight, size);
      }
    });
  }
}

}  // namespace ouzel
