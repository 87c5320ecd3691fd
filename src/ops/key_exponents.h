// The running maximum of maps like exp: S and z are kept as multiples of 2^c, and c grows with the
// keys, so that nothing overflows and no denominator underflows. Changing c is exact.
//
//     c_t = max(c_(t-1), e_t)   at the first of each 64 tokens of a sequence
//     c_t = e_t                 where e_t > c_(t-1) + 32
//     c_t = c_(t-1)             else
//
// with e_t the exponent of the largest feature of key t: features of a chunk of one c are at most
// 2^32, and c depends on the past alone. (A maximum over a chunk would let a huge token wipe out
// those before it.)
#pragma once

#include <cstdint>

#include "src/ops/recurrence_shape.h"

namespace ouzel {

inline constexpr float kExponentHeadroom = 32;

// Zeros are multiples of any power of two: they leave the choice to the next key.
bool is_zero_state(const StateView& view, std::int64_t n, std::int64_t head);

class KeyExponents {
 public:
  // Nothing for maps without a running maximum.
  void compute(Context& context, const RecurrenceSpec& spec, const RecurrenceShape& shape,
               const RecurrenceInputs& inputs);
  explicit operator bool() const { return memory_.data() != nullptr; }

  // c of every key that a state reads, in the order of a pass; absent where there are none.
  TokenValues of(const Segment& keys, std::int64_t state, bool backwards) const;
  // c of the final state, that of the last token, as a number for every key.
  TokenValues final(std::int64_t n, std::int64_t state) const { return {ends(n, state) + 1, 0}; }
  float initial(std::int64_t n, std::int64_t state) const { return *ends(n, state); }

 private:
  // Exponents of the initial and of the final state.
  float* ends(std::int64_t n, std::int64_t state) const {
    return memory_.f32() + ends_ + 2 * (n * heads_ + state);
  }

  std::int64_t tokens_ = 0, heads_ = 0, ends_ = 0;
  Buffer memory_;  // [B, HV, T], then [N, HV, 2]
};

// Rows [t, t + n) of a pass that are packed and run together: up to the next multiple of 64, as
// many as share one c.
std::int64_t chunk_tokens(std::int64_t t, std::int64_t length, const TokenValues& exponents);

}  // namespace ouzel
