"""The published functions that Ouzel has: prototypes, and the law behind each.

A prototype is that of flash-linear-attention (names, order and defaults; test_fla.py compares them to
an installed package), `extras` are the names that it reads from its keyword arguments, and `module` is
the file of fla.ops that publishes it.
"""

from collections import namedtuple

from .. import torch as ops
from . import _laws as laws

PUBLISHED = "0.6.0"

Row = namedtuple("Row", "module prototype law extras", defaults=((),))

_RAW_GATE = ("A_log", "dt_bias")

ROWS = [
    Row("abc.chunk",
        "chunk_abc(q, k, v, s, initial_state=None, output_final_state=False)",
        laws.abc),
    Row("attn.parallel",
        "parallel_attn(q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, "
        "chunk_indices=None, *, sink_bias=None)",
        laws.attention),
    Row("based.fused_chunk",
        "fused_chunk_based(q, k, v, scale=None, use_norm=True)",
        laws.based),
    Row("based.parallel",
        "parallel_based(q, k, v, scale=None, use_norm=True)",
        laws.based),
    Row("comba.chunk",
        "chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None)",
        laws.comba),
    Row("comba.fused_recurrent",
        "fused_recurrent_comba(q, k, p, v, g, beta=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None)",
        laws.comba),
    Row("delta_rule.chunk",
        "chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        laws.delta_rule),
    Row("delta_rule.fused_recurrent",
        "fused_recurrent_delta_rule(q, k, v, beta=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None)",
        laws.delta_rule),
    Row("gated_delta_product.chunk",
        "chunk_gated_delta_product(q, k, v, g, beta, num_householder, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "cp_context=None)",
        ops.gated_delta_product),
    Row("gated_delta_rule.chunk",
        "chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
        "**kwargs)",
        laws.gated_delta_rule, ("use_gate_in_kernel", *_RAW_GATE)),
    Row("gated_delta_rule.fused_recurrent",
        "fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, "
        "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs)",
        laws.gated_delta_rule),
    Row("gated_oja_rule.chunk",
        "chunk_gated_oja_rule(q, k, v, gv, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_q_l2norm=False, use_k_l2norm=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        laws.gated_oja_rule, ("use_qk_l2norm_in_kernel",)),
    Row("gated_oja_rule.fused_recurrent",
        "fused_recurrent_gated_oja_rule(q, k, v, gv=None, beta=None, scale=None, initial_state=None, "
        "output_final_state=False, use_q_l2norm=False, use_k_l2norm=False, cu_seqlens=None, **kwargs)",
        laws.gated_oja_rule, ("use_qk_l2norm_in_kernel",)),
    Row("gdn2.chunk",
        "chunk_gdn2(q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cp_context=None, **kwargs)",
        ops.gdn2, _RAW_GATE),
    Row("gdn2.fused_recurrent",
        "fused_recurrent_gdn2(q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs)",
        ops.gdn2),
    Row("generalized_delta_rule.dplr.chunk",
        "chunk_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, "
        "cp_context=None, lower_bound=None, **kwargs)",
        laws.dplr),
    Row("generalized_delta_rule.dplr.fused_recurrent",
        "fused_recurrent_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None, "
        "output_final_state=False, reverse=False, cu_seqlens=None)",
        laws.dplr),
    Row("generalized_delta_rule.iplr.chunk",
        "chunk_iplr_delta_rule(q, k, v, a, b, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        ops.iplr),
    Row("generalized_delta_rule.iplr.fused_recurrent",
        "fused_recurrent_iplr_delta_rule(q, k, v, a, b, scale=None, initial_state=None, "
        "output_final_state=False, cu_seqlens=None)",
        ops.iplr),
    Row("gla.chunk",
        "chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None)",
        ops.gla),
    Row("gla.fused_recurrent",
        "fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None, "
        "output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)",
        laws.gla),
    Row("gsa.chunk",
        "chunk_gsa(q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, "
        "checkpoint_level=2, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        laws.gsa),
    Row("gsa.fused_recurrent",
        "fused_recurrent_gsa(q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, "
        "reverse=False, cu_seqlens=None)",
        laws.gsa),
    Row("hgrn.chunk",
        "chunk_hgrn(x, g, initial_state=None, output_final_state=False)",
        ops.hgrn),
    Row("hgrn.fused_recurrent",
        "fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None)",
        ops.hgrn),
    Row("kda.chunk",
        "chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
        "return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "cp_context=None, use_graph=False, max_num_seqs=None, **kwargs)",
        ops.kda, _RAW_GATE),
    Row("kda.fused_recurrent",
        "fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, "
        "cu_seqlens=None, **kwargs)",
        ops.kda),
    Row("lightnet.chunk",
        "chunk_lightnet(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "state_v_first=False, cu_seqlens=None)",
        laws.lightnet),
    Row("lightnet.fused_recurrent",
        "fused_recurrent_lightnet(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "state_v_first=False, cu_seqlens=None)",
        laws.lightnet),
    Row("lightning_attn.chunk",
        "chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, "
        "output_final_state=False, cu_seqlens=None, **kwargs)",
        ops.lightning_attention),
    Row("lightning_attn.fused_recurrent",
        "fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, "
        "output_final_state=False, reverse=False, cu_seqlens=None)",
        ops.lightning_attention),
    Row("linear_attn.chunk",
        "chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "normalize=True, cu_seqlens=None)",
        laws.linear_attention),
    Row("linear_attn.fused_chunk",
        "fused_chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "normalize=True, cu_seqlens=None)",
        laws.linear_attention),
    Row("linear_attn.fused_recurrent",
        "fused_recurrent_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "reverse=False, normalize=False, cu_seqlens=None)",
        laws.linear_attention),
    Row("log_linear_attn.chunk",
        "chunk_log_linear_attn(q, k, v, g, level_scales, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, scale=1.0)",
        laws.log_linear_attention),
    Row("precond_gated_delta_rule.chunk",
        "chunk_precond_gated_delta_rule(q, k, v, g_atk, g, beta_atk, beta, scale=None, initial_state=None, "
        "initial_A_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
        "cu_seqlens_cpu=None, cp_context=None, transpose_state_layout=False, x=1.5, eps=1e-06, "
        "log_atk_scale=None)",
        laws.preconditioned),
    Row("precond_gated_delta_rule.fused_recurrent",
        "fused_recurrent_precond_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, g_atk=None, "
        "beta_atk=None, scale=None, initial_state=None, initial_A_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=True, cu_seqlens=None, transpose_state_layout=False, x=1.5, eps=1e-06, "
        "log_atk_scale=None)",
        laws.preconditioned),
    Row("precond_kda.chunk",
        "chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta, scale=None, initial_state=None, "
        "initial_A_state=None, output_final_state=False, use_gate_in_kernel=False, safe_gate=False, "
        "lower_bound=None, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
        "transpose_state_layout=False, x=1.5, eps=1e-06, log_atk_scale=None, solve_tril_precision=None, "
        "disable_recompute=False, return_intermediate_states=False, **kwargs)",
        laws.preconditioned_kda, _RAW_GATE),
    Row("precond_kda.fused_recurrent",
        "fused_recurrent_precond_kda(q, k, v, g, g_atk, beta_atk, beta, A_log=None, dt_bias=None, "
        "scale=None, initial_state=None, initial_A_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
        "transpose_state_layout=False, x=1.5, eps=1e-06, log_atk_scale=None, **kwargs)",
        laws.preconditioned_kda),
    Row("rebased.parallel",
        "parallel_rebased(q, k, v, eps=1e-05, use_scale=True, use_normalize=True, return_both=False)",
        laws.rebased),
    Row("retention.chunk",
        "chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, **kwargs)",
        ops.retention),
    Row("retention.fused_chunk",
        "fused_chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None)",
        ops.retention),
    Row("retention.fused_recurrent",
        "fused_recurrent_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, "
        "reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)",
        ops.retention),
    Row("retention.parallel",
        "parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None)",
        laws.parallel(ops.retention)),
    Row("rwkv4.fused_recurrent",
        "fused_recurrent_rwkv4(w, u, k, v, state)",
        laws.rwkv4),
    Row("rwkv6.chunk",
        "chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        ops.rwkv6),
    Row("rwkv6.fused_recurrent",
        "fused_recurrent_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, "
        "reverse=False, cu_seqlens=None)",
        ops.rwkv6),
    Row("rwkv7.chunk",
        "chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, "
        "cp_context=None, lower_bound=None)",
        laws.rwkv7),
    Row("rwkv7.fused_recurrent",
        "fused_recurrent_rwkv7(r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, "
        "cu_seqlens=None)",
        laws.rwkv7),
    Row("rwkv7.fused_recurrent",
        "fused_mul_recurrent_rwkv7(r, w, k, v, kk, a, scale=1.0, initial_state=None, "
        "output_final_state=False, reverse=False, cu_seqlens=None)",
        laws.rwkv7_mul),
    Row("simple_gla.chunk",
        "chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
        "output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        laws.simple_gla),
    Row("simple_gla.fused_chunk",
        "fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
        "output_final_state=False, cu_seqlens=None)",
        laws.simple_gla),
    Row("simple_gla.fused_recurrent",
        "fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
        "output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)",
        laws.simple_gla),
    Row("simple_gla.parallel",
        "parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None)",
        laws.parallel(laws.simple_gla)),
    Row("ttt.chunk",
        "chunk_ttt_linear(q, k, v, w, b, eta, scale=None, eps=1e-06, chunk_size=16, initial_state=None, "
        "initial_state_bias=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None)",
        laws.ttt_linear),
    Row("ttt.fused_chunk",
        "fused_chunk_ttt_linear(q, k, v, w, b, eta, scale=None, eps=1e-06, chunk_size=16, "
        "initial_state=None, initial_state_bias=None, output_final_state=False, cu_seqlens=None)",
        laws.ttt_linear),
]

# Functions that are no laws, as they are.
HELPERS = {
    "fused_gdn_gate": ("gated_delta_rule.gate", laws.fused_gdn_gate),
    "fused_kda_gate": ("kda.gate", laws.fused_kda_gate),
}

# Other names of functions above.
ALIASES = {
    "chunk_gdn": "chunk_gated_delta_rule",
    "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule",
}

# Published names that only refer to another.
REPLACED = {
    "fused_chunk_delta_rule": ("delta_rule.fused_chunk", "chunk_delta_rule"),
    "fused_chunk_gla": ("gla.fused_chunk", "chunk_gla"),
}

# Published functions of fla.ops whose law Ouzel has not.
ABSENT = (
    "chunk_cyfa",
    "chunk_mesa_net",
    "chunk_momentum_delta_rule",
    "fused_attnres",
    "fused_recurrent_cyfa",
    "fused_recurrent_momentum_delta_rule",
    "parallel_forgetting_attn",
    "parallel_nsa",
    "parallel_parallax",
    "parallel_path_attn",
    "parallel_stickbreaking_attn",
    "parallel_wall_attn",
    "parallel_wall_attn_decode",
)
