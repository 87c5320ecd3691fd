// What an operator costs by count, beside softmax attention of the same sizes: operations, bytes
// and state, per token, and the lengths where the two cross.
#pragma once

#include <cstdint>

#include "src/ops/registry.h"

namespace ouzel {

struct ExplainSizes {
  std::int64_t tokens = 4096;  // T
  std::int64_t keys = 64;      // K
  std::int64_t values = 64;    // V
  std::int64_t heads = 16;     // H, of queries, keys and values alike
};

// Per token and all heads. Projections are those of a layer of width H V: q, k, v and the output.
struct TokenCost {
  double projections = 0;  // floating-point operations
  double mixing = 0;       // of the state, or, quadratic, of scores and weighted sums
  double bytes = 0;  // of the operator: rows in and out, gradients, and the state or the cache
};

struct MechanismCost {
  TokenCost training, prefill, decode;
};

struct Explanation {
  MechanismCost law, softmax;
  double state_bytes = 0;  // of one sequence, whatever its length
  // Of softmax attention over T tokens: weights held at once by the naive form, by the online form,
  // and the cache of keys and values.
  double naive_bytes = 0, online_bytes = 0, cache_bytes = 0;
  // Lengths from which the law is cheaper by count.
  double training_crossing = 0, prefill_crossing = 0, decode_crossing = 0, memory_crossing = 0;
};

// Throws Error(kInvalidArgument) for an operator that keeps no recurrent state, and for sizes below
// 1.
Explanation explain(const OperatorInfo& law, const ExplainSizes& sizes);

}  // namespace ouzel
