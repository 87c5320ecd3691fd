// Decays of a chunk of tokens, one number each, folded into its rows as Fold does with a constant
// one: with P_t the product of the decays since a block of tokens began, S' = sum_t (k_t / P_t)
// v_t^T and o_t = P_t S'^T q_t. A block ends before P would fall below 2^-60; a decay below e^-20
// stands alone, before a block. Where blocks end depends on earlier decays only.
#pragma once

#include <cstdint>

#include "src/kernels/recurrence.h"

namespace ouzel {

struct ChunkDecays {
  float read[kChunk];   // P_t
  float write[kChunk];  // 1 / P_t
  TileBlock blocks[kChunk];
  float leave;
  // Of each block: the decay that stands before it (1, or one of its first token that is not part
  // of P), and the logarithm of the product of the others.
  float alone[kChunk];
  double log[kChunk];

  // Log decays at most 0; -inf drops the state, even NaN.
  void fold(Isa isa, const float* log_decays, std::int64_t tokens);
};

}  // namespace ouzel
