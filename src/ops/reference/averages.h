// References of weighted averages in their quadratic or global form: log-linear attention,
// efficient attention, the lambda layer and kernel regression.
#pragma once

#include "src/ops/reference/traced.h"

namespace ouzel::reference {

// o_t = sum_(s<=t) lambda_t[level(t, s)] e^(g_(s+1) + ... + g_t) (scale q_t . k_s) v_s, level(t, t)
// = 0, else 1 + the highest bit in which t and s differ.
Tensors<Var> log_linear_attention(const Tensors<Var>& in, const Setting& setting);

// o = rq(Q) (rk(K)^T V); variant softmax: rq over features, rk over positions (causal: those so
// far, from initial_state, an average, and initial_lse); scaling: both divided by sqrt(n).
Tensors<Var> efficient_attention(const Tensors<Var>& in, const Setting& setting);

// lambda = sum_u softmax_positions(k_u)^T v_u; o = lambda^T q. One sequence a batch row, or
// segments of queries and keys alike.
Tensors<Var> lambda_layer(const Tensors<Var>& in, const Setting& setting);

// o_i = sum_j w_ij y_j / sum_j w_ij.
Tensors<Var> nadaraya_watson(const Tensors<Var>& in, const Setting& setting);

}  // namespace ouzel::reference
