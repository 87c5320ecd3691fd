#include "ouzel/segments.h"

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {

Segments Segments::packed(std::span<const std::int64_t> cu_seqlens) {
  if (cu_seqlens.empty() || cu_seqlens[0] != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "cu_seqlens must start at 0 and hold one more entry than there are sequences");
  }
  Segments segments;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    const std::int64_t begin = cu_seqlens[i - 1];
    if (cu_seqlens[i] < begin) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("cu_seqlens must not decrease: entry {} is {}, the one before it {}",
                              i, cu_seqlens[i], begin));
    }
    segments.list.push_back({0, begin, cu_seqlens[i] - begin});
  }
  return segments;
}

Segments Segments::padded(std::span<const std::int64_t> lengths, std::int64_t tokens, bool left) {
  Segments segments;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] < 0 || lengths[b] > tokens) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("length {} of batch row {} is not in [0, {}]", lengths[b], b, tokens));
    }
    segments.list.push_back(
        {static_cast<std::int64_t>(b), left ? tokens - lengths[b] : 0, lengths[b]});
  }
  return segments;
}

Segments Segments::whole(std::int64_t batch, std::int64_t tokens) {
  Segments segments;
  for (std::int64_t b = 0; b < batch; ++b) segments.list.push_back({b, 0, tokens});
  return segments;
}

void Segments::check(const char* op, std::int64_t batch, std::int64_t tokens) const {
  std::vector<std::int64_t> end(static_cast<std::size_t>(batch), 0);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Segment& s = list[i];
    if (s.batch < 0 || s.batch >= batch || s.begin < 0 || s.length < 0 || s.begin > tokens ||
        s.length > tokens - s.begin) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("{}: segment {} (batch row {}, begin {}, length {}) is not inside the "
                      "arrays of {} rows of {} tokens",
                      op, i, s.batch, s.begin, s.length, batch, tokens));
    }
    std::int64_t& last = end[static_cast<std::size_t>(s.batch)];
    if (s.begin < last) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("{}: segment {} begins at {}, before the previous one of batch row {} ends "
                      "at {}; segments must increase and not overlap",
                      op, i, s.begin, s.batch, last));
    }
    last = s.begin + s.length;
  }
}

}  // namespace ouzel
