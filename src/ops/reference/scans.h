// References of the elementwise scans: every channel by itself, token by token.
#pragma once

#include "src/ops/reference/traced.h"

namespace ouzel::reference {

// h' = e^g h + x, o = h'. x, g [B, T, D]; initial_state [N, D].
Tensors<Var> hgrn(const Tensors<Var>& in, const Setting& setting);

// L = -c softplus(a_param) sigmoid(r); h' = e^L h + sqrt(1 - e^(2L)) sigmoid(i) x, o = h'; with
// first_multiplier_one the root is 1 at the first token of a sequence. x, r, i [B, T, D].
Tensors<Var> rg_lru(const Tensors<Var>& in, const Setting& setting);

// o = (e^eps alpha + e^(u + k) v) / (e^eps beta + e^(u + k)); with d = -e^w: eps' = max(d + eps,
// k), alpha' = e^(d + eps - eps') alpha + e^(k - eps') v, beta' the same with 1 for v. k, v [B, T,
// C]; w, u [C]; states [N, 3, 1, C].
Tensors<Var> rwkv4(const Tensors<Var>& in, const Setting& setting);

// S'[d, n] = e^(dt_d A_dn) S[d, n] + dt_d B_n x_d; o = (C . S'_d + D_d x_d) silu(z_d). x, dt, z
// [B, T, D]; A [D, M]; B, C [B, T, M]; states [N, D, M]. dt: softplus(dt + dt_bias) if dt_softplus.
Tensors<Var> selective_scan(const Tensors<Var>& in, const Setting& setting);

}  // namespace ouzel::reference
