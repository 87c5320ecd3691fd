"""What the published functions compute, in terms of ouzel.torch.

A function here takes the arguments of its published relatives by name, layouts and switches common to
all already resolved (_functions.py), and returns what they return.
"""

import math

import torch
import torch.nn.functional as F

from .. import torch as ops


def shaped(name, x, shape):
    if x.numel() != math.prod(shape):
        raise ValueError(f"`{name}` has {x.numel()} numbers; one for each of {tuple(shape)} was expected")
    return x.float().reshape(shape)


def gate(g, A_log=None, dt_bias=None, lower_bound=None, heads=-1):
    """Log decays of raw gates: -e^A softplus(g + bias), or lower_bound sigmoid(e^A (g + bias)).

    Axis `heads` of g is that of A_log; the axes from there on are those of dt_bias.
    """
    if lower_bound is None and A_log is None:
        raise ValueError("a gate needs `A_log`, or `lower_bound`, which stands for it")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"`lower_bound` is a log decay: below 0 was expected, {lower_bound} was found")
    shape = g.shape[heads:]
    g = g.float()
    if dt_bias is not None:
        g = g + shaped("dt_bias", dt_bias, shape)
    rate = 1 if A_log is None else shaped("A_log", A_log, (*shape[:1], *[1] * len(shape[1:]))).exp()
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """Log decays [..., HV] of raw gates: -e^A_log softplus(g + dt_bias)."""
    return gate(g, A_log, dt_bias).to(output_dtype)


def fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """Log decays [..., HV, K] of raw gates: -e^A_log softplus(g + dt_bias), or, above a bound,
    lower_bound sigmoid(e^A_log (g + dt_bias))."""
    return gate(g, A_log, dt_bias, lower_bound, heads=-2).to(output_dtype)


def additive_gate(x, start, cu_seqlens):
    """Weights e^(x_t - z_t), gates z_(t-1) - z_t and the last z of z = logcumsumexp(x), float32.

    z_(-1) is `start` [N,1,H,M]; without it the first token has weight 1 and decays nothing.
    """
    x = x.float()
    if cu_seqlens is not None:
        bounds = [int(b) for b in cu_seqlens]
        parts = [
            additive_gate(x[:, b:e], None if start is None else start[n : n + 1], None)
            for n, (b, e) in enumerate(zip(bounds, bounds[1:]))
        ]
        weights, gates, last = zip(*parts)
        return torch.cat(weights, 1), torch.cat(gates, 1), torch.cat(last, 0)
    y = x if start is None else torch.cat([start.float(), x], 1)
    if y.shape[1] == 0:
        return x, x, x.new_full((x.shape[0], 1, *x.shape[2:]), float("-inf"))
    z = y.logcumsumexp(1)
    rise = y[:, 1:] - z[:, :-1]
    weights, gates = torch.sigmoid(rise), F.logsigmoid(-rise)
    if start is None:
        first = torch.zeros_like(x[:, :1])
        weights, gates = torch.cat([first + 1, weights], 1), torch.cat([first, gates], 1)
    return weights, gates, z[:, -1:]


def abc(initial_state, s, **a):
    if initial_state is not None:
        return gsa(s=s, g=None, initial_state=initial_state, **a)
    o, hk, hv, _ = ops.abc(s=s, **a)
    return o, (hk, hv) if a["output_final_state"] else None


def gsa(q, k, v, s, g, initial_state, cu_seqlens=None, reverse=False, **a):
    if g is None:
        s, g, _ = additive_gate(s, None, cu_seqlens)
    hk, hv = initial_state or (None, None)
    if reverse:  # the last sequence comes first then, with its state
        q, k, v, s, g = (x.flip(1) for x in (q, k, v, s, g))
        if cu_seqlens is not None:
            cu_seqlens = [q.shape[1] - int(b) for b in reversed(cu_seqlens)]
            hk, hv = (None if h is None else h.flip(0) for h in (hk, hv))
    o, hk, hv = ops.gsa(q=q, k=k, v=v, s=s, g=g, hk0=hk, hv0=hv, cu_seqlens=cu_seqlens, **a)
    if reverse:
        o = o.flip(1)
        if cu_seqlens is not None:
            hk, hv = (None if h is None else h.flip(0) for h in (hk, hv))
    return o, (hk, hv)


