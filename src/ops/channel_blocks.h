// Tasks of the elementwise scans: the sequences of a call, each cut into blocks of channels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "src/base/context_impl.h"
#include "src/kernels/elementwise.h"
#include "src/ops/arguments.h"

namespace ouzel {

struct ChannelBlock {
  std::int64_t sequence = 0, first = 0, channels = 0;
};

class ChannelBlocks {
 public:
  ChannelBlocks(std::int64_t sequences, std::int64_t channels, std::int64_t block)
      : sequences_(sequences),
        channels_(channels),
        block_(block),
        blocks_((channels + block - 1) / block) {}

  std::int64_t width() const { return std::min(block_, channels_); }  // of the widest block
  std::int64_t blocks() const { return blocks_; }
  std::int64_t tasks() const { return sequences_ * blocks_; }
  ChannelBlock block(std::int64_t sequence, std::int64_t index) const {
    const std::int64_t first = index * block_;
    return {sequence, first, std::min(block_, channels_ - first)};
  }
  ChannelBlock task(std::int64_t task) const { return block(task / blocks_, task % blocks_); }

 private:
  std::int64_t sequences_, channels_, block_, blocks_;
};

// The rows of a block of channels in [B, T, D], from the first token of a segment on.
template <class T>
TokenRows<T> rows_of(const View<T, 3>& view, const Segment& segment, std::int64_t first) {
  if (view.data == nullptr) return {};
  return {view(segment.batch, segment.begin, first), view.stride[1]};
}

template <class Void>
AnyRows<Void> rows_of(const AnyView<Void, 3>& view, const Segment& segment, std::int64_t first) {
  if (view.data == nullptr) return {};
  return view(segment.batch, segment.begin, first);
}

inline std::size_t scratch_of(std::int64_t floats) {
  return Scratch::rounded(static_cast<std::size_t>(floats) * sizeof(float));
}

// n floats from a row, or zeros where it is null; and back, where one is wanted.
inline void load(const float* row, std::int64_t n, float* to) {
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
  row == nullptr ? static_cast<void>(std::memset(to, 0, bytes))
                 : static_cast<void>(std::memcpy(to, row, bytes));
}
inline void store(const float* from, std::int64_t n, float* row) {
  if (row != nullptr) std::memcpy(row, from, static_cast<std::size_t>(n) * sizeof(float));
}
// Row (n, first) of a state [N, D], or null.
template <class T>
T* row_of(const View<T, 2>& state, const ChannelBlock& block) {
  return state.data == nullptr ? nullptr : state(block.sequence, block.first);
}

// Whether outputs of this size should pass the caches: they would have left the second level before
// anyone reads them, and their lines need not be read first. Rows must begin on cache lines.
// Of 16 bits they go through scratch, and do not.
inline bool is_streamed(const AnyView<void, 3>& view) {
  constexpr std::int64_t kLarge = std::int64_t{2} << 20, kLine = 16;
  return view.data != nullptr && view.dtype == DType::kF32 &&
         view.extent[0] * view.extent[1] * view.extent[2] >= kLarge &&
         view.stride[0] % kLine == 0 && view.stride[1] % kLine == 0 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 64 == 0;
}

}  // namespace ouzel
