// What tests of models share: logits of a sequence in pieces, how far they are off, errors'
// sentences.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/model.h"
#include "tests/compare.h"

namespace ouzel::test {

// Logits of one sequence, fed in pieces of the given lengths.
inline std::vector<float> run_pieces(const Model& model, Context& context,
                                     const std::vector<std::int32_t>& tokens,
                                     const std::vector<std::int64_t>& pieces, State& state) {
  const std::int64_t vocab = model.config().vocab_size;
  std::vector<float> logits(tokens.size() * static_cast<std::size_t>(vocab));
  Workspace workspace;
  std::int64_t at = 0;
  for (std::int64_t length : pieces) {
    model.forward(
        context, workspace,
        std::span(tokens).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(length)),
        state, {logits.data() + at * vocab, {length, vocab}}, LogitRows::kAll);
    at += length;
  }
  EXPECT_EQ(at, std::ssize(tokens));
  return logits;
}

inline std::vector<float> run_whole(const Model& model, Context& context,
                                    const std::vector<std::int32_t>& tokens) {
  State state = model.new_state(std::ssize(tokens));
  return run_pieces(model, context, tokens, {std::ssize(tokens)}, state);
}

// RMS of the difference over RMS of the truth.
inline double error(const std::vector<float>& got, const std::vector<float>& truth) {
  std::vector<float> difference;
  for (std::size_t i = 0; i < truth.size(); ++i) difference.push_back(got[i] - truth[i]);
  return rms(difference) / rms(truth);
}

inline std::string message_of(const std::function<void()>& call, ErrorKind kind) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  }
}

}  // namespace ouzel::test
