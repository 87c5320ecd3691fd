// How well a model of bytes predicts a text, in bits per byte, read as a stream: once in windows
// that each start from the zero state, once with the state carried through the whole text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/model.h"

namespace ouzel {

struct EvaluateOptions {
  // Tokens that a window reads. Windows follow each other and together predict every token but the
  // first of the text, each from at most `window` tokens before it. 0: no such run.
  std::int64_t window = 256;
  // The run with the state carried. For models whose softmax layers keep every token its memory
  // grows with the text.
  bool carried = true;
  // Given the carried run's losses in nats, in order: of tokens 1 ... n - 1.
  std::function<void(std::span<const float>)> losses = {};
  // Told the tokens read so far.
  std::function<void(std::int64_t)> progress = {};
};

struct Evaluation {
  std::int64_t tokens = 0;
  // Mean over the tokens - 1 predictions; NaN where there are none or the run was not wanted.
  double bits_per_byte = 0;          // windows
  double bits_per_byte_carried = 0;  // one state
  std::vector<float> logits = {};    // of the carried run after the last token
};

// `read` fills the memory that it is given as far as it likes and returns the bytes written; 0 ends
// the text. Results do not depend on how the text comes in pieces; memory does not grow with it.
// Throws Error: kInvalidArgument (a model that is not one of bytes, a negative window), kCancelled,
// kBadFile (an empty text).
OUZEL_EXPORT Evaluation evaluate(Context& context, const Model& model,
                                 const std::function<std::size_t(std::span<char>)>& read,
                                 const EvaluateOptions& options = {});

}  // namespace ouzel
