// What a generator knows beside the model's state, as the bytes in State::sampler.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ouzel/generate.h"

namespace ouzel {

struct Session {
  SamplingOptions options;
  std::int64_t position = 0;          // tokens of the stream, those waiting included
  std::vector<std::int32_t> recent;   // the last of them, at most options.repetition_window
  std::vector<std::int32_t> waiting;  // not yet processed by the model
  std::string certain;                // generated, not yet given out
  std::string held;                   // generated, may be the beginning of a stop text

  // The same number of bytes for the same options, but for the texts.
  std::vector<std::uint8_t> encode() const;
  // Of a state at `position`. Throws Error(kBadFile) if the bytes are damaged or of another
  // position. A state without bytes came from no generator: default options, nothing waiting.
  static Session decode(std::span<const std::uint8_t> bytes, std::int64_t position);
};

}  // namespace ouzel
