#include "src/ops/key_exponents.h"

#include <algorithm>

#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {
bool is_zero_state(const StateView& view, std::int64_t n, std::int64_t head) {
  const SequenceState& s = view.sequences[static_cast<std::size_t>(n)];
  for (std::int64_t f = 0; f < view.keys; ++f) {
    const float* row = s.s + head * view.head_stride + f * view.key_stride;
    if (std::any_of(row, row + view.values, [](float x) { return x != 0; })) return false;
    if (s.z != nullptr && s.z[head * view.z_head_stride + f] != 0) return false;
  }
  return true;
}

void KeyExponents::compute(Context& context, const RecurrenceSpec& spec,
                           const RecurrenceShape& shape, const RecurrenceInputs& inputs) {
  if (!info_of(spec.map.kind).running_maximum) return;
  tokens_ = shape.key_tokens;
  heads_ = shape.value_heads;
  ends_ = shape.batch * heads_ * tokens_;
  memory_ = Buffer(static_cast<std::size_t>(ends_ + 2 * shape.sequences * heads_) * sizeof(float));
  ScratchCounter counter;
  HeadMap(counter, spec.map, shape.map, MapUse::kForward);
  context.impl().reserve(counter.bytes());
  context.impl().run(shape.sequences * shape.key_heads, [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t n = task / shape.key_heads, key_head = task % shape.key_heads;
    const Segment segment = shape.key_segment(n);
    const Rows<const float> k = rows_of(inputs.k, segment, key_head, spec.reverse);
    HeadMap map(scratch, spec.map, shape.map, MapUse::kForward);
    map.bind(context.isa(), key_weights(spec.map), key_head, {});
    const std::int64_t first = key_head * shape.states_per_key();
    for (std::int64_t state = first; state < first + shape.states_per_key(); ++state) {
      float* both = ends(n, state);
      both[0] = both[1] = kNoExponent;
      const StateView& from = inputs.initial_state;
      if (!from.present()) continue;
      const float* exponent = from.sequences[static_cast<std::size_t>(n)].exponent;
      const float c = exponent != nullptr ? exponent[state] : 0;
      if (segment.length == 0 || !is_zero_state(from, n, state)) both[0] = both[1] = c;
    }
    for (std::int64_t t = 0; t < segment.length; t += kChunk) {
      check_cancelled();
      const std::int64_t tokens = std::min(segment.length - t, kChunk);
      const float* own = map.own_exponents(k, t, tokens);
      for (std::int64_t state = first; state < first + shape.states_per_key(); ++state) {
        float& c = ends(n, state)[1];
        const TokenValues out = of(segment, state, spec.reverse);
        for (std::int64_t i = 0; i < tokens; ++i) {
          if (own[i] > c + (i == 0 ? 0 : kExponentHeadroom)) c = own[i];
          out[t + i] = c;
        }
      }
    }
  });
}

TokenValues KeyExponents::of(const Segment& keys, std::int64_t state, bool backwards) const {
  if (memory_.data() == nullptr) return {};
  float* row = memory_.f32() + (keys.batch * heads_ + state) * tokens_ + keys.begin;
  return backwards ? TokenValues{row + keys.length - 1, -1} : TokenValues{row, 1};
}

std::int64_t chunk_tokens(std::int64_t t, std::int64_t length, const TokenValues& exponents) {
  const std::int64_t most = std::min(length - t, kChunk - t % kChunk);
  std::int64_t n = exponents ? 1 : most;
  while (n < most && exponents[t + n] == exponents[t]) ++n;
  return n;
}

}  // namespace ouzel
