"""What stands in for the torch paths of transformers, and in which layers.

A function here has the parameters of the one that it replaces, or a part of them, and gives the same;
NotImplemented sends a call back to the original.
"""

import torch
import torch.nn.functional as F

from ouzel import torch as ops


def _bounds(batch, tokens, options):
    """Where packed sequences begin and end among batch x tokens rows; None: every row is a sequence."""
    bounds = options.get("cu_seqlens")
    if bounds is None:
        bounds = options.get("cu_seq_lens_q")
    if bounds is not None:
        bounds = bounds.tolist()
        if batch != 1 or bounds[-1] != tokens:
            raise ValueError(
                f"ouzel.transformers: cu_seqlens ends at {bounds[-1]} and packs one row, but the layer "
                f"has {batch} of {tokens} tokens: packed sequences come alone and do not continue a cache"
            )
        return bounds
    index = options.get("seq_idx")
    if index is None:
        return None
    if index.shape != (batch, tokens):
        raise ValueError(
            f"ouzel.transformers: seq_idx is {list(index.shape)}, but the layer has {batch} rows of "
            f"{tokens} tokens: packed sequences do not continue a cache"
        )
    begins = torch.ones_like(index, dtype=torch.bool)
    begins[:, 1:] = index[:, 1:] != index[:, :-1]
    return [*begins.flatten().nonzero().flatten().tolist(), batch * tokens]


def _sequences(
    function, tensors, options, *, context, initial_state=None, output_final_state=False, **attributes
):
    """Calls an operator over [B, T, ...] tensors and an initial state, the packed as one row."""
    batch, tokens = tensors[0].shape[:2]
    bounds = _bounds(batch, tokens, options)
    if bounds is not None and batch > 1:
        tensors = [x.reshape(1, batch * tokens, *x.shape[2:]) for x in tensors]
    o, state = function(
        *tensors,
        cu_seqlens=bounds,
        initial_state=_kept(initial_state),
        output_final_state=output_final_state,
        context=context,
        **attributes,
    )
    return o.reshape(batch, tokens, *o.shape[2:]), state


def _kept(state):
    """A state that a cache is about to overwrite with what is computed from it: a backward pass needs it as
    it was, and would hold on to itself through it."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def _step(function, *operands, state, **options):
    """An operator's step: it updates float32 in place, while a cache may have 16 bits."""
    exact = state.float()  # itself, if it is float32
    o = function.step(*operands, initial_state=exact, **options)
    if exact is not state:
        state.copy_(exact)
    return o


def _activation(name):
    return {None: "none", "silu": "silu", "swish": "silu"}.get(name)


# --- Convolutions: [B, D, T], states of the last W inputs


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, *, context, **options):
    if _activation(activation) is None:
        return NotImplemented

    def conv(x, **attributes):
        return ops.short_conv(x, weight, bias, activation=_activation(activation), **attributes)

    o, _ = _sequences(conv, [hidden_states.transpose(1, 2)], options, context=context)
    return o.transpose(1, 2)


def causal_conv1d_alone(hidden_states, weight, bias=None, activation=None, *, context, **options):
    """The scans of Mamba-1 are not told about packed sequences."""
    if any(options.get(name) is not None for name in ("seq_idx", "cu_seqlens", "cu_seq_lens_q")):
        raise ValueError("ouzel.transformers: layers of Mamba-1 cannot keep packed sequences apart")
    return causal_conv1d_fn(hidden_states, weight, bias, activation, context=context)


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None, *, context):
    activation = _activation(activation)
    if activation is None or conv_state.shape[-1] != weight.shape[-1]:
        return NotImplemented
    x, options = hidden_states.transpose(1, 2), dict(activation=activation, context=context)
    if not torch.is_grad_enabled():
        return _step(ops.short_conv, x, weight, bias, state=conv_state, **options).transpose(1, 2)
    o, state = ops.short_conv(x, weight, bias, _kept(conv_state), output_final_state=True, **options)
    conv_state.copy_(state)
    return o.transpose(1, 2)


CONVOLUTION = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
}


# --- Delta rules: q, k, v [B, T, H, .], states [B, H, K, V]


def _delta_rule(function):
    def run(
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        *,
        context,
        **options,
    ):
        return _sequences(
            function,
            [query, key, value, g, beta],
            options,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            context=context,
        )

    return run


GATED_DELTA_NET = {
    **CONVOLUTION,
    "torch_chunk_gated_delta_rule": _delta_rule(ops.gated_delta_rule),
    "torch_recurrent_gated_delta_rule": _delta_rule(ops.gated_delta_rule),
}

KIMI_DELTA_ATTENTION = {
    **CONVOLUTION,
    "chunk_kimi_delta_attention": _delta_rule(ops.kda),
    "recurrent_kimi_delta_attention": _delta_rule(ops.kda),
}


# --- State spaces


def mamba2_chunk_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    *,
    context,
    **options,
):
    """Mamba-2: states are [B, H, V, N] here, and outputs float32."""
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    if tuple(dt_limit) != (0.0, float("inf")) or not dt_softplus:
        dt = torch.clamp(dt, *dt_limit)

    def scan(c, b, x, dt, **attributes):
        return ops.mamba2_ssd(c, b, x, dt, A, D=D, **attributes)

    o, state = _sequences(
        scan,
        [C.float(), B, hidden_states, dt],
        options,
        context=context,
        initial_state=None if initial_states is None else initial_states.transpose(-1, -2),
        output_final_state=return_final_states,
    )
    return (o, state.transpose(-1, -2)) if return_final_states else o


