// The outputs of a scan that gives its states, for its backward pass: where they are, or computed
// again, a block of tokens at a time, from the states at the begins of blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "src/ops/channel_blocks.h"

namespace ouzel {

class ScanHistory {
 public:
  // Of sequences of at most `longest` tokens, `width` channels a task. `given`: the outputs are.
  ScanHistory(bool given, std::int64_t longest, std::int64_t width)
      : given_(given),
        kept_(given ? 0 : 2 * width * ((longest + kBlock - 1) / kBlock)),
        block_(given ? 0 : kBlock * width),
        state_(2 * width) {}
  std::size_t bytes() const { return scratch_of(kept_) + scratch_of(block_) + scratch_of(state_); }

  struct Memory {
    float *kept, *block, *state;
  };
  Memory take(Scratch& scratch) const {
    return {scratch.take<float>(kept_), scratch.take<float>(block_), scratch.take<float>(state_)};
  }

  // Calls back(block, outputs, before) for blocks of the segment, the last first; `before` is the
  // state before the block. forward(block, outputs, high, low) takes high + low, the state before
  // a block, to that after it. `initial` and `residue` may be null.
  template <class Forward, class Back>
  void run(const Memory& memory, const Segment& segment, std::int64_t channels,
           TokenRows<const float> given, const float* initial, const float* residue,
           const Forward& forward, const Back& back) const {
    if (given_) {
      load(initial, channels, memory.state);
      if (segment.length > 0) back(segment, given, memory.state);
      return;
    }
    float *high = memory.state, *low = high + channels;
    const TokenRows<float> rows = {memory.block, channels};
    const auto block_at = [&](std::int64_t n) {
      const std::int64_t first = n * kBlock;
      return Segment{segment.batch, segment.begin + first,
                     std::min(kBlock, segment.length - first)};
    };
    const std::int64_t count = (segment.length + kBlock - 1) / kBlock;
    load(initial, channels, high);
    load(residue, channels, low);
    for (std::int64_t n = 0; n < count; ++n) {
      store(high, 2 * channels, memory.kept + 2 * n * channels);
      forward(block_at(n), rows, high, low);
    }
    for (std::int64_t n = count; n-- > 0;) {
      const float* before = memory.kept + 2 * n * channels;
      if (n + 1 < count) {
        load(before, 2 * channels, high);
        forward(block_at(n), rows, high, low);
      }
      back(block_at(n), TokenRows<const float>{rows.data, rows.stride}, before);
    }
  }

 private:
  static constexpr std::int64_t kBlock = 64;

  bool given_;
  std::int64_t kept_, block_, state_;
};

}  // namespace ouzel
