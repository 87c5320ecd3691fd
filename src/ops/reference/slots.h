// References of slot memories: gated slot attention, and attention with bounded-memory control.
#pragma once

#include "src/ops/reference/traced.h"

namespace ouzel::reference {

// hk' = hk Diag(e^g) + k s^T; p = softmax(hk'^T (scale q)); hv' = Diag(e^g) hv + s v^T; o = hv'^T
// p. q [B, T, HQ, K], k, v [B, T, H, .], s, g [B, T, H, M]; hk0 [N, H, K, M], hv0 [N, H, M, V].
Tensors<Var> gsa(const Tensors<Var>& in, const Setting& setting);

// The same with lse' = log(e^lse + e^s), e^(lse - lse') for e^g and e^(s - lse') for s; lse0
// [N, H, M].
Tensors<Var> abc(const Tensors<Var>& in, const Setting& setting);

}  // namespace ouzel::reference
