// Kernels of the elementwise scans: the tokens of one sequence over a range of channels. Rows are a
// pointer to those channels of the first token, and the stride between tokens. Those of void have
// the type that the range says.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

template <class T>
struct TokenRows {
  T* data = nullptr;  // null: not given, or not wanted
  std::int64_t stride = 0;
};

struct TokenRange {
  std::int64_t tokens = 0, channels = 0;
  // Rows of float32 outputs begin on cache lines and are written past the caches.
  bool stream = false;
  // float32, bfloat16 or float16: of inputs, and of outputs, which are float32 or as inputs.
  DType in = DType::kF32, out = DType::kF32;
};

// h' = e^g h + x, o = h'. `high` + `low` is the state [channels], updated. Returns the largest g,
// at least 0.
float hgrn_forward(Isa isa, const TokenRange& range, TokenRows<const void> x,
                   TokenRows<const void> g, TokenRows<void> o, float* high, float* low);
// From dh [channels] of the last state, in two parts, to that of the first. `h` are the outputs of
// the forward pass, `h0` the state before them.
void hgrn_backward(Isa isa, const TokenRange& range, TokenRows<const void> g,
                   TokenRows<const float> h, const float* h0, TokenRows<const void> d_o,
                   TokenRows<void> dx, TokenRows<void> dg, float* high, float* low);

// h' = e^L h + m sigmoid(i) x with L = -rate sigmoid(r) and m = sqrt(1 - e^(2L)), 1 at the first
// token if `first_is_one`; rate [channels].
struct RgLruRows {
  TokenRows<const void> x, r, i;
  const float* rate = nullptr;
  bool first_is_one = false;
};
void rg_lru_forward(Isa isa, const TokenRange& range, const RgLruRows& rows, TokenRows<void> o,
                    float* high, float* low);
struct RgLruGradRows {
  TokenRows<void> x, r, i;
  float *rate_high = nullptr, *rate_low = nullptr;  // [channels], added to
};
void rg_lru_backward(Isa isa, const TokenRange& range, const RgLruRows& rows,
                     TokenRows<const float> h, const float* h0, TokenRows<const void> d_o,
                     const RgLruGradRows& grads, float* high, float* low);

// The state of rwkv4, six parts of [channels]: alpha, beta, eps, and what rounding took from each.
// The true numerator is alpha e^eps, the denominator beta e^eps.
inline constexpr std::int64_t kRwkv4Parts = 6;
struct Rwkv4State {
  Rwkv4State(float* parts, std::int64_t channels)
      : alpha(parts),
        beta(parts + channels),
        eps(parts + 2 * channels),
        alpha_low(parts + 3 * channels),
        beta_low(parts + 4 * channels),
        eps_low(parts + 5 * channels) {}
  float *alpha, *beta, *eps, *alpha_low, *beta_low, *eps_low;
};
// decay (-e^w), u and now = e^(decay + u), [channels]. Where one of those is beyond e^40 or below
// e^-40, now is null and the outputs take exponentials of their own.
struct Rwkv4Rows {
  TokenRows<const void> k, v;
  const float *decay = nullptr, *u = nullptr, *now = nullptr;
};
// `o` may be null.
void rwkv4_forward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows, TokenRows<void> o,
                   const Rwkv4State& state);
struct Rwkv4GradRows {
  TokenRows<float> k, v;
  float *decay_high = nullptr, *decay_low = nullptr;  // [channels], added to
  float *u_high = nullptr, *u_low = nullptr;
};
// Of at most this many tokens, so that the work space stays in the first-level cache (28 KiB).
inline constexpr std::int64_t kRwkv4Tokens = 32, kRwkv4History = 7;
inline constexpr std::int64_t kRwkv4Work = kRwkv4Tokens * kRwkv4History * 2 * 16;
// Rows of float32. `start` is the state before the first token; `state` is the gradient of the
// last, and becomes that of the first. `work` is aligned to vectors.
void rwkv4_backward(Isa isa, const TokenRange& range, const Rwkv4Rows& rows,
                    const Rwkv4State& start, TokenRows<const float> d_o, const Rwkv4GradRows& grads,
                    const Rwkv4State& state, float* work);

}  // namespace ouzel