def attention(g, sink_bias, **a):
    for name, value in (("g", g), ("sink_bias", sink_bias)):
        if value is not None:
            raise NotImplementedError(
                f"parallel_attn: Ouzel's softmax attention takes no `{name}`; leave it out, or use "
                "PyTorch's scaled_dot_product_attention with a mask"
            )
    return ops.softmax_attention(**a)


def based(use_norm, **a):
    return ops.based(normalize=use_norm, eps=1e-6, **a)


def rebased(q, k, v, eps, use_scale, use_normalize, return_both):
    scale = None if use_scale else 1.0
    if not return_both:
        return ops.rebased(q, k, v, scale=scale, normalize=use_normalize, eps=eps)
    o, z = (ops.rebased(q, k, x, scale=scale, normalize=False) for x in (v, torch.ones_like(v[..., :1])))
    return o.transpose(1, 2), z.squeeze(-1).transpose(1, 2)


def beta_or_ones(beta, v):
    return v.new_ones(v.shape[:3]) if beta is None else beta


def comba(k, v, p, beta, **a):
    return ops.comba(k=k, v=v, p=k if p is None else p, beta=beta_or_ones(beta, v), **a)


def delta_rule(v, beta, **a):
    return ops.delta_rule(v=v, beta=beta_or_ones(beta, v), **a)


def gated_delta_rule(v, beta, g, gk=None, gv=None, **a):
    beta = beta_or_ones(beta, v)
    if gv is not None or (gk is not None and beta.dim() == 4):
        return columns_apart(v=v, beta=beta, g=g, gk=gk, gv=gv, **a)
    if gk is not None:
        return ops.kda(v=v, beta=beta, g=gk if g is None else gk + g[..., None], **a)
    if g is None:
        return ops.delta_rule(v=v, beta=beta, **a)
    return ops.gated_delta_rule(v=v, beta=beta, g=g, **a)


def columns_apart(v, beta, g, gk, gv, initial_state, **a):
    """Each value column as a head of its own: no column sees another, so a decay per value is theirs."""
    *shape, HV, V = v.shape
    heads = (*shape, HV * V)

    def spread(x):
        return x.repeat_interleave(V, 2)

    beta = beta.reshape(heads) if beta.dim() == 4 else spread(beta)
    g = None if g is None else spread(g)
    if gv is not None:
        g = gv.reshape(heads) if g is None else g + gv.reshape(heads)
    if initial_state is not None:
        initial_state = initial_state.transpose(2, 3).flatten(1, 2).unsqueeze(-1)
    o, state = gated_delta_rule(v=v.reshape(*heads, 1), beta=beta, g=g, initial_state=initial_state,
                                gk=None if gk is None else spread(gk), **a)
    if state is not None:
        state = state.squeeze(-1).unflatten(1, (HV, V)).transpose(2, 3).contiguous()
    return o.reshape(v.shape), state


def dplr(gk, chunk_size=None, **a):
    return ops.dplr(g=gk, **a)


def rwkv7(r, w, chunk_size=None, **a):
    return ops.dplr(q=r, g=w, **a)


def rwkv7_mul(kk, a, **given):
    return rwkv7(a=-kk, b=kk * a, **given)


def gated_oja_rule(v, beta, use_qk_l2norm=False, use_q_l2norm=False, use_k_l2norm=False, **a):
    return ops.gated_oja_rule(v=v, beta=beta_or_ones(beta, v), use_q_l2norm=use_q_l2norm or use_qk_l2norm,
                              use_k_l2norm=use_k_l2norm or use_qk_l2norm, **a)


def gla(k, v, gk, gv, **a):
    if gk is None:
        gk = k.new_zeros((*v.shape[:3], k.shape[-1]))
    return ops.gla(k=k, v=v, g=gk, gv=gv, **a)


def lightnet(k, initial_state, cu_seqlens, **a):
    h, z = initial_state or (None, None)
    weights, gates, z = additive_gate(k, z, cu_seqlens)
    o, h = ops.gla(k=weights.to(k.dtype), g=gates, initial_state=h, cu_seqlens=cu_seqlens, **a)
    return o, (h, z)


