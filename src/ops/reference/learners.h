// References of memories that learn: the gated Oja rule, and test-time training of a linear model.
#pragma once

#include "src/ops/reference/traced.h"

namespace ouzel::reference {

// R = S Diag(e^gv); S' = R + beta (k - R v) v^T; o = S'^T (scale q). q, k [B, T, H, K], v, gv
// [B, T, HV, V], beta [B, T, HV].
Tensors<Var> gated_oja_rule(const Tensors<Var>& in, const Setting& setting);

// Per mini-batch, with S and hb of its begin: y = S^T k + hb; grad = d/dy 1/2 |LN(y) w + b - (v -
// k)|^2; u_t = (S - eta_t sum_(s<=t) k_s grad_s^T)^T (scale q_t) + hb - eta_t sum_(s<=t) grad_s; o
// = u + LN(u) w + b; then S and hb take the step with eta of the last token.
Tensors<Var> ttt_linear(const Tensors<Var>& in, const Setting& setting);

}  // namespace ouzel::reference
