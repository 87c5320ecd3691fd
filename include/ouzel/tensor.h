// Views of memory: View<T, Rank> is typed, Tensor carries its type at run time; neither owns
// anything. Buffer owns. Extents and strides are int64_t, strides count elements (not bytes).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "ouzel/export.h"

namespace ouzel {

enum class DType : std::uint8_t { kF32, kF64, kBF16, kF16, kI64, kI32, kU8 };

// Bytes of one element.
OUZEL_EXPORT std::int64_t size_of(DType dtype);
// The safetensors spelling: "F32", "BF16", ...
OUZEL_EXPORT const char* name_of(DType dtype);

// Brain float: the upper 16 bits of a float. Conversion lives in src/base/half.h.
struct BFloat16 {
  std::uint16_t bits;
};
// IEEE half precision.
struct Float16 {
  std::uint16_t bits;
};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::kF32> {};
template <>
struct DTypeOf<double> : std::integral_constant<DType, DType::kF64> {};
template <>
struct DTypeOf<BFloat16> : std::integral_constant<DType, DType::kBF16> {};
template <>
struct DTypeOf<Float16> : std::integral_constant<DType, DType::kF16> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<DType, DType::kI64> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, DType::kI32> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, DType::kU8> {};

// Row-major strides of a dense array.
template <std::size_t Rank>
std::array<std::int64_t, Rank> dense_strides(const std::array<std::int64_t, Rank>& extent) {
  std::array<std::int64_t, Rank> stride{};
  std::int64_t step = 1;
  for (std::size_t i = Rank; i-- > 0;) {
    stride[i] = step;
    step *= extent[i];
  }
  return stride;
}

// A typed strided view. `view(b, t, h)` is the address of that row's first element (missing
// trailing indices are 0), `view.at(b, t, h, d)` the element.
template <class T, int Rank>
struct View {
  T* data = nullptr;
  std::array<std::int64_t, Rank> extent{};
  std::array<std::int64_t, Rank> stride{};

  View() = default;
  View(T* data, const std::array<std::int64_t, Rank>& extent)
      : data(data), extent(extent), stride(dense_strides(extent)) {}
  View(T* data, const std::array<std::int64_t, Rank>& extent,
       const std::array<std::int64_t, Rank>& stride)
      : data(data), extent(extent), stride(stride) {}
  operator View<const T, Rank>() const
    requires(!std::is_const_v<T>)
  {
    return {data, extent, stride};
  }

  template <class... Index>
  T* operator()(Index... index) const {
    static_assert(sizeof...(Index) <= static_cast<std::size_t>(Rank));
    const std::int64_t ix[] = {static_cast<std::int64_t>(index)...};
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < sizeof...(Index); ++i) offset += ix[i] * stride[i];
    return data + offset;
  }
  template <class... Index>
  T& at(Index... index) const {
    static_assert(sizeof...(Index) == static_cast<std::size_t>(Rank));
    return *(*this)(index...);
  }
  std::int64_t size() const {
    std::int64_t n = 1;
    for (auto e : extent) n *= e;
    return n;
  }
};

inline constexpr int kMaxRank = 5;

// A strided view whose element type and rank are known at run time. A default-constructed tensor is
// absent (an optional argument that was not given); one with zero elements is present.
template <bool Const>
struct BasicTensor {
  using Pointer = std::conditional_t<Const, const void*, void*>;

  Pointer data = nullptr;
  DType dtype = DType::kF32;
  int rank = -1;
  std::array<std::int64_t, kMaxRank> extent{};
  std::array<std::int64_t, kMaxRank> stride{};

  BasicTensor() = default;
  template <class T, std::size_t Rank>
  BasicTensor(T* data, const std::array<std::int64_t, Rank>& shape)
    requires(Const || !std::is_const_v<T>)
      : BasicTensor(View<T, static_cast<int>(Rank)>(data, shape)) {}
  template <class T, int Rank>
  BasicTensor(const View<T, Rank>& view)  // NOLINT: a view is a tensor
    requires(Const || !std::is_const_v<T>)
      : data(view.data), dtype(DTypeOf<std::remove_const_t<T>>::value), rank(Rank) {
    static_assert(Rank <= kMaxRank);
    for (int i = 0; i < Rank; ++i) {
      extent[static_cast<std::size_t>(i)] = view.extent[static_cast<std::size_t>(i)];
      stride[static_cast<std::size_t>(i)] = view.stride[static_cast<std::size_t>(i)];
    }
  }
  // A template, so that it is never taken for the copy constructor of Tensor.
  template <bool OtherConst>
  BasicTensor(const BasicTensor<OtherConst>& other)  // NOLINT: mutable to const
    requires(Const && !OtherConst)
      : data(other.data),
        dtype(other.dtype),
        rank(other.rank),
        extent(other.extent),
        stride(other.stride) {}
  // Dense, of a type and shape known at run time.
  BasicTensor(Pointer data, DType dtype, std::initializer_list<std::int64_t> shape)
      : data(data), dtype(dtype), rank(static_cast<int>(shape.size())) {
    std::size_t i = 0;
    for (auto e : shape) extent[i++] = e;
    std::int64_t step = 1;
    for (i = shape.size(); i-- > 0;) {
      stride[i] = step;
      step *= extent[i];
    }
  }

  bool present() const { return rank >= 0; }
  explicit operator bool() const { return present(); }
  std::int64_t size() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= extent[static_cast<std::size_t>(i)];
    return rank < 0 ? 0 : n;
  }
  // The typed view; the caller has checked dtype and rank.
  template <class T, int Rank>
  View<T, Rank> view() const {
    View<T, Rank> v;
    v.data = static_cast<T*>(data);
    for (std::size_t i = 0; i < static_cast<std::size_t>(Rank); ++i) {
      v.extent[i] = extent[i];
      v.stride[i] = stride[i];
    }
    return v;
  }
};

using Tensor = BasicTensor<false>;
using ConstTensor = BasicTensor<true>;

// "[2, 19, 2, 8]", for messages.
OUZEL_EXPORT std::string shape_string(const ConstTensor& tensor);

// Owns memory aligned to 64 bytes (a cache line and a 512-bit vector). Moves, never copies.
class OUZEL_EXPORT Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);  // not initialised; throws Error(kOutOfMemory)
  static Buffer zeros(std::size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::size_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  float* f32() const { return static_cast<float*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ouzel
