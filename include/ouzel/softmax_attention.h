// Softmax attention, exact: o_i = sum_j softmax_j(scale q_i . k_j) v_j with an online softmax in
// tiles (never an N x N matrix), and its backward by recomputation from the saved log-sum-exp.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct SoftmaxAttentionOptions {
  std::optional<double> scale = {};  // default K^-0.5
  bool causal = true;                // query i sees keys j <= i + q_offset
  std::int64_t window = 0;  // w > 0: only keys with i + q_offset - j < w (w keys, itself included)
  std::int64_t q_offset = 0;  // position of the first query among the keys
};

// q [B, TQ, HQ, K], k [B, TK, HK, K], v [B, TK, HK, V], o [B, TQ, HQ, V]; HQ is a multiple of HK,
// query head h reads head h / (HQ / HK). Each tensor is float32, bfloat16 or float16; any strides
// with unit last stride; outputs overlap nothing.
//
// A query that sees no key, or only scores of -inf, gives 0. NaN in what a query sees propagates,
// and a score of +inf gives NaN; what it does not see never enters, not even NaN. Bit for bit (on
// one instruction set), a query's output depends on nothing but its row, the keys and values that
// it sees and their positions: not on threads, on other queries or sequences of the call, or on
// whether it came by a forward or by steps.
struct SoftmaxAttentionInputs {
  ConstTensor q = {}, k = {}, v = {};
  const Segments* segments = nullptr;      // of the queries; null: each batch row is one sequence
  const Segments* key_segments = nullptr;  // of the keys; null: those of the queries
};

struct SoftmaxAttentionOutputs {
  Tensor o = {};
  // [B, TQ, HQ], float64: the log-sum-exp of the scaled scores, for the backward pass; -inf where
  // nothing is seen. (Of scores around 360 a float32 would cost the gradients 1e-5.) May be absent.
  Tensor lse = {};
};

OUZEL_EXPORT void softmax_attention(Context& context, const SoftmaxAttentionOptions& options,
                                    const SoftmaxAttentionInputs& inputs,
                                    const SoftmaxAttentionOutputs& outputs);

// The gradients of sum(o * d_o), o and lse being what the forward gave. They are assigned; absent
// tensors are not computed. dk and dv sum over the query heads of a group and over queries in an
// order that depends on the sequence's shape alone.
OUZEL_EXPORT void softmax_attention_backward(Context& context,
                                             const SoftmaxAttentionOptions& options,
                                             const SoftmaxAttentionInputs& inputs,
                                             const ConstTensor& o, const ConstTensor& lse,
                                             const ConstTensor& d_o, const Tensor& dq,
                                             const Tensor& dk, const Tensor& dv);

// One sequence's cache of keys and values: memory of the caller with room for `capacity` tokens;
// token p is kept at slot p % capacity. With a window, capacity >= window is enough for any length.
struct KvCache {
  float* k = nullptr;  // [capacity, HK, K]
  float* v = nullptr;  // [capacity, HK, V]
  std::int64_t capacity = 0;
  std::int64_t position = 0;  // tokens seen so far
};

// T new tokens (one in decoding, more in prefill) of N sequences: q [N, T, HQ, K], k [N, T, HK, K],
// v [N, T, HK, V], o [N, T, HQ, V]. Attends to the caches and the new tokens, then keeps these in
// the caches; positions advance by T. The outputs are those of softmax_attention over the whole
// sequences, bit for bit, however the tokens are cut into steps. Causal, q_offset 0. Throws
// Error(kInvalidArgument), nothing written, when a cache is full (no window, or capacity < window).
// Allocates nothing once the context has seen the shape.
OUZEL_EXPORT void softmax_attention_step(Context& context, const SoftmaxAttentionOptions& options,
                                         const ConstTensor& q, const ConstTensor& k,
                                         const ConstTensor& v, std::span<KvCache> caches,
                                         const Tensor& o);

}  // namespace ouzel
