// Which rows of [B, T, ...] arrays are sequences. Rows outside every segment are never read and
// their outputs (and gradients) are 0.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ouzel/export.h"

namespace ouzel {

struct Segment {
  std::int64_t batch = 0;   // row of the batch, in [0, B)
  std::int64_t begin = 0;   // first token, in [0, T]
  std::int64_t length = 0;  // tokens; 0 is allowed: the state passes through
};

// N sequences; states have N entries in this order. Segments must lie inside the arrays, and within
// a batch row they must increase and not overlap.
struct OUZEL_EXPORT Segments {
  std::vector<Segment> list = {};

  // cu_seqlens = [0, ..., T]: N sequences packed along T of a batch of one. Throws
  // Error(kInvalidArgument) if it does not start at 0 or decreases.
  static Segments packed(std::span<const std::int64_t> cu_seqlens);
  // One sequence per batch row, of the given lengths; left = padding stands before the tokens.
  static Segments padded(std::span<const std::int64_t> lengths, std::int64_t tokens,
                         bool left = false);
  // One sequence per batch row, all of it: what an operator assumes when it is given none.
  static Segments whole(std::int64_t batch, std::int64_t tokens);

  // Throws Error(kInvalidArgument), naming `op`, unless every segment lies inside [batch, tokens]
  // and those of a row increase without overlap.
  void check(const char* op, std::int64_t batch, std::int64_t tokens) const;
  std::int64_t count() const { return static_cast<std::int64_t>(list.size()); }
};

}  // namespace ouzel
