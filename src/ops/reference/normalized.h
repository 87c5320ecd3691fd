// References of gated memories with a normaliser: xLSTM's matrix memory, and gated random features.
#pragma once

#include "src/ops/reference/traced.h"

namespace ouzel::reference {

// lf = logsigmoid(f); m' = max(lf + m, i); S' = e^(lf + m - m') S + e^(i - m') (scale k) v^T, z'
// likewise; o = S'^T q / max(|z' . q|, e^(-m')). q, k, v [B, T, H, .], i, f [B, T, H].
Tensors<Var> mlstm(const Tensors<Var>& in, const Setting& setting);

// f(x) = m^-0.5 [cos(W x^), sin(W x^)] with x^ = sigma x / sqrt(|x|^2 + 1e-6);
// S' = gate S + (1 - gate) f(k) v^T, z' likewise; o = S'^T f(q) / (z' . f(q)).
Tensors<Var> rfa_gate(const Tensors<Var>& in, const Setting& setting);

}  // namespace ouzel::reference
