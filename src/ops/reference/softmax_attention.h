// Reference of softmax attention: o_i = sum_j p_ij v_j with p_i = softmax over the visible j of
// scale q_i . k_j.
#pragma once

#include <cstdint>

#include "ouzel/segments.h"
#include "src/ops/reference/array.h"

namespace ouzel::reference {

// q [B, TQ, HQ, K], k [B, TK, HK, K], v [B, TK, HK, V]. Positions count from the start of a
// segment; query i stands at i + q_offset among the keys. Causal: it sees keys j <= i + q_offset;
// window w > 0: only those with i + q_offset - j < w.
template <class Real>
struct SoftmaxAttentionArguments {
  Array<Real> q, k, v;
  Segments query_segments, key_segments;
  Real scale = 1;
  bool causal = true;
  std::int64_t window = 0;
  std::int64_t q_offset = 0;
};

template <class Real>
struct SoftmaxAttentionResults {
  Array<Real> o;    // [B, TQ, HQ, V]; 0 for a query that sees no key
  Array<Real> lse;  // [B, TQ, HQ] log-sum-exp of the scores; -inf there
};

template <class Real>
struct SoftmaxAttentionGradients {
  Array<Real> q, k, v;
};

template <class Real>
SoftmaxAttentionResults<Real> softmax_attention(const SoftmaxAttentionArguments<Real>& arguments);

template <class Real>
SoftmaxAttentionGradients<Real> softmax_attention_backward(
    const SoftmaxAttentionArguments<Real>& arguments, const Array<Real>& d_o);

}  // namespace ouzel::reference
