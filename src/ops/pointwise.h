// Row-wise small operators of a language model: SwiGLU, rotary positions, embedding, cross entropy,
// residual additions. All run on the context's threads and depend on the shape alone in their
// order.
#pragma once

#include <cstdint>
#include <span>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// y = silu(gate) * up, all [R, D].
void swiglu(Context& context, View<const float, 2> gate, View<const float, 2> up, View<float, 2> y);
// dgate may be gate's memory and dup may be up's.
void swiglu_backward(Context& context, View<const float, 2> gate, View<const float, 2> up,
                     View<const float, 2> dy, View<float, 2> dgate, View<float, 2> dup);

// Rotary positions, half-split (not interleaved): pairs (x[i], x[i + D/2]) turned by position *
// base^(-2i/D). x [R, H, D] in place, positions[R] (< 2^31); inverse turns back, which is also the
// gradient. Angles are formed in float64: exact at any position.
void rotary(Context& context, View<float, 3> x, std::span<const std::int64_t> positions,
            double base, bool inverse);

// y[r] = table[tokens[r]]; the caller has checked that tokens are in range.
void embed(Context& context, std::span<const std::int32_t> tokens, View<const float, 2> table,
           View<float, 2> y);
// dtable[tokens[r]] += dy[r], in order of r.
void embed_backward(Context& context, std::span<const std::int32_t> tokens, View<const float, 2> dy,
                    View<float, 2> dtable);

// losses[r] = logsumexp(logits[r]) - logits[r][targets[r]] in nats; targets of -1 give 0 (and
// gradients of 0), the caller has checked that the others are in range. If dlogits is dlogits is
// not null it receives weight * d losses[r] / d logits[r] (it may be logits' memory).
void cross_entropy(Context& context, View<const float, 2> logits,
                   std::span<const std::int32_t> targets, float weight, float* losses,
                   View<float, 2>* dlogits);

// y += x, [R, D].
void add(Context& context, View<const float, 2> x, View<float, 2> y);

}  // namespace ouzel
