// Rows of tokens of any type of floats for kernels that take few: others go through scratch as
// float32, some tokens at a time, which stay in the second-level cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/segments.h"
#include "src/base/context_impl.h"
#include "src/base/half.h"
#include "src/kernels/elementwise.h"
#include "src/kernels/law_rows.h"
#include "src/ops/token_rows.h"

namespace ouzel {

// Tokens that go through scratch together.
inline constexpr std::int64_t kStagedTokens = 8;

// The type of all of these views that are there; float32 where they differ.
template <class... Views>
DType shared_type(const Views&... views) {
  DType type = DType::kF32;
  bool any = false, same = true;
  const auto see = [&](bool there, DType own) {
    if (!there) return;
    same = same && (!any || own == type);
    type = own;
    any = true;
  };
  (see(views.data != nullptr, views.dtype), ...);
  return same ? type : DType::kF32;
}
// Whether one of them is not of the type that a kernel takes.
template <class... Views>
bool are_staged(DType type, const Views&... views) {
  return (... || (views.data != nullptr && views.dtype != type));
}

// Calls body(part) for parts of a segment: all of it, or tokens that go through scratch together.
template <class Body>
void each_part(const Segment& segment, bool staged, const Body& body) {
  const std::int64_t step = staged ? kStagedTokens : std::max<std::int64_t>(1, segment.length);
  for (std::int64_t t = 0; t < segment.length; t += step) {
    body(Segment{segment.batch, segment.begin + t, std::min(step, segment.length - t)});
  }
}
// The same, the last part first.
template <class Body>
void each_part_back(const Segment& segment, bool staged, const Body& body) {
  const std::int64_t step = staged ? kStagedTokens : std::max<std::int64_t>(1, segment.length);
  for (std::int64_t t = (segment.length - 1) / step * step; t >= 0 && segment.length > 0;
       t -= step) {
    body(Segment{segment.batch, segment.begin + t, std::min(step, segment.length - t)});
  }
}

// The rows of one part, for a kernel that takes inputs and outputs of these types; rows of others
// have another type than the kernel's, which is then float32.
class StagedRows {
 public:
  StagedRows(Isa isa, Scratch& scratch, DType in = DType::kF32, DType out = DType::kF32)
      : isa_(isa), scratch_(scratch), mark_(scratch.mark()), in_(in), out_(out) {}
  StagedRows(const StagedRows&) = delete;
  StagedRows& operator=(const StagedRows&) = delete;

  // What rows of `columns` numbers of these views take of scratch.
  template <class... Views>
  static std::size_t bytes(std::int64_t tokens, std::int64_t columns, DType type,
                           const Views&... views) {
    const std::int64_t floats = tokens * pitch_of(columns);
    const std::size_t one = Scratch::rounded(static_cast<std::size_t>(floats) * sizeof(float));
    return (std::size_t{0} + ... + (are_staged(type, views) ? one : 0));
  }

  TokenRows<const void> in(const AnyRows<const void>& rows, std::int64_t tokens,
                           std::int64_t columns) {
    if (rows.dtype == in_ || !rows) return {rows.first, rows.stride};
    const TokenRows<float> wide = take(tokens, columns);
    load_rows(isa_, {.from = rows.first,
                     .dtype = rows.dtype,
                     .stride = rows.stride,
                     .rows = tokens,
                     .size = columns,
                     .to = wide.data,
                     .pitch = wide.stride});
    return {wide.data, wide.stride};
  }
  // What is written there is rounded by finish() to where it belongs.
  TokenRows<void> out(const AnyRows<void>& rows, std::int64_t tokens, std::int64_t columns) {
    if (rows.dtype == out_ || !rows) return {rows.first, rows.stride};
    const TokenRows<float> wide = take(tokens, columns);
    back_[backs_++] = {.from = wide.data,
                       .pitch = wide.stride,
                       .rows = tokens,
                       .size = columns,
                       .to = rows.first,
                       .dtype = rows.dtype,
                       .stride = rows.stride};
    return {wide.data, wide.stride};
  }
  // For kernels of float32.
  TokenRows<const float> wide_in(const AnyRows<const void>& rows, std::int64_t tokens,
                                 std::int64_t columns) {
    const TokenRows<const void> wide = in(rows, tokens, columns);
    return {static_cast<const float*>(wide.data), wide.stride};
  }
  TokenRows<float> wide_out(const AnyRows<void>& rows, std::int64_t tokens, std::int64_t columns) {
    const TokenRows<void> wide = out(rows, tokens, columns);
    return {static_cast<float*>(wide.data), wide.stride};
  }
  // At the end of a part: its scratch is free for the next.
  void finish() {
    for (std::int64_t i = 0; i < backs_; ++i) store_rows(isa_, back_[i]);
    backs_ = 0;
    scratch_.rewind(mark_);
  }

 private:
  static std::int64_t pitch_of(std::int64_t columns) { return (columns + 15) / 16 * 16; }
  TokenRows<float> take(std::int64_t tokens, std::int64_t columns) {
    const std::int64_t pitch = pitch_of(columns);
    return {scratch_.take<float>(tokens * pitch), pitch};
  }

  Isa isa_;
  Scratch& scratch_;
  std::size_t mark_;
  DType in_, out_;
  StoreRowsArgs back_[5];  // as many as any kernel writes
  std::int64_t backs_ = 0;
};

}  // namespace ouzel
