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

template <class T>
void check(const char* op, const char* name, const View<T, 3>& view,
           const std::array<std::int64_t, 3>& shape) {
  if (view.extent == shape) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("{}: {} should be [{}, {}, {}] like x, not [{}, {}, {}]", op, name, shape[0],
                  shape[1], shape[2], view.extent[0], view.extent[1], view.extent[2]));
}

}  // namespace

void rms_norm(Context& context, const RmsNormOptions& options, View<const float, 3> x,
              const float* weight, View<const float, 3> gate, View<float, 3> y, float* rstd) {
  check("rms_norm", "y", y, x.extent);
  if (gate.data != nullptr) check("rms_norm", "the gate", gate, x.extent);
  if (x.size() == 0) return;
  const RmsNorm norm{options, x, gate, weight, y, rstd};
  const std::int64_t rows = x.extent[0];
  const std::int64_t step = std::max<std::int64_t>(1, kTaskElements / (x.extent[1] * x.extent[2]));
  context.impl().run(ceil_div(rows, step), [&](std::int64_t task, Scratch&) {
    rms_norm_rows(context.isa(), norm, task * step, std::min((task + 1) * step, rows));
  });
}

void rms_norm_backward(Context& context, const RmsNormOptions& options, View<const float, 3> x,
                       const float* weight, View<const float, 3> gate, const float* rstd,
                       View<const float, 3> dy, View<float, 3> dx, View<float, 3> dgate,
                       float* dweight) {
  check("rms_norm_backward", "dy", dy, x.extent);
  check("rms_norm_backward", "dx", dx, x.extent);
  if (gate.data != nullptr) {
    check("rms_norm_backward", "the gate", gate, x.extent);
    check("rms_norm_backward", "dgate", dgate, x.extent);
  }
  if (x.size() == 0) return;
  const RmsNormBackward norm{options, x, gate, dy, weight, rstd, dx, dgate};
  const std::int64_t rows = x.extent[0];
  const std::int64_t size = x.extent[2] * (options.weight_per_group ? x.extent[1] : 1);
  const std::int64_t step = std::max(kMinBlockRows, ceil_div(rows, kMaxBlocks));
  const std::int64_t blocks = ceil_div(rows, step);
  Context::Impl& impl = context.impl();
  const bool sums = weight != nullptr && dweight != nullptr;
  float* partial = sums ? impl.shared<float>(blocks * size) : nullptr;
  impl.run(blocks, [&](std::int64_t block, Scratch&) {
    float* own = sums ? partial + block * size : nullptr;
    if (sums) std::fill(own, own + size, 0.0f);
    rms_norm_backward_rows(context.isa(), norm, block * step, std::min((block + 1) * step, rows),
                           own);
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
