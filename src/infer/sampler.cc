// Picks the next token from logits: the penalty of arXiv:1909.05858, temperature, top-k, top-p
// (arXiv:1904.09751), min-p (arXiv:2407.01082), then one draw by inversion of the cumulated
// weights.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "src/base/random.h"

namespace ouzel {
namespace {

constexpr std::int64_t kMaxWindow = 1 << 16;
constexpr std::size_t kMaxStops = 64, kMaxStopBytes = 4096;

void require(bool holds, const std::string& what, const std::string& found) {
  if (holds) return;
  throw Error(ErrorKind::kInvalidArgument, fmt::format("sampling: {}, not {}", what, found));
}

bool within(double x, double low, double high) { return x >= low && x <= high; }  // NaN: false

}  // namespace

void SamplingOptions::check() const {
  require(within(temperature, 0, 1e6), "the temperature is from 0 (greedy) to 1,000,000",
          fmt::format("{}", temperature));
  require(top_k >= 0, "top-k is 0 (all) or more", fmt::format("{}", top_k));
  require(within(top_p, 0, 1), "top-p is from 0 to 1 (all)", fmt::format("{}", top_p));
  require(within(min_p, 0, 1), "min-p is from 0 (all) to 1", fmt::format("{}", min_p));
  require(within(repetition_penalty, 1e-3, 1e3),
          "the repetition penalty is from 0.001 to 1000 (1: none)",
          fmt::format("{}", repetition_penalty));
  require(repetition_window >= 0 && repetition_window <= kMaxWindow,
          fmt::format("the repetition window is from 0 to {} tokens", kMaxWindow),
          fmt::format("{}", repetition_window));
  require(stop.size() <= kMaxStops, fmt::format("at most {} stop texts are taken", kMaxStops),
          fmt::format("{}", stop.size()));
  for (const std::string& text : stop) {
    require(!text.empty() && text.size() <= kMaxStopBytes,
            fmt::format("a stop text has from 1 to {} bytes", kMaxStopBytes),
            fmt::format("{}", text.size()));
  }
}

Sampler::Sampler(SamplingOptions options) : Sampler(std::move(options), 0, {}) {}

Sampler::Sampler(SamplingOptions options, std::int64_t position, std::vector<std::int32_t> recent)
    : options_(std::move(options)), position_(position), recent_(std::move(recent)) {
  options_.check();
  const auto window = static_cast<std::size_t>(options_.repetition_window);
  if (recent_.size() > window) {
    recent_.erase(recent_.begin(), recent_.end() - static_cast<std::ptrdiff_t>(window));
  }
  recent_.reserve(window + 1);
}

void Sampler::accept(std::int32_t token) {
  recent_.push_back(token);
  if (recent_.size() > static_cast<std::size_t>(options_.repetition_window)) {
    recent_.erase(recent_.begin());  // a window is short: moving it costs less than a ring's care
  }
  ++position_;
}

std::int32_t Sampler::sample(std::span<const float> logits) {
  candidates_.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("sampling: the logit of token {} at position {} is {}: the model's "
                              "weights are damaged or its training diverged",
                              i, position_, logits[i]));
    }
    candidates_[i] = {static_cast<std::int32_t>(i), logits[i], 0};
  }
  if (options_.repetition_penalty != 1) {
    for (std::int32_t token : recent_) {
      require(token >= 0 && static_cast<std::size_t>(token) < logits.size(),
              fmt::format("tokens are from 0 to {}", logits.size() - 1), fmt::format("{}", token));
      // From the raw logit, so that a token that stands twice in the window is penalised once.
      const double logit = logits[static_cast<std::size_t>(token)];
      candidates_[static_cast<std::size_t>(token)].logit =
          logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    }
  }
  const auto best = std::max_element(
      candidates_.begin(), candidates_.end(),
      [](const Candidate& a, const Candidate& b) { return a.logit < b.logit; });  // first of equals
  if (best == candidates_.end() || std::isinf(best->logit)) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("sampling: no token has a finite logit at position {}", position_));
  }
  if (options_.temperature == 0) return best->token;

  const double largest = best->logit;
  for (Candidate& c : candidates_) {
    c.logit = (c.logit - largest) / options_.temperature;
    c.weight = std::exp(c.logit);
  }
  std::size_t count = candidates_.size();
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  const auto total = [&] {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += candidates_[i].weight;
    return sum;
  };
  if (options_.top_k != 0) {
    count = std::min(count, static_cast<std::size_t>(options_.top_k));
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(count),
                      candidates_.end(), more_likely);
  } else if (options_.top_p < 1) {
    std::sort(candidates_.begin(), candidates_.end(), more_likely);
  }
  if (options_.top_p < 1) {
    const double wanted = options_.top_p * total();
    double sum = 0;
    std::size_t kept = 0;
    do {
      sum += candidates_[kept++].weight;
    } while (kept < count && sum < wanted);
    count = kept;
  }
  if (options_.min_p > 0) {  // the most likely has weight 1
    const auto end = std::remove_if(candidates_.begin(),
                                    candidates_.begin() + static_cast<std::ptrdiff_t>(count),
                                    [&](const Candidate& c) { return c.weight < options_.min_p; });
    count = static_cast<std::size_t>(end - candidates_.begin());
  }

  Random random(options_.seed, 0, 2 * static_cast<std::uint64_t>(position_));
  const double threshold = random.uniform() * total();
  double sum = 0;
  std::int32_t last = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (candidates_[i].weight == 0) continue;
    sum += candidates_[i].weight;
    last = candidates_[i].token;
    if (sum > threshold) break;
  }
  return last;
}

}  // namespace ouzel
