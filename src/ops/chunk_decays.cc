#include "src/ops/chunk_decays.h"

#include <algorithm>
#include <limits>

#include "src/kernels/recurrence_block.h"

namespace ouzel {

void ChunkDecays::fold(Isa isa, const float* log_decays, std::int64_t tokens) {
  constexpr double kLeast = -60 * 0.6931471805599453;
  constexpr float kAlone = -20;
  // The logarithm of P in two parts: a rounded sum of 40 would be off by 2e-6.
  float high[kChunk] = {}, low[kChunk] = {};
  std::int64_t n = 0, begin = 0;
  double sum = 0;
  const auto end_block = [&](std::int64_t end) {
    blocks[n].tokens = end - begin;
    log[n] = sum;
    begin = end;
  };
  alone[0] = 0;  // its logarithm, for now
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float g = log_decays[t];
    sum += static_cast<double>(g);
    const bool stands_alone = g < kAlone;
    if (stands_alone || sum < kLeast) {
      sum -= static_cast<double>(g);
      if (t != 0) {
        end_block(t);
        ++n;
      }
      alone[n] = stands_alone ? g : 0;
      sum = stands_alone ? 0 : static_cast<double>(g);
    }
    high[t] = static_cast<float>(sum);
    low[t] = static_cast<float>(sum - static_cast<double>(high[t]));
  }
  end_block(tokens);
  decay_factors(isa, kChunk, high, read);
  for (std::int64_t t = 0; t < kChunk; ++t) {
    read[t] += read[t] * low[t];
    write[t] = 1 / read[t];
  }
  decay_factors(isa, n + 1, alone, alone);
  leave = 1;
  for (std::int64_t i = 0, end = 0; i <= n; ++i) {
    // Rounding to 0 must not clear: the state may hold NaN.
    const float enter = leave * alone[i];
    blocks[i].enter = alone[i] == 0 ? 0 : std::max(enter, std::numeric_limits<float>::min());
    end += blocks[i].tokens;
    leave = read[end - 1];
  }
}

}  // namespace ouzel
