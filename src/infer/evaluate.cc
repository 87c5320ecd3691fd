// Two passes over one stream, side by side: each collects tokens and hands the model calls whose
// borders are a function of the position alone.
#include "ouzel/evaluate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/infer/bytes_model.h"

namespace ouzel {
namespace {

// Tokens of a call: enough to keep all threads busy, and 2 MiB of logits.
constexpr std::int64_t kChunk = 2048;

// -log softmax(logits)[token], in nats.
double loss_of(std::span<const float> logits, std::int32_t token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum) - logits[static_cast<std::size_t>(token)];
}

class Pass {
 public:
  Pass(Context& context, const Model& model)
      : context_(context),
        model_(model),
        logits_(static_cast<std::size_t>(kChunk * kBytes)),
        losses_(static_cast<std::size_t>(kChunk)) {}
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  virtual ~Pass() = default;

  void push(std::int32_t token) {
    // A chunk waits for the token after it, which it predicts.
    if (static_cast<std::int64_t>(tokens_.size()) == length_) take(tokens_.size(), token);
    if (tokens_.empty()) length_ = next_length();
    tokens_.push_back(token);
  }
  void finish() {
    if (!tokens_.empty()) take(tokens_.size(), -1);
  }
  double bits_per_token() const {
    return nats_ / static_cast<double>(predictions_) / std::numbers::ln2;  // NaN without any
  }

 protected:
  // Tokens of the chunk that begins now, at most kChunk.
  virtual std::int64_t next_length() = 0;
  // The logits [tokens, kBytes] after each of `tokens`.
  virtual void forward(std::span<const std::int32_t> tokens, View<float, 2> logits) = 0;
  virtual void done(std::span<const float> losses, std::span<const float> last_logits) = 0;

  Context& context_;
  const Model& model_;
  Workspace workspace_;

 private:
  // `next`: the token after the chunk, -1 at the end of the text.
  void take(std::size_t count, std::int32_t next) {
    forward(tokens_, {logits_.data(), {static_cast<std::int64_t>(count), kBytes}});
    const std::size_t predicted = next < 0 ? count - 1 : count;
    const auto row = [this](std::size_t i) {
      return std::span<const float>(logits_).subspan(i * kBytes, kBytes);
    };
    for (std::size_t i = 0; i < predicted; ++i) {
      const double loss = loss_of(row(i), i + 1 < count ? tokens_[i + 1] : next);
      if (std::isnan(loss)) {
        throw Error(ErrorKind::kInvalidArgument,
                    fmt::format("evaluate: the logits after token {} are not numbers: the model's "
                                "weights are damaged or its training diverged",
                                predictions_));
      }
      losses_[i] = static_cast<float>(loss);
      nats_ += loss;
      ++predictions_;
    }
    done(std::span(losses_).first(predicted), row(count - 1));
    tokens_.clear();
  }

  std::vector<std::int32_t> tokens_;
  std::int64_t length_ = kChunk + 1;  // of the chunk that `tokens_` begins; none has begun
  std::vector<float> logits_, losses_;
  double nats_ = 0;
  std::int64_t predictions_ = 0;
};

class CarriedPass : public Pass {
 public:
  CarriedPass(Context& context, const Model& model,
              const std::function<void(std::span<const float>)>& losses)
      : Pass(context, model),
        state_(model.new_state()),
        keeps_every_token_(keeps_every_token(model)),
        losses_(losses) {}

  std::vector<float> take_last_logits() { return std::move(last_logits_); }

 private:
  std::int64_t next_length() override { return kChunk; }
  void forward(std::span<const std::int32_t> tokens, View<float, 2> logits) override {
    if (keeps_every_token_) make_room(state_, static_cast<std::int64_t>(tokens.size()));
    model_.forward(context_, workspace_, tokens, state_, logits, LogitRows::kAll);
  }
  void done(std::span<const float> losses, std::span<const float> last_logits) override {
    if (losses_ && !losses.empty()) losses_(losses);
    last_logits_.assign(last_logits.begin(), last_logits.end());
  }

  State state_;
  bool keeps_every_token_;
  const std::function<void(std::span<const float>)>& losses_;
  std::vector<float> last_logits_;
};

// Windows no longer than a chunk go side by side as a batch; a longer one passes its state through
// several chunks.
class WindowPass : public Pass {
 public:
  WindowPass(Context& context, const Model& model, std::int64_t window)
      : Pass(context, model), window_(window) {
    if (window > kChunk) state_ = model.new_state();
  }

 private:
  std::int64_t next_length() override {
    if (window_ <= kChunk) return kChunk / window_ * window_;
    if (in_window_ == window_) {
      state_.clear();
      in_window_ = 0;
    }
    return std::min(kChunk, window_ - in_window_);
  }
  void forward(std::span<const std::int32_t> tokens, View<float, 2> logits) override {
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (window_ > kChunk) {
      make_room(state_, count);
      model_.forward(context_, workspace_, tokens, state_, logits, LogitRows::kAll);
      in_window_ += count;
      return;
    }
    const std::int64_t whole = count / window_, rest = count % window_;
    if (whole != 0) {
      model_.forward(context_, workspace_, {tokens.data(), {whole, window_}}, {},
                     {logits.data, {whole * window_, kBytes}}, LogitRows::kAll);
    }
    if (rest != 0) {
      model_.forward(context_, workspace_, {tokens.data() + whole * window_, {1, rest}}, {},
                     {logits(whole * window_), {rest, kBytes}}, LogitRows::kAll);
    }
  }
  void done(std::span<const float>, std::span<const float>) override {}

  std::int64_t window_;
  State state_;
  std::int64_t in_window_ = 0;  // tokens of the window that the state has seen
};

}  // namespace

Evaluation evaluate(Context& context, const Model& model,
                    const std::function<std::size_t(std::span<char>)>& read,
                    const EvaluateOptions& options) {
  check_bytes_model(model, "evaluate");
  if (options.window < 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("evaluate: a window has 1 token or more (0: no windows), not {}",
                            options.window));
  }
  CarriedPass carried(context, model, options.losses);
  WindowPass windows(context, model, std::max<std::int64_t>(options.window, 1));
  Evaluation result;
  std::vector<char> piece(1 << 16);
  for (std::size_t got; (got = read(piece)) != 0;) {
    for (char byte : std::span(piece).first(got)) {
      const std::int32_t token = static_cast<unsigned char>(byte);
      if (options.carried) carried.push(token);
      if (options.window != 0) windows.push(token);
    }
    result.tokens += static_cast<std::int64_t>(got);
    if (options.progress) options.progress(result.tokens);
  }
  if (result.tokens == 0) {
    throw Error(ErrorKind::kBadFile, "evaluate: the text is empty: there is nothing to predict");
  }
  carried.finish();
  windows.finish();
  result.bits_per_byte = windows.bits_per_token();
  result.bits_per_byte_carried = carried.bits_per_token();
  result.logits = carried.take_last_logits();
  return result;
}

}  // namespace ouzel
