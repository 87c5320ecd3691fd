// What a pass over a sequence walks along: rows of one head and numbers a token, in the order of
// the pass (strides are negative when time runs backwards).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ouzel/segments.h"
#include "ouzel/tensor.h"
#include "src/base/half.h"

namespace ouzel {

template <class T>
struct Rows {
  T* first = nullptr;
  std::int64_t stride = 0;
  T* at(std::int64_t t) const { return first + t * stride; }
  // From this column on.
  Rows from(std::int64_t column) const {
    return {first != nullptr ? first + column : nullptr, stride};
  }
  explicit operator bool() const { return first != nullptr; }
};

// Rows of any type of floats; Void is void or const void.
template <class Void>
struct AnyRows {
  Void* first = nullptr;
  std::int64_t stride = 0;  // numbers
  DType dtype = DType::kF32;
  operator AnyRows<const void>() const  // NOLINT: what may be written may be read
    requires(!std::is_const_v<Void>)
  {
    return {first, stride, dtype};
  }
  explicit operator bool() const { return first != nullptr; }
  AnyRows at(std::int64_t t) const { return from(t * stride); }
  AnyRows from(std::int64_t column) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    if (first == nullptr) return *this;
    return {static_cast<Byte*>(first) + column * size_of(dtype), stride, dtype};
  }
};

// A view of floats of any type with unit last stride; view(b, t, h) are the rows of that head from
// token t on.
template <class Void, int Rank>
struct AnyView {
  Void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<std::int64_t, Rank> extent{};
  std::array<std::int64_t, Rank> stride{};

  AnyView() = default;
  template <class T>
  AnyView(const View<T, Rank>& view)  // NOLINT: floats of any type may be these
    requires(std::is_same_v<std::remove_const_t<T>, float>)
      : data(view.data), extent(view.extent), stride(view.stride) {}

  template <class... Index>
  AnyRows<Void> operator()(Index... index) const {
    const std::int64_t ix[] = {static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < sizeof...(Index); ++i) offset += ix[i] * stride[i];
    return AnyRows<Void>{data, stride[1], dtype}.from(offset);
  }
  // One number.
  template <class... Index>
  float at(Index... index) const {
    static_assert(sizeof...(Index) == static_cast<std::size_t>(Rank));
    const AnyRows<Void> x = (*this)(index...);
    if (dtype == DType::kF32) return *static_cast<const float*>(x.first);
    return dtype == DType::kBF16 ? to_float(*static_cast<const BFloat16*>(x.first))
                                 : to_float(*static_cast<const Float16*>(x.first));
  }
};

inline Rows<const float> rows_of(const ConstTensor& x, const Segment& s, std::int64_t head,
                                 bool backwards) {
  if (!x.present() || s.length == 0) return {};  // no token: no address either
  const View<const float, 4> view = x.view<const float, 4>();
  const std::int64_t token = backwards ? s.begin + s.length - 1 : s.begin;
  return {view(s.batch, token, head), backwards ? -view.stride[1] : view.stride[1]};
}
inline Rows<float> rows_of(const Tensor& x, const Segment& s, std::int64_t head, bool backwards) {
  const Rows<const float> rows = rows_of(ConstTensor(x), s, head, backwards);
  return {const_cast<float*>(rows.first), rows.stride};
}

inline AnyRows<const void> any_rows_of(const ConstTensor& x, const Segment& s, std::int64_t head,
                                       bool backwards) {
  if (!x.present() || s.length == 0) return {};
  const std::int64_t token = backwards ? s.begin + s.length - 1 : s.begin;
  const AnyRows<const void> rows = {x.data, backwards ? -x.stride[1] : x.stride[1], x.dtype};
  return rows.from(s.batch * x.stride[0] + token * x.stride[1] + head * x.stride[2]);
}
inline AnyRows<void> any_rows_of(const Tensor& x, const Segment& s, std::int64_t head,
                                 bool backwards) {
  const AnyRows<const void> rows = any_rows_of(ConstTensor(x), s, head, backwards);
  return {const_cast<void*>(rows.first), rows.stride, rows.dtype};
}

// One number per token.
struct TokenValues {
  float* first = nullptr;
  std::int64_t step = 1;
  float& operator[](std::int64_t t) const { return first[t * step]; }
  explicit operator bool() const { return first != nullptr; }
};

}  // namespace ouzel
