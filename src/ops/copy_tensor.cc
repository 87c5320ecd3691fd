#include "src/ops/copy_tensor.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "src/base/context_impl.h"
#include "src/base/half.h"
#include "src/kernels/convert.h"

namespace ouzel {
namespace {

// Elements of one task: some tens of microseconds.
constexpr std::int64_t kTaskElements = 1 << 16;

float narrow(float x) { return x; }
float narrow(double x) { return static_cast<float>(x); }
float narrow(BFloat16 x) { return to_float(x); }
float narrow(Float16 x) { return to_float(x); }

template <class To, class From>
To convert(From x) {
  if constexpr (std::is_same_v<From, To>) {
    return x;
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bf16(narrow(x));
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_f16(narrow(x));
  } else {
    return To{narrow(x)};
  }
}

// Inlined with strides that the compiler knows, it becomes vectors, or a memcpy.
template <class From, class To>
inline void copy_strided(const char* from, std::int64_t from_stride, char* to,
                         std::int64_t to_stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    From x;
    std::memcpy(&x, from + i * from_stride, sizeof(x));
    const To y = convert<To>(x);
    std::memcpy(to + i * to_stride, &y, sizeof(y));
  }
}

template <class From, class To>
void copy_row(const char* from, std::int64_t from_stride, char* to, std::int64_t to_stride,
              std::int64_t n) {
  if (from_stride != sizeof(From) || to_stride != sizeof(To)) {
    copy_strided<From, To>(from, from_stride, to, to_stride, n);
  } else if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(From));
  } else {
    copy_strided<From, To>(from, sizeof(From), to, sizeof(To), n);
  }
}

using CopyRow = void (*)(const char*, std::int64_t, char*, std::int64_t, std::int64_t);

template <class From>
CopyRow copy_row_to(DType to) {
  switch (to) {
    case DType::kF64:
      return copy_row<From, double>;
    case DType::kBF16:
      return copy_row<From, BFloat16>;
    case DType::kF16:
      return copy_row<From, Float16>;
    default:
      return copy_row<From, float>;
  }
}

CopyRow copy_row_of(DType from, DType to) {
  switch (from) {
    case DType::kF64:
      return copy_row_to<double>(to);
    case DType::kBF16:
      return copy_row_to<BFloat16>(to);
    case DType::kF16:
      return copy_row_to<Float16>(to);
    default:
      return copy_row_to<float>(to);
  }
}

// Address of a row, counted through all axes but the last.
template <class T>
auto* row_at(const T& tensor, std::int64_t row) {
  std::int64_t offset = 0;
  for (int i = tensor.rank - 1; i-- > 0;) {
    const auto axis = static_cast<std::size_t>(i);
    offset += row % tensor.extent[axis] * tensor.stride[axis];
    row /= tensor.extent[axis];
  }
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(tensor.data)>>,
                                  const char, char>;
  return static_cast<Byte*>(tensor.data) + offset * size_of(tensor.dtype);
}

// Trailing axes that lie without gaps in all tensors become one, up to the elements of a task.
template <class... T>
void merge_axes(T&... tensors) {
  const auto merges = [](const auto& x) {
    if (x.rank < 2) return false;
    const auto last = static_cast<std::size_t>(x.rank - 1);
    const std::int64_t columns = x.extent[last] * x.extent[last - 1];
    return columns <= kTaskElements && x.stride[last - 1] == x.extent[last] * x.stride[last];
  };
  const auto merge = [](auto& x) {
    const auto last = static_cast<std::size_t>(--x.rank);
    x.extent[last - 1] *= x.extent[last];
    x.stride[last - 1] = x.stride[last];
  };
  while ((merges(tensors) && ...)) (merge(tensors), ...);
}

// body(row, columns) for the rows of a tensor, in tasks of some.
template <class Body>
void for_rows(Context& context, const ConstTensor& x, const Body& body) {
  const std::int64_t size = x.size();
  if (size == 0) return;
  const std::int64_t columns = x.rank == 0 ? 1 : x.extent[static_cast<std::size_t>(x.rank - 1)];
  const std::int64_t rows = size / columns;
  const std::int64_t task_rows = std::max<std::int64_t>(1, kTaskElements / columns);
  context.impl().run((rows + task_rows - 1) / task_rows, [&](std::int64_t task, Scratch&) {
    const std::int64_t end = std::min(rows, (task + 1) * task_rows);
    for (std::int64_t row = task * task_rows; row < end; ++row) body(row, columns);
  });
}

std::int64_t step_of(const ConstTensor& x) {
  return x.stride[static_cast<std::size_t>(std::max(x.rank - 1, 0))] * size_of(x.dtype);
}

}  // namespace

void copy_tensor(Context& context, const ConstTensor& source, const Tensor& target) {
  ConstTensor from = source;
  Tensor to = target;
  merge_axes(from, to);
  const CopyRow copy = copy_row_of(from.dtype, to.dtype);
  const bool dense = step_of(from) == size_of(from.dtype) && step_of(to) == size_of(to.dtype);
  const bool converts = dense && ((is_half(from.dtype) && to.dtype == DType::kF32) ||
                                  (from.dtype == DType::kF32 && is_half(to.dtype)));
  for_rows(context, from, [&](std::int64_t row, std::int64_t columns) {
    if (converts) {
      convert(context.isa(), from.dtype, row_at(from, row), to.dtype, row_at(to, row), columns);
    } else {
      copy(row_at(from, row), step_of(from), row_at(to, row), step_of(to), columns);
    }
  });
}

void copy_or_clear(Context& context, const ConstTensor& from, const Tensor& to) {
  if (!from.present()) {
    clear_rows(context, to);
  } else if (from.data != to.data) {
    copy_tensor(context, from, to);
  }
}

void clear_rows(Context& context, const Tensor& target) {
  Tensor x = target;
  merge_axes(x);
  for_rows(context, x, [&](std::int64_t row, std::int64_t columns) {
    std::memset(row_at(x, row), 0, static_cast<std::size_t>(columns * size_of(x.dtype)));
  });
}

}  // namespace ouzel