def no_fused_path(*_, context, **__):
    """Training, too, goes through the functions above."""
    return None


def mamba_selective_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    *,
    context,
    **_,
):
    """Mamba-1: all but A, D and delta_bias are [B, ., T]."""
    o, state = ops.selective_scan(
        hidden_states.transpose(1, 2),
        dt.transpose(1, 2),
        A,
        B.transpose(1, 2),
        C.transpose(1, 2),
        D=D,
        z=None if z is None else z.transpose(1, 2),
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        output_final_state=return_last_state,
        context=context,
    )
    o = o.transpose(1, 2)
    return (o, state) if return_last_state else o


def mamba_selective_state_update(
    state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, *, context, **_
):
    """Mamba-1, one token: the state changes in place, which leaves nothing for a backward pass."""
    if torch.is_grad_enabled():
        return NotImplemented
    return _step(
        ops.selective_scan,
        hidden_states[:, None],
        dt[:, None],
        A,
        B[:, None],
        C[:, None],
        D=D,
        z=None if z is None else z[:, None],
        dt_bias=dt_bias,
        state=state,
        dt_softplus=dt_softplus,
        context=context,
    )[:, 0]


MAMBA2 = {
    **CONVOLUTION,
    "mamba2_split_conv1d_scan_combined": no_fused_path,
    "mamba2_chunk_scan": mamba2_chunk_scan,
}

MAMBA = {
    "causal_conv1d_fn": causal_conv1d_alone,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba_selective_state_update": mamba_selective_state_update,
}


# --- Elementwise recurrences


def rwkv_linear_attention(
    time_decay, time_first, key, value, state=None, return_state=False, *, context
):
    """RWKV-4: a state is numerator, denominator and exponent, [B, C] each."""
    initial = None if state is None else torch.stack(list(state), dim=1).unsqueeze(2)
    wanted = return_state or state is not None
    o, final = ops.rwkv4(
        key, value, time_decay, time_first, initial, output_final_state=wanted, context=context
    )
    return o, list(final.squeeze(2).unbind(1)) if wanted else None


def rg_lru_scan(self, hidden_states, recurrent_gate, reset, recurrent_states, *, context):
    """RG-LRU, once its gates are known: a decay of 0 where a document begins."""
    tiny = torch.finfo(torch.float32).tiny
    g = recurrent_gate.float().clamp(min=tiny).log().masked_fill(reset, float("-inf"))
    return ops.hgrn(hidden_states, g, recurrent_states, output_final_state=True, context=context)


# --- Gated norms


def _norm(module, x, gate, groups, context, **options):
    size = x.shape[-1] // groups
    o = ops.rms_norm(
        x.reshape(1, -1, groups, size),
        module.weight if groups == 1 else module.weight.view(groups, size),
        None if gate is None else gate.reshape(1, -1, groups, size),
        eps=module.variance_epsilon,
        context=context,
        **options,
    )
    return o.view(x.shape)


def norm_then_gate(self, hidden_states, gate, *, context):
    activation = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}.get(self.activation)
    if activation is None:
        return NotImplemented
    return _norm(self, hidden_states, gate, 1, context, activation=activation)


def gate_then_norm(self, hidden_states, gate=None, *, context):
    groups = hidden_states.shape[-1] // self.group_size
    return _norm(self, hidden_states, gate, groups, context, gate_first=True)


def falcon_h1_norm(self, hidden_states, gate=None, *, context):
    first = not self.norm_before_gate
    return _norm(self, hidden_states, gate, self.n_groups, context, gate_first=first)


# --- The table: class of a layer -> what is replaced, a method of the class or a function that its
# forward looks up

def _rows(replaced, *classes):
    return dict.fromkeys(classes, replaced)


LAYERS = {
    **_rows(
        GATED_DELTA_NET,
        "LaraMiniGatedDeltaNet",
        "OlmoHybridGatedDeltaNet",
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Qwen4ExpTextGatedDeltaNet",
    ),
    **_rows(
        KIMI_DELTA_ATTENTION,
        "BailingHybridDeltaAttention",
        "KimiLinearDeltaAttention",
    ),
    **_rows(
        MAMBA2,
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "Mamba2Mixer",
        "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    ),
    **_rows(MAMBA, "FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"),
    **_rows(CONVOLUTION, "Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"),
    **_rows({"rwkv_linear_attention": rwkv_linear_attention}, "RwkvSelfAttention"),
    **_rows({"_rnn_scan": rg_lru_scan}, "RecurrentGemmaRglru"),
    **_rows(
        {"forward": norm_then_gate},
        "BailingHybridRMSNormGated",
        "KimiLinearRMSNormGated",
        "LaraMiniRMSNormGated",
        "OlmoHybridRMSNormGated",
        "Qwen3NextRMSNormGated",
        "Qwen3_5MoeRMSNormGated",
        "Qwen3_5RMSNormGated",
        "Qwen4ExpTextRMSNormGated",
    ),
    **_rows(
        {"forward": gate_then_norm},
        "BambaRMSNormGated",
        "GraniteMoeHybridRMSNormGated",
        "MambaRMSNormGated",
        "NemotronHRMSNormGated",
        "Zamba2RMSNormGated",
    ),
    **_rows({"forward": falcon_h1_norm}, "FalconH1RMSNormGated"),
}
