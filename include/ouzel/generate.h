// Generation: a Sampler that picks the next token, and a Generator that reads a prompt and goes on
// from it, token by token. A token is a byte (vocab_size 256).
//
//     Generator generator(context, model, {.temperature = 0});
//     generator.read("In the beginning");
//     generator.generate(300, [](std::string_view text) { std::cout << text; return true; });
//     generator.state().save("state.safetensors");
//
// All results are functions of the stream of tokens alone: neither how a prompt was cut into pieces
// nor whether a run was stopped, saved and gone on with changes a bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/model.h"

namespace ouzel {

// How the next token is picked, in this order: the repetition penalty changes the logits; they are
// divided by the temperature; top-k, top-p and min-p each drop tokens, on the probabilities that
// the one before left; one of the rest is drawn.
struct SamplingOptions {
  double temperature = 0.8;  // 0: the most likely token, the lowest of equals (greedy)
  std::int64_t top_k = 0;    // keep the k most likely; 0: all
  double top_p = 1;          // keep the fewest, most likely first, that have this share together
  double min_p = 0;          // keep those at least this times as likely as the most likely
  // Logits of tokens among the last `repetition_window` of the stream (prompt included) are divided
  // by this if positive, else multiplied (arXiv:1909.05858); 1: none.
  double repetition_penalty = 1;
  std::int64_t repetition_window = 64;
  // With the token's position in the stream, all that a draw depends on.
  std::uint64_t seed = 1;
  // Generation ends when one of these texts has been generated; it is not part of the output.
  std::vector<std::string> stop = {};

  // Throws Error(kInvalidArgument) naming the member that does not fit.
  OUZEL_EXPORT void check() const;
  friend bool operator==(const SamplingOptions&, const SamplingOptions&) = default;
};

// Picks tokens. Knows of the stream what the pick depends on: its length and last tokens.
class OUZEL_EXPORT Sampler {
 public:
  explicit Sampler(SamplingOptions options = {});
  // Goes on at a position of a stream whose last tokens are `recent`.
  Sampler(SamplingOptions options, std::int64_t position, std::vector<std::int32_t> recent);

  const SamplingOptions& options() const { return options_; }
  // The next token of the stream, read or sampled.
  void accept(std::int32_t token);
  // Tokens accepted so far.
  std::int64_t position() const { return position_; }
  // The last of them, at most options().repetition_window.
  const std::vector<std::int32_t>& recent() const { return recent_; }
  // A token by its logits. Throws Error(kInvalidArgument) for NaN, +inf, or nothing but -inf.
  std::int32_t sample(std::span<const float> logits);

 private:
  struct Candidate {
    std::int32_t token;
    double logit;   // after penalty and temperature, less the largest
    double weight;  // exp(logit)
  };

  SamplingOptions options_;
  std::int64_t position_ = 0;
  std::vector<std::int32_t> recent_;
  std::vector<Candidate> candidates_;
};

// Why Generator::generate returned.
enum class Finish {
  kLength,   // all tokens that were asked for
  kStop,     // a stop text
  kCallback  // the callback said so
};

struct GenerateStatistics {
  std::int64_t prompt_tokens = 0;  // processed, in chunks
  double prompt_seconds = 0;
  std::int64_t generated_tokens = 0;  // sampled
  std::int64_t steps = 0;             // of these processed, one by one
  double step_seconds = 0;            // of steps and picks; the callback excluded
};

// One stream of tokens through one model. Holds a reference to the context.
//
// Tokens are processed in chunks whose borders are multiples of kChunk tokens from the start of the
// stream. A chunk waits until a token after it arrives or generation needs its logits, so up to
// kChunk tokens are still waiting after `read`; the last sampled token waits too. They are saved
// with the state, as the rest of what the generator knows (State::sampler).
class OUZEL_EXPORT Generator {
 public:
  static constexpr std::int64_t kChunk = 512;
  // What a stream that began with no prompt reads first: a newline.
  static constexpr std::int32_t kStart = '\n';

  // From the zero state. Throws Error(kInvalidArgument) for a model that is not one of bytes.
  Generator(Context& context, const Model& model, const SamplingOptions& options = {});
  // Goes on from a state. Bit for bit what the generator that `state` came from would do if it had
  // gone on, with the options in `sampling_of(state)`; other options hold from the next token on,
  // except that a longer repetition window fills as tokens arrive. Throws Error(kBadFile) if
  // State::sampler is damaged.
  Generator(Context& context, const Model& model, State state, const SamplingOptions& options);
  Generator(Context& context, const Model& model, State state);
  ~Generator();
  Generator(Generator&&) noexcept;
  Generator& operator=(Generator&&) noexcept;

  // The options a state was saved with; the defaults if it came from no generator.
  static SamplingOptions sampling_of(const State& state);
  // The tokens that the stream behind a state has, those still waiting included.
  static std::int64_t position_of(const State& state);

  // Appends to the prompt. Any split of a text into pieces is the same; memory does not grow with
  // the length. If the context cancels it, Error(kCancelled) is thrown and the generator is of no
  // use any more.
  void read(std::string_view text);

  // Generates up to `tokens` tokens. `write` is called after each with the text that is certain,
  // often one byte, none while it may be the beginning of a stop text; false ends the call after
  // this token. It may ask for state and position; reading or generating with this generator from
  // there throws Error(kInvalidArgument). Throws as `read`; Error(kInvalidArgument) also when the
  // state came from no generator and there is no prompt: the token to go on from is not known.
  Finish generate(std::int64_t tokens, const std::function<bool(std::string_view)>& write);

  // The text that is held back because a stop text may begin with it. It stays in the state, and
  // the generation that goes on begins with it; what is taken is gone from there.
  std::string take_held_text();

  // Tokens of the stream: read and generated.
  std::int64_t position() const;
  // All that is needed to go on: to save, to copy, or to start other generators from.
  State state() const;
  std::size_t state_bytes() const;  // of memory, see State::bytes
  const GenerateStatistics& statistics() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ouzel