def linear_attention(initial_state, output_final_state, normalize, **a):
    """The normaliser's state comes whether it is asked for or not: as published."""
    if not normalize:
        return ops.linear_attention(initial_state=initial_state, output_final_state=output_final_state, **a)
    h, z = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state, None)
    o, h, z = ops.linear_attention(initial_state=h, initial_z=None if z is None else z.squeeze(1),
                                   normalize=True, eps=1e-10, output_final_state=True, **a)
    return o, (h if output_final_state else None, z.unsqueeze(1))


def log_linear_attention(q, scale, initial_state, output_final_state, **a):
    if initial_state is not None or output_final_state:
        raise NotImplementedError(
            "chunk_log_linear_attn: Ouzel keeps no state of this law between calls; pass the whole "
            "sequence, without initial_state and output_final_state"
        )
    return ops.log_linear_attention(q=q, scale=q.shape[-1] ** -0.5 if scale is None else scale, **a), None


def simple_gla(v, g, g_gamma=None, **a):
    if g_gamma is not None and (g is not None or g_gamma.requires_grad):
        g, g_gamma = g_gamma.expand(v.shape[:3]) + (0 if g is None else g), None
    if g_gamma is not None:
        return ops.retention(v=v, g_gamma=g_gamma, **a)
    return ops.linear_attention(v=v, **a) if g is None else ops.simple_gla(v=v, g=g, **a)


def parallel(compute):
    """The quadratic form: the output, and the weights where they are asked for."""

    def with_weights(output_attentions, **a):
        if not output_attentions:
            return compute(**a)[0], None
        o, _, weights = compute(form="parallel", **a)
        return o, weights

    return with_weights


def l2norm(x):
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def preconditioned(q, k, v, g_atk, beta_atk, x, eps, log_atk_scale, g=None, gk=None, gv=None, beta=None,
                   initial_A_state=None, use_qk_l2norm=True, cu_seqlens=None, output_final_state=False, **a):
    """R = Diag(e^g) S; S' = R + m (beta (v - R^T k))^T with m = k x^(-r/(1+|r|)), r = log(A' + eps) - scale,
    A' = e^g_atk A + beta_atk k^2: `hgrn`, then `dplr`, whose erase of S along e^g k is that of R along k."""
    if gv is not None:
        raise NotImplementedError("fused_recurrent_precond_gated_delta_rule: there is no decay per value, "
                                  "`gv`, with a preconditioner; fold it into `gk` or leave it out")
    if use_qk_l2norm:
        q, k = l2norm(q).to(q.dtype), l2norm(k)
    size = k.shape[2:]
    A, final_A = ops.hgrn((beta_atk[..., None] * k.float().square()).flatten(2),
                          g_atk[..., None].expand(k.shape).flatten(2), cu_seqlens=cu_seqlens,
                          initial_state=None if initial_A_state is None else initial_A_state.flatten(1),
                          output_final_state=output_final_state)
    center = -0.2 if log_atk_scale is None else torch.as_tensor(log_atk_scale).reshape(-1, 1)
    r = (A.unflatten(2, size) + eps).log() - center
    m = k * torch.exp(-math.log(x) * r / (1 + r.abs()))
    k, m = (y.repeat_interleave(v.shape[2] // k.shape[2], 2) for y in (k, m))
    decay = sum((gate for gate in (None if g is None else g[..., None], gk) if gate is not None),
                k.new_zeros(1)).expand(k.shape)
    beta = beta_or_ones(beta, v)[..., None]
    o, state = ops.dplr(q, m, beta * v, decay.exp() * k, -beta * m, decay, cu_seqlens=cu_seqlens,
                        output_final_state=output_final_state, **a)
    return o, state, final_A if final_A is None else final_A.unflatten(1, size)


def preconditioned_kda(g, **a):
    return preconditioned(gk=g, **a)


def rwkv4(w, u, k, v, state):
    return ops.rwkv4(k, v, w, u, initial_state=state, output_final_state=True)


def ttt_linear(q, eta, chunk_size, initial_state_bias, **a):
    eta = q.new_full(q.shape[:3], eta) if isinstance(eta, float) else eta.squeeze(-1)
    bias = None if initial_state_bias is None else initial_state_bias.squeeze(2)
    o, h, bias = ops.ttt_linear(q=q, eta=eta, hb0=bias, mini_batch_size=chunk_size, **a)
    return o, h, None if bias is None else bias.unsqueeze(2)
