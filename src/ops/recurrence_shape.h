// Sizes, head groups, rows and folded decays of one call of the recurrence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ouzel/segments.h"
#include "src/kernels/recurrence.h"
#include "src/ops/head_map.h"
#include "src/ops/recurrence.h"
#include "src/ops/token_rows.h"

namespace ouzel {

struct RecurrenceShape {
  std::int64_t batch = 0, tokens = 0;
  std::int64_t key_tokens = 0;  // of k and v: other than `tokens` only without causality
  std::int64_t query_heads = 0, key_heads = 0, value_heads = 0;
  std::int64_t output_heads = 0;  // max(query_heads, value_heads)
  std::int64_t keys = 0, features = 0, values = 0;
  std::int64_t sequences = 0;
  MapSizes map;
  const Segments* segments = nullptr;

  Segment segment(std::int64_t n) const {
    return segments != nullptr ? segments->list[static_cast<std::size_t>(n)]
                               : Segment{n, 0, tokens};
  }
  Segment key_segment(std::int64_t n) const {
    return segments != nullptr ? segment(n) : Segment{n, 0, key_tokens};
  }
  // The state and the query head that an output head reads, the key head that a state reads.
  std::int64_t state_of(std::int64_t output) const { return output * value_heads / output_heads; }
  std::int64_t query_of(std::int64_t output) const { return output * query_heads / output_heads; }
  std::int64_t key_of(std::int64_t state) const { return state * key_heads / value_heads; }
  // Output heads of one state, of one query head; states of one key head.
  std::int64_t outputs_per_state() const { return output_heads / value_heads; }
  std::int64_t outputs_per_query() const { return output_heads / query_heads; }
  std::int64_t states_per_key() const { return value_heads / key_heads; }
  // Without tokens and states there is nothing to compute, however many heads are without them.
  bool is_empty(const StateView& result) const {
    return tokens == 0 && key_tokens == 0 && !result.present();
  }
};

// Throws Error(kInvalidArgument), naming the law, for anything that does not fit.
RecurrenceShape check_recurrence(const RecurrenceSpec& spec, const RecurrenceInputs& inputs);
void check_state(const RecurrenceSpec& spec, const RecurrenceShape& shape, const StateView& state,
                 const char* what);
// Cosformer's weights end at its max_length: refuses positions beyond.
void check_positions(const RecurrenceSpec& spec, const RecurrenceShape& shape,
                     const StateView& initial);
// The way of a pass over the rows of sequence n, `length` of them.
MapPath path_of(const StateView& initial, std::int64_t n, std::int64_t length, bool back_in_time,
                const TokenValues& exponents = {});
// A [B, tokens, heads, size] array of float32 or 16-bit floats with unit last stride; absent is
// allowed if `optional`.
void check_rows(const RecurrenceSpec& spec, const ConstTensor& tensor, const char* what,
                const RecurrenceShape& shape, std::int64_t tokens, std::int64_t heads,
                std::int64_t size, bool optional);

// A constant decay, folded into the rows of a chunk: with P_t the product of decays since the block
// began, S' = sum_t (k_t / P_t) v_t^T, o_t = P_t S'^T q_t, and S' is multiplied by P at the block's
// end. Blocks are as long as keeps P above 2^-60; of one token they are the plain multiplication.
//
// `shifted`: the decay stands between a token and the next in the order of the pass, not before it
// (the gradient of the state, which runs backwards).
struct Fold {
  double log_decay = 0;
  std::int64_t block = kChunk;
  float enter = 1;          // on S, before the first token of a block
  float read[kChunk];       // P_t
  float write[kChunk];      // 1 / P_t
  float leave[kChunk + 1];  // on S, after a block of n tokens

  Fold(double log_decay, bool shifted);
  // 1 / P_t, or null where it is 1 everywhere.
  const float* write_or_null() const { return log_decay == 0 ? nullptr : write; }
};

// 2^exponent; 0 below 2^-200 and infinite from 2^128 on.
float power_of_two(float exponent);
// What an output row is multiplied by: 1 / denominator if normalised. `sum` and `exponent` are
// those of z . (scale phi(q)) = sum 2^exponent, and S^T phi(q) is a multiple of the same power.
inline float output_eps(const RecurrenceSpec& spec, float exponent) {
  const float eps = static_cast<float>(spec.eps);
  return exponent == 0 || eps == 0 ? eps : eps * power_of_two(-exponent);
}
inline float output_factor(const RecurrenceSpec& spec, float sum, float exponent) {
  if (!spec.normalize) return power_of_two(exponent);
  const float eps = output_eps(spec, exponent);
  return 1 / (spec.clamp ? std::max(sum, eps) : sum + eps);
}
// The log decay of a head: 0 without decay.
double log_decay_of(const RecurrenceSpec& spec, std::int64_t state);

}  // namespace ouzel
