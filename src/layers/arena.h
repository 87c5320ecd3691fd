// Memory of a run, handed out front to back and released in reverse order: the frames that forward
// pushes and backward pops, and temporaries on top of them. An arena without memory only counts:
// the same code run on it tells the peak beforehand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ouzel/error.h"
#include "ouzel/tensor.h"

namespace ouzel {

class Arena {
 public:
  Arena() = default;  // counts
  explicit Arena(const Buffer& memory)
      : base_(static_cast<char*>(memory.data())), capacity_(memory.bytes()), counting_(false) {}

  bool counting() const { return counting_; }
  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }  // the most that was ever used

  template <class T>
  T* take(std::int64_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    const std::size_t begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    peak_ = std::max(peak_, used_);
    if (!counting_ && used_ > capacity_) {
      throw Error(ErrorKind::kOutOfMemory, "a layer took more memory than it had announced");
    }
    return reinterpret_cast<T*>(base_ + begin);
  }
  View<float, 2> matrix(std::int64_t rows, std::int64_t columns) {
    return {take<float>(rows * columns), {rows, columns}};
  }
  // Back to what `used` was.
  void release(std::size_t used) { used_ = used; }
  // The same memory from `used` on: finds again what was taken there, by taking the same again.
  Arena at(std::size_t used) const {
    Arena arena = *this;
    arena.used_ = used;
    return arena;
  }

 private:
  // A counting arena hands out addresses that are never read; not null, which may not be offset.
  char* base_ = reinterpret_cast<char*>(std::uintptr_t{1} << 20);
  std::size_t capacity_ = 0, used_ = 0, peak_ = 0;
  bool counting_ = true;
};

}  // namespace ouzel
