// The arrays that the references compute on: dense, row-major, a shape and its numbers. Real is
// double, or long double where a test differentiates a reference numerically.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ouzel::reference {

template <class Real>
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<Real> data;

  Array() = default;  // absent: an optional argument that was not given
  explicit Array(std::vector<std::int64_t> extents) : shape(std::move(extents)) {
    std::int64_t size = 1;
    for (std::int64_t e : shape) size *= e;
    data.resize(static_cast<std::size_t>(size));
  }
  // Zeros of the shape of `other`; absent if that is.
  static Array like(const Array& other) { return other.present() ? Array(other.shape) : Array(); }

  bool present() const { return !shape.empty(); }
  std::size_t rank() const { return shape.size(); }
  std::int64_t extent(std::size_t axis) const { return shape[axis]; }

  template <class... Index>
  Real& operator()(Index... index) {
    return data[offset(index...)];
  }
  template <class... Index>
  const Real& operator()(Index... index) const {
    return data[offset(index...)];
  }

 private:
  template <class... Index>
  std::size_t offset(Index... index) const {
    std::size_t at = 0, axis = 0;
    ((at = at * static_cast<std::size_t>(shape[axis++]) + static_cast<std::size_t>(index)), ...);
    return at;
  }
};

// Arrays by the names that golden files give them: inputs q, k, v, g, ..., initial_state; outputs
// o, final_state, ...; their upstream gradients do, dht, ...; gradients "d" + input, dh0.
template <class Real>
using Tensors = std::map<std::string, Array<Real>>;

}  // namespace ouzel::reference
