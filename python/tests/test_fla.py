"""ouzel.fla: every published function against its formula in float64; signatures, layouts, install."""

import ast
import importlib
import importlib.util
import inspect
import itertools
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ouzel  # noqa: E402
import ouzel.fla.modules  # noqa: E402
from ouzel.fla import _functions, _install, _modules, _table  # noqa: E402

F = torch.nn.functional
OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 2e-5  # docs/numerics.md

torch.set_num_threads(1)  # tensors are tiny

B, T, H, K, V, M, D = 2, 9, 2, 4, 6, 3, 5
CU = [0, 4, 4, 9]


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def samples(HV=H, B=B, N=None):
    """Arguments by name: what the cases call their inputs."""
    torch.manual_seed(0)
    N = B if N is None else N

    def per(*tail, heads=HV):
        return normal(B, T, heads, *tail)

    def unit(*tail):
        return F.normalize(normal(B, T, *tail), dim=-1)

    return {
        "q": per(K, heads=H),
        "k": unit(H, K),
        "v": per(V),
        "positive_q": per(K, heads=H).exp(),
        "positive_k": per(K, heads=H).exp(),
        "u": normal(H, K),
        "p": unit(H, K),
        "kk": unit(H, K),
        "rate": torch.sigmoid(per(K, heads=H)),
        "low_a": unit(H, K),
        "low_b": -0.5 * unit(H, K),
        "raw_g": per(),
        "raw_gk": per(K),
        "g": F.logsigmoid(per()),
        "gk": F.logsigmoid(per(K)),
        "gv": F.logsigmoid(per(V)),
        "beta": torch.sigmoid(per()),
        "logit": per(),
        "b": torch.sigmoid(per(K)),
        "w": torch.sigmoid(per(V)),
        "A_log": normal(HV),
        "bias": normal(HV),
        "bias_k": normal(HV * K),
        "g_gamma": F.logsigmoid(normal(H)),
        "s": per(M, heads=H),
        "gs": F.logsigmoid(per(M, heads=H)),
        "state": normal(N, HV, K, V),
        "z": normal(N, 1, H, K).exp(),
        "lse": normal(N, 1, H, K),
        "hk": normal(N, H, K, M),
        "hv": normal(N, H, M, V),
        "x": normal(B, T, D),
        "gx": F.logsigmoid(normal(B, T, D)),
        "hx": normal(N, D),
        "wx": normal(D),
        "ux": normal(D),
        "h4": torch.cat([normal(N, 1, 1, D), normal(N, 1, 1, D).exp(), normal(N, 1, 1, D)], 1),
        "many_k": F.normalize(normal(B, 3 * T, H, K), dim=-1),
        "many_v": normal(B, 3 * T, H, V),
        "many_beta": torch.sigmoid(normal(B, 3 * T, H)),
        "square_v": per(K, heads=H),
        "ln_w": 1 + 0.1 * normal(H, K),
        "ln_b": 0.1 * normal(H, K),
        "eta": 0.1 * torch.sigmoid(normal(B, T, H, 1)),
        "square": 0.1 * normal(N, H, K, K),
        "hb": 0.1 * normal(N, H, 1, K),
        "g_atk": F.logsigmoid(normal(B, T, H)),
        "beta_atk": torch.sigmoid(normal(B, T, H)),
        "A": normal(N, H, K).exp(),
        "center": 0.3 * normal(H),
        "levels": torch.sigmoid(normal(B, T, H, 5)),
    }


# The formulas, a token at a time, in the type of their inputs. What they return is what is published.


def spread(x, heads):
    return x.repeat_interleave(heads // x.shape[2], 2)


def scan(q, k, v, state=None, scale=None, g=None, gv=None, erase=None, write=None, undecayed=False,
         bonus=None, reverse=False):
    """S' = R + write ((R or S)^T erase)^T + k v^T with R = Diag(e^g) S Diag(e^gv); o = S'^T scale q."""
    heads = v.shape[2]
    q, k = spread(q, heads), spread(k, heads)
    erase, write = (None if x is None else spread(x, heads) for x in (erase, write))
    S = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1]) if state is None else state
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o = [None] * v.shape[1]
    for t in reversed(range(v.shape[1])) if reverse else range(v.shape[1]):
        R = S
        if g is not None:
            R = R * (g[:, t].exp()[..., None] if g.dim() == 4 else g[:, t].exp()[..., None, None])
        if gv is not None:
            R = R * gv[:, t].exp()[:, :, None]
        new = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        read = S + bonus[..., None] * new if bonus is not None else None
        if erase is not None:
            seen = torch.einsum("bhkv,bhk->bhv", S if undecayed else R, erase[:, t])
            new = new + torch.einsum("bhk,bhv->bhkv", write[:, t], seen)
        S = R + new
        o[t] = torch.einsum("bhkv,bhk->bhv", S if read is None else read, scale * q[:, t])
    return torch.stack(o, 1), S


def delta(q, k, v, beta, undecayed=False, p=None, **a):
    strength = beta if beta.dim() == 4 else beta[..., None]
    if beta.dim() == 4:  # a strength per value: each column alone
        columns = [delta(q, k, v[..., i : i + 1], beta[..., i], **column(a, i))
                   for i in range(v.shape[-1])]
        return tuple(torch.cat(x, -1) for x in zip(*columns))
    k = spread(k, v.shape[2])
    p = k if p is None else spread(p, v.shape[2])
    return scan(q, k, strength * v, erase=p, write=-strength * k, undecayed=undecayed, **a)


def column(a, i):
    return {n: x[..., i : i + 1] if n in ("state", "gv") and x is not None else x for n, x in a.items()}


def normed(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def decays_per_head(rule):
    def compute(q, k, v, **a):
        return scan(q, k, v, g=rule(torch.arange(H, dtype=torch.float64)).expand(v.shape[:3]), **a)

    return compute


def retention(q, k, v, **a):
    return decays_per_head(lambda h: torch.log1p(-(2 ** (-5 - h))))(q, k, v, **a)


def lightning(q, k, v, **a):
    """Of layer 1 of 4."""
    return decays_per_head(lambda h: -8 / H * (1 - 1 / 4) * h)(q, k, v, **a)


def weights_too(law):
    """The weights are the outputs of an identity matrix of values."""

    def compute(q, k, v, **a):
        eye = torch.eye(T, dtype=v.dtype)[None, :, None].expand(v.shape[0], T, H, T)
        return law(q, k, v, **a)[0], law(q, k, eye, **a)[0].transpose(1, 2)

    return compute


def normalized(q, k, v, state=(None, None), scale=None, reverse=False):
    h, z = state if isinstance(state, tuple) else (state, None)
    o, h = scan(q, k, v, h, scale, reverse=reverse)
    z = 0 if z is None else z
    sums = z + (k.flip(1).cumsum(1).flip(1) if reverse else k.cumsum(1))
    scale = K**-0.5 if scale is None else scale
    denominator = (scale * q * sums).sum(-1, keepdim=True) + 1e-10
    return o / denominator, (h, sums[:, :1] if reverse else sums[:, -1:])


def sums_of_weights(weigh, eps=1e-6, norm=True):
    def compute(q, k, v, scale=K**-0.5):
        w = torch.tril(weigh(torch.einsum("bihk,bjhk->bhij", q, k) * scale))
        o = torch.einsum("bhij,bjhv->bihv", w, v)
        return o / (w.sum(-1).transpose(1, 2)[..., None] + eps) if norm else o

    return compute


def taylor(x):
    return 1 + x + x * x / 2


def attention(window):
    def compute(q, k, v, scale=K**-0.5):
        s = torch.einsum("bihk,bjhk->bhij", q, k) * scale
        i, j = torch.arange(T)[:, None], torch.arange(T)
        s = s.masked_fill((j > i) | (i - j >= window), float("-inf"))
        return torch.einsum("bhij,bjhv->bihv", s.softmax(-1), v)

    return compute


def slots(q, k, v, s, g=None, state=(None, None), scale=None, reverse=False):
    if g is None:
        z = s.logcumsumexp(1)
        g = torch.cat([z[:, :1], z[:, :-1]], 1) - z
        s = (s - z).exp()
    hk, hv = state
    a, hk = scan(q, k, s, hk, scale, gv=g, reverse=reverse)
    o, hv = scan(a.softmax(-1), s, v, hv, 1.0, g=g, reverse=reverse)
    return o, (hk, hv)


def lightnet(q, k, v, state=(None, None), scale=None):
    h, z0 = state
    z = (k if z0 is None else torch.cat([z0, k], 1)).logcumsumexp(1)
    before = torch.cat([z[:, :1], z[:, :-1]], 1) if z0 is None else z[:, :-1]
    z = z if z0 is None else z[:, 1:]
    o, h = scan(q, (k - z).exp(), v, h, scale, g=before - z)
    return o, (h, z[:, -1:])


def oja(q, k, v, gv, beta, state=None, scale=K**-0.5):
    S, o = v.new_zeros(B, H, K, V) if state is None else state, []
    for t in range(T):
        S = S * gv[:, t].exp()[:, :, None]
        e = beta[:, t, :, None] * (k[:, t] - torch.einsum("bhkv,bhv->bhk", S, v[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", e, v[:, t])
        o.append(torch.einsum("bhkv,bhk->bhv", S, scale * q[:, t]))
    return torch.stack(o, 1), S


def product(q, k, v, beta, g=None, state=None, scale=None):
    """With three steps a token."""
    n, S, o = 3, state, []
    g = torch.zeros_like(q[..., 0]) if g is None else g
    for t in range(T):
        rows = slice(n * t, n * t + n)
        gates = torch.cat([g[:, t : t + 1], g.new_zeros(B, n - 1, H)], 1)
        read = torch.cat([q.new_zeros(B, n - 1, H, K), q[:, t : t + 1]], 1)
        out, S = delta(read, k[:, rows], v[:, rows], beta[:, rows], g=gates, state=S, scale=scale)
        o.append(out[:, -1])
    return torch.stack(o, 1), S


def preconditioned(q, k, v, g_atk, beta_atk, beta, g=None, gk=None, log_atk_scale=None, state=None,
                   scale=None):
    (S, A), heads, o, q, k = state or (None, 0), v.shape[2], [], normed(q), normed(k)
    center = -0.2 if log_atk_scale is None else log_atk_scale[:, None]
    for t in range(T):
        A = g_atk[:, t].exp()[..., None] * A + beta_atk[:, t, :, None] * k[:, t] ** 2
        r = (A + 1e-6).log() - center
        m = k[:, t] * 1.5 ** (-r / (1 + r.abs()))
        x = slice(t, t + 1)
        strength = beta[:, x, :, None]
        out, S = scan(q[:, x], m[:, None], strength * v[:, x], S, scale, erase=k[:, x],
                      write=-strength * spread(m[:, None], heads), g=g[:, x] if gk is None else gk[:, x])
        o.append(out)
    return torch.cat(o, 1), S, A


def hgrn(x, g, state=None):
    h, o = torch.zeros_like(x[:, 0]) if state is None else state, []
    for t in range(T):
        h = g[:, t].exp() * h + x[:, t]
        o.append(h)
    return torch.stack(o, 1), h


def rwkv4(w, u, k, v, state):
    (a, b, e), o, w = (state[:, i, 0] for i in range(3)), [], w.exp()
    for t in range(T):
        here = (u + k[:, t]).exp()
        o.append((e.exp() * a + here * v[:, t]) / (e.exp() * b + here))
        m = torch.maximum(e - w, k[:, t])
        a, b = ((e - w - m).exp() * x + (k[:, t] - m).exp() * y for x, y in ((a, v[:, t]), (b, 1)))
        e = m
    return torch.stack(o, 1), torch.stack([a, b, e], 1)[:, :, None]


def level(t, s):
    """Of the Fenwick tree: 0 for the token itself, else 1 + the largest power of 2 that parts them."""
    return (t ^ s).bit_length()


def log_linear(q, k, v, g, level_scales, scale=1.0):
    G = g.cumsum(1)
    o = []
    for t in range(T):
        terms = [
            level_scales[:, t, :, level(t, s), None] * (G[:, t] - G[:, s]).exp()[..., None]
            * (scale * q[:, t] * k[:, s]).sum(-1, keepdim=True) * v[:, s]
            for s in range(t + 1)
        ]
        o.append(sum(terms))
    return torch.stack(o, 1)


def ttt(size):
    """No formula of its own: here the layouts are under test, the law is elsewhere."""

    def compute(eta, state=(None, None), **a):
        a = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in a.items()}
        h, hb = (x if x is None else x.float() for x in state)
        o, h, hb = ouzel.torch.ttt_linear(**a, eta=eta.float()[..., 0], initial_state=h,
                                          hb0=hb if hb is None else hb[:, :, 0], mini_batch_size=size,
                                          output_final_state=True)
        return o, h, hb[:, :, None]

    return compute


def erased(q, k, v, a, b, gk=None, **rest):
    return scan(q, k, v, erase=a, write=b, g=gk, undecayed=True, **rest)


def rwkv7(r, w, k, v, a, b, **rest):
    return erased(r, k, v, a, b, w, **rest)


def chunk_rwkv7(scale=1.0, **rest):
    return rwkv7(scale=scale, **rest)


def rwkv7_mul(kk, a, **rest):
    return chunk_rwkv7(a=-kk, b=kk * a, **rest)


def rwkv6(r, k, v, w, u, **rest):
    return scan(r, k, v, g=w, bonus=u, **rest)


def gdn2(q, k, v, g, b, w, **rest):
    return scan(q, k, w * v, g=g, erase=b * k, write=-k, **rest)


def comba(q, k, v, p, g, beta, **rest):
    return delta(q, k, v, beta, p=p, g=g, undecayed=True, **rest)


def gdn(q, k, v, g=None, beta=None, gk=None, gv=None, **rest):
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if g is not None and gk is not None:
        gk = gk + g[..., None]
    return delta(q, k, v, beta, g=g if gk is None else gk, gv=gv, **rest)


def simple(q, k, v, g=None, g_gamma=None, **rest):
    if g_gamma is not None:
        g = g_gamma.expand(v.shape[:3]) + (0 if g is None else g)
    return scan(q, k, v, g=g, **rest)


# What switches do to a formula.


def norms(law, names="qkp"):
    def compute(**a):
        return law(**{n: normed(x) if n in names else x for n, x in a.items()})

    return compute


def raw_gate(law, bound=None):
    def compute(g, A_log=None, dt_bias=None, **rest):
        shape = g.shape[2:]
        rate = 1 if A_log is None else A_log.exp().reshape(-1, *[1] * (len(shape) - 1))
        g = g + (0 if dt_bias is None else dt_bias.reshape(shape))
        return law(g=-rate * F.softplus(g) if bound is None else bound * torch.sigmoid(rate * g), **rest)

    return compute


def raw_beta(law, factor):
    def compute(beta, **rest):
        return law(beta=factor * torch.sigmoid(beta), **rest)

    return compute


def as_it_is(g):
    return g


# The functions: inputs (NAME, or NAME=SAMPLE), the formula of them, states, and what else is passed.


class Case:
    def __init__(self, name, inputs, formula, states="state", heads=H, **options):
        self.name = name
        self.function = getattr(ouzel.fla, name)
        self.inputs = dict(x.split("=") if "=" in x else (x, x) for x in inputs.split())
        self.formula = formula
        self.parameters = inspect.signature(self.function).parameters
        self.states = states if self.has("initial_state") else None
        self.heads = heads
        self.options = options

    def has(self, parameter):
        return parameter in self.parameters


QKV, GATES = "q k v", "A_log dt_bias=bias_k"
POSITIVE = "q=positive_q k=positive_k v"
LOW_RANK = "k v a=low_a b=low_b"
GVA = {"heads": 2 * H}
NORM = {"use_qk_l2norm_in_kernel": True}
RAW = {"use_gate_in_kernel": True}
LOGITS = {"use_beta_sigmoid_in_kernel": True}
SLOTS, NORMALIZER, LIGHTNET, TTT = ("hk", "hv"), ("state", "z"), ("state", "lse"), ("square", "hb")
ATK, ATK_STATES = "g_atk beta_atk beta", ("state", "A")
ONE_GATE = "fused_recurrent_gated_delta_rule"
CASES = [
    Case("chunk_abc", "q k v s", slots, SLOTS),
    Case("parallel_attn", QKV, attention(T)),
    Case("parallel_attn", QKV, attention(3), window_size=3),
    Case("fused_chunk_based", QKV, sums_of_weights(taylor)),
    Case("parallel_based", QKV, sums_of_weights(taylor, norm=False), use_norm=False),
    Case("chunk_comba", "q k v p g beta", comba),
    Case("chunk_comba", "q k v p g beta", comba, **GVA),
    Case("fused_recurrent_comba", "q k p v g beta", norms(comba), **NORM),
    Case("chunk_delta_rule", "q k v beta", delta),
    Case("fused_recurrent_delta_rule", QKV, gdn),
    Case("fused_recurrent_delta_rule", "q k v beta=w", norms(delta), **NORM),
    Case("chunk_gated_delta_product", "q k=many_k v=many_v g beta=many_beta", product, num_householder=3),
    Case("chunk_gated_delta_product", "q k=many_k v=many_v beta=many_beta", product,
         num_householder=3, g=None),
    Case("chunk_gated_delta_rule", "q k v g beta", gdn),
    Case("chunk_gated_delta_rule", "q k v g beta", norms(gdn), **GVA, **NORM),
    Case("chunk_gdn", "q k v g=raw_g beta=logit A_log dt_bias=bias", raw_beta(raw_gate(gdn), 1),
         **RAW, **LOGITS),
    Case(ONE_GATE, "q k v g beta", gdn),
    Case(ONE_GATE, QKV, gdn),
    Case(ONE_GATE, "q k v gk beta", gdn, **GVA),
    Case(ONE_GATE, "q k v g gk gv beta", gdn, **GVA),
    Case(ONE_GATE, "q k v gv", gdn),
    Case(ONE_GATE, "q k v gk beta=w", gdn),
    Case("fused_recurrent_gdn", "q k v g=raw_g beta=logit A_log", raw_beta(raw_gate(gdn), 2),
         allow_neg_eigval=True, **RAW, **LOGITS),
    Case("fused_gdn_gate", "g=raw_g A_log dt_bias=bias", raw_gate(as_it_is)),
    Case("chunk_gated_oja_rule", "q k v gv beta", oja),
    Case("chunk_gated_oja_rule", "q k v gv beta", norms(oja), **NORM),
    Case("fused_recurrent_gated_oja_rule", "q k v gv beta", norms(oja, "q"), use_q_l2norm=True),
    Case("chunk_gdn2", "q k v g=gk b w", gdn2),
    Case("chunk_gdn2", f"q k v g=raw_gk b w {GATES}", raw_gate(norms(gdn2), -5),
         safe_gate=True, lower_bound=-5, **RAW, **NORM),
    Case("fused_recurrent_gdn2", "q k v g=gk b w", gdn2),
    Case("chunk_dplr_delta_rule", f"q {LOW_RANK} gk", erased),
    Case("fused_recurrent_dplr_delta_rule", f"q {LOW_RANK} gk", erased),
    Case("chunk_iplr_delta_rule", f"q {LOW_RANK}", erased),
    Case("fused_recurrent_iplr_delta_rule", f"q {LOW_RANK}", erased),
    Case("chunk_gla", "q k v g=gk", scan),
    Case("fused_recurrent_gla", "q k v gk", lambda gk, **a: scan(g=gk, **a)),
    Case("fused_recurrent_gla", "q k v gv", scan),
    Case("chunk_gsa", "q k v s g=gs", slots, SLOTS),
    Case("chunk_gsa", "q k v s", slots, SLOTS),
    Case("fused_recurrent_gsa", "q k v s g=gs", slots, SLOTS),
    Case("chunk_hgrn", "x g=gx", hgrn, "hx"),
    Case("fused_recurrent_hgrn", "x g=gx", hgrn, "hx"),
    Case("chunk_kda", "q k v g=gk beta", gdn),
    Case("chunk_kda", f"q k v g=raw_gk beta {GATES}", raw_gate(norms(gdn)), **GVA, **RAW, **NORM),
    Case("chunk_kda", f"q k v g=raw_gk beta {GATES}", raw_gate(gdn, -5),
         safe_gate=True, lower_bound=-5, **RAW),
    Case("fused_recurrent_kda", "q k v g=raw_gk beta=logit dt_bias=bias_k", raw_beta(raw_gate(gdn, -4), 1),
         lower_bound=-4, **RAW, **LOGITS),
    Case("fused_kda_gate", f"g=raw_gk {GATES}", raw_gate(as_it_is)),
    Case("fused_kda_gate", "g=raw_gk A_log", raw_gate(as_it_is, -2), lower_bound=-2),
    Case("chunk_lightnet", QKV, lightnet, LIGHTNET),
    Case("fused_recurrent_lightnet", QKV, lightnet, LIGHTNET),
    Case("chunk_lightning_attn", QKV, lightning, layer_idx=1, num_layers=4),
    Case("fused_recurrent_lightning_attn", QKV, lightning, layer_idx=1, num_layers=4),
    Case("chunk_linear_attn", POSITIVE, normalized, NORMALIZER),
    Case("chunk_linear_attn", POSITIVE, normalized),
    Case("chunk_linear_attn", QKV, scan, normalize=False),
    Case("fused_chunk_linear_attn", POSITIVE, normalized, NORMALIZER),
    Case("fused_recurrent_linear_attn", QKV, scan),
    Case("fused_recurrent_linear_attn", POSITIVE, normalized, NORMALIZER, normalize=True),
    Case("chunk_log_linear_attn", "q k v g level_scales=levels", log_linear, None),
    Case("chunk_precond_gated_delta_rule", f"q k v g {ATK}", preconditioned, ATK_STATES),
    Case("chunk_precond_gated_delta_rule", f"q k v g {ATK} log_atk_scale=center", preconditioned, ATK_STATES,
         **GVA),
    Case("fused_recurrent_precond_gated_delta_rule", f"q k v gk {ATK}", preconditioned, ATK_STATES),
    Case("chunk_precond_kda", f"q k v g=gk {ATK}", lambda g, **a: preconditioned(gk=g, **a), ATK_STATES),
    Case("fused_recurrent_precond_kda", f"q k v g=raw_gk {ATK} {GATES}",
         raw_gate(lambda g, **a: preconditioned(gk=g, **a)), ATK_STATES, **RAW),
    Case("parallel_rebased", QKV, sums_of_weights(torch.square, 1e-5)),
    Case("parallel_rebased", QKV, lambda **a: sums_of_weights(torch.square, 1e-3)(scale=1, **a), eps=1e-3,
         use_scale=False),
    Case("chunk_retention", QKV, retention),
    Case("fused_chunk_retention", QKV, retention),
    Case("fused_recurrent_retention", QKV, retention),
    Case("parallel_retention", QKV, weights_too(retention), output_attentions=True),
    Case("fused_recurrent_rwkv4", "w=wx u=ux k=x v=gx state=h4", rwkv4),
    Case("chunk_rwkv6", "r=q k v w=gk u", rwkv6),
    Case("fused_recurrent_rwkv6", "r=q k v w=gk u", rwkv6),
    Case("chunk_rwkv7", f"r=q w=gk {LOW_RANK}", chunk_rwkv7),
    Case("fused_recurrent_rwkv7", f"r=q w=gk {LOW_RANK}", rwkv7),
    Case("fused_mul_recurrent_rwkv7", "r=q w=gk k v kk a=rate", rwkv7_mul),
    Case("chunk_simple_gla", "q k v g", simple),
    Case("chunk_simple_gla", "q k v g_gamma", simple),
    Case("chunk_simple_gla", QKV, simple),
    Case("fused_chunk_simple_gla", "q k v g g_gamma", simple),
    Case("fused_recurrent_simple_gla", "q k v g", simple),
    Case("parallel_simple_gla", "q k v g", weights_too(simple), output_attentions=True),
    Case("chunk_ttt_linear", "q k v=square_v w=ln_w b=ln_b eta", ttt(4), TTT, chunk_size=4),
    Case("fused_chunk_ttt_linear", "q k v=square_v w=ln_w b=ln_b eta", ttt(16), TTT),
]



def over_cases(*others, where=lambda case, *values: True):
    """Parametrizes by case, and by the values of others: ("reverse", [False, True])."""
    names, values = zip(("case", CASES), *others)
    rows = [row for row in itertools.product(*values) if where(*row)]
    ids = ["-".join([str(CASES.index(case)), case.name, *map(str, rest)]) for case, *rest in rows]
    return pytest.mark.parametrize(",".join(names), [r if others else r[0] for r in rows], ids=ids)


def flat(results):
    """The tensors of a result, whatever it is nested in."""
    if isinstance(results, (tuple, list)):
        return [x for r in results for x in flat(r)]
    return [] if results is None else [results]


def cast(x, dtype, grad=False):
    """Fresh leaves of all tensors."""
    if isinstance(x, dict):
        return {n: cast(y, dtype, grad) for n, y in x.items()}
    if isinstance(x, tuple):
        return tuple(cast(y, dtype, grad) for y in x)
    return None if x is None else x.to(dtype).clone().requires_grad_(grad)


def drawn(case, **sizes):
    """The inputs of a case by published names, and its state."""
    named = samples(case.heads, **sizes)
    given = {name: named[sample] for name, sample in case.inputs.items()}
    if isinstance(case.states, tuple):
        return given, tuple(named[n] for n in case.states)
    return given, case.states and named[case.states]


def call(case, given, state=None, **options):
    second = next((n for n in ("initial_state_bias", "initial_A_state") if case.has(n)), None)
    if second:
        options["initial_state"], options[second] = state or (None, None)
    elif state is not None:
        options["initial_state"] = state
    if case.states:
        options.setdefault("output_final_state", True)
    return case.function(**given, **case.options, **options)


def close(got, expected, bound, floor=0.0):
    got, expected = got.detach().double(), expected.detach().double()
    scale = max(float(expected.square().mean().sqrt()), floor) or 1
    assert got.shape == expected.shape
    assert float((got - expected).square().mean().sqrt()) <= bound * scale


def possible(case, stated, reverse):
    return (not stated or case.states) and (not reverse or case.has("reverse"))


@over_cases(("stated", [False, True]), ("reverse", [False, True]), where=possible)
def test_results_and_gradients_are_those_of_the_formula(case, stated, reverse):
    options = {"reverse": True} if reverse else {}
    if stated and case.has("scale"):
        options["scale"] = 0.7
    given, state = drawn(case)
    state = state if stated else None
    ours, true = (cast((given, state), dtype, grad=True) for dtype in (torch.float32, torch.float64))
    got = flat(call(case, *ours, **options))
    expected = flat(case.formula(**true[0], **({"state": true[1]} if stated else {}), **options))
    assert len(got) == len(expected)
    for x, y in zip(got, expected):
        close(x, y, OUTPUT_BOUND)
    pairs = [(x, y) for x, y in zip(got, expected) if x.requires_grad]
    upstream = [normal(*x.shape) for x, _ in pairs]
    leaves = [flat(list(values[0].values())) + flat(values[1]) for values in (ours, true)]
    gradients = [
        torch.autograd.grad(outputs, inputs, [u.to(x.dtype) for u, x in zip(upstream, outputs)],
                            allow_unused=True)
        for outputs, inputs in zip(zip(*pairs), leaves)
    ]
    floor = 1e-3 * max(float(g.square().mean().sqrt()) for g in gradients[1] if g is not None)
    for ours, true in zip(*gradients):
        assert (ours is None) == (true is None)
        if true is not None:
            close(ours, true, GRADIENT_BOUND, floor)


def test_every_function_has_a_case():
    tested = {case.name for case in CASES}
    aliases = {n for n, f in _functions.items() if n not in tested and any(f is c.function for c in CASES)}
    assert set(_functions) == tested | aliases | set(_table.REPLACED)
    assert set(ouzel.fla.__all__) == {*_functions, "Installation", "install", "uninstall"}
    assert all(f.__doc__ for n, f in _functions.items() if n not in _table.REPLACED)


def pieces(case, given, state):
    """A packed call as calls of each sequence."""
    for n, (begin, end) in enumerate(zip(CU, CU[1:])):
        alone = {}
        for name, x in given.items():
            rows = x.shape[1] // T if x.dim() > 2 and x.shape[0] == 1 else 0
            alone[name] = x[:, rows * begin : rows * end] if rows else x
        yield alone, tuple(h[n : n + 1] for h in state) if isinstance(state, tuple) else state[n : n + 1]


@over_cases(where=lambda case: case.has("cu_seqlens") and case.states)
@pytest.mark.parametrize("as_a", ["list", "tensor"])
def test_packed_sequences_are_as_if_alone(case, as_a):
    cu_seqlens = CU if as_a == "list" else torch.tensor(CU)
    options = {"reverse": True} if case.has("reverse") else {}
    given, state = cast(drawn(case, B=1, N=3), torch.float32)
    packed = flat(call(case, given, state, cu_seqlens=cu_seqlens, **options))
    alone = [flat(call(case, *piece, **options)) for piece in pieces(case, given, state)]
    for results, axis in zip(zip(packed, *alone), [1, *[0] * 3]):
        close(results[0], torch.cat(results[1:], axis), 1e-6)


@over_cases(where=lambda case: case.has("cu_seqlens") and not case.states)
def test_packed_sequences_without_states(case):
    given, _ = cast(drawn(case, B=1), torch.float32)
    options = case.options | {"cu_seqlens": CU}
    if case.has("output_attentions"):
        options["output_attentions"] = False
    packed = flat(case.function(**given, **options))[0]
    del options["cu_seqlens"]
    alone = [case.function(**{n: x[:, b:e] for n, x in given.items()}, **options)
             for b, e in zip(CU, CU[1:]) if e > b]
    close(packed, torch.cat([flat(o)[0] for o in alone], 1), 1e-6)


LAYOUTS = ("state_v_first", "transpose_state_layout")


@over_cases(where=lambda case: any(map(case.has, LAYOUTS)))
def test_states_with_values_first(case):
    def turned(state):
        if isinstance(state, tuple):
            return (turned(state[0]), *state[1:])
        return state.transpose(-1, -2).contiguous()

    layout = next(filter(case.has, LAYOUTS))
    given, state = cast(drawn(case), torch.float32)
    first = call(case, given, state)
    second = call(case, given, turned(state), **{layout: True})
    assert torch.equal(first[0], second[0])
    assert torch.equal(flat(turned(first[1]))[0], flat(second[1])[0])
    assert all(map(torch.equal, flat(first)[2:], flat(second)[2:]))
    if layout == LAYOUTS[0] and case.has("kwargs"):
        with pytest.warns(DeprecationWarning, match="now called `state_v_first`"):
            old = call(case, given, turned(state), transpose_state_layout=True)
        assert all(map(torch.equal, flat(old), flat(second)))
        with pytest.raises(ValueError, match="old name"):
            call(case, given, turned(state), transpose_state_layout=True, state_v_first=True)


def test_what_is_returned():
    a = cast(samples(), torch.float32)
    q, k, v, g, gk, beta, s = (a[n] for n in ("q", "k", "v", "g", "gk", "beta", "s"))
    assert ouzel.fla.chunk_gla(q, k, v, gk)[1] is None
    assert ouzel.fla.chunk_abc(q, k, v, s)[1] is None
    assert ouzel.fla.chunk_gsa(q, k, v, s)[1] == (None, None)
    assert ouzel.fla.parallel_simple_gla(q, k, v)[1] is None
    h, z = ouzel.fla.chunk_linear_attn(q, k, v)[1]
    assert h is None and z.shape == (B, 1, H, K)
    assert ouzel.fla.fused_recurrent_linear_attn(q, k, v)[1] is None
    h, z = ouzel.fla.chunk_lightnet(q, k, v)[1]
    assert h is None and z.shape == (B, 1, H, K)
    assert ouzel.fla.chunk_rwkv7(q, gk, k, v, k, k)[1] is None
    assert ouzel.fla.fused_recurrent_rwkv7(q, gk, k, v, k, k)[1] is not None
    assert len(ouzel.fla.chunk_ttt_linear(q, k, k, a["ln_w"], a["ln_b"], 0.1)) == 3
    o, z = ouzel.fla.parallel_rebased(q, k, v, return_both=True)
    assert o.shape == (B, H, T, V) and z.shape == (B, H, T)
    close(o / (z[..., None] + 1e-5), ouzel.fla.parallel_rebased(q, k, v).transpose(1, 2), 1e-6)
    assert isinstance(ouzel.fla.parallel_based(q, k, v), torch.Tensor)
    o, h = ouzel.fla.chunk_gated_delta_rule(q.bfloat16(), k, v, g, beta, output_final_state=True)
    assert o.dtype == torch.bfloat16 and h.dtype == torch.float32


def test_lightnet_goes_on_from_its_states():
    q, k, v = (cast(samples()[n], torch.float32) for n in ("q", "k", "v"))
    whole, (h, z) = ouzel.fla.chunk_lightnet(q, k, v, output_final_state=True)
    o, state = ouzel.fla.chunk_lightnet(q[:, :4], k[:, :4], v[:, :4], output_final_state=True)
    rest, (h2, z2) = ouzel.fla.chunk_lightnet(q[:, 4:], k[:, 4:], v[:, 4:], initial_state=state,
                                              output_final_state=True)
    for x, y in ((torch.cat([o, rest], 1), whole), (h2, h), (z2, z)):
        close(x, y, 1e-6)
    none = q[:, :0], k[:, :0], v[:, :0]
    assert torch.equal(ouzel.fla.chunk_lightnet(*none, initial_state=state)[1][1], state[1])
    assert ouzel.fla.chunk_lightnet(*none)[1][1].eq(float("-inf")).all()


def test_what_only_concerns_gpus_changes_nothing():
    q, k, v, gk, beta, h = (cast(samples()[n], torch.float32) for n in ("q", "k", "v", "gk", "beta", "state"))
    plain = ouzel.fla.chunk_kda(q, k, v, gk, beta, initial_state=h, output_final_state=True)
    hinted = ouzel.fla.chunk_kda(q, k, v, gk, beta, initial_state=h, output_final_state=True, chunk_size=32,
                                 safe_gate=True, lower_bound=-5.0, disable_recompute=True, use_graph=True,
                                 max_num_seqs=4, cu_seqlens_cpu=torch.tensor(CU), A_log=q, dt_bias=q)
    assert all(map(torch.equal, plain, hinted))


def test_decays_that_are_parameters_learn():
    q, k, v, g_gamma = (cast(samples()[n], torch.float32) for n in ("q", "k", "v", "g_gamma"))
    fixed, _ = ouzel.fla.chunk_simple_gla(q, k, v, g_gamma=g_gamma)
    learned, _ = ouzel.fla.chunk_simple_gla(q, k, v, g_gamma=g_gamma.requires_grad_())
    close(fixed, learned, 1e-6)
    learned.sum().backward()
    assert g_gamma.grad.abs().min() > 0


REFUSALS = [
    ("chunk_kda", {"head_first": False}, DeprecationWarning, "head_first has been removed"),
    ("chunk_kda", {"cp_context": object()}, NotImplementedError, "chunk_kda: cp_context: context parallelism"),
    ("chunk_kda", {"return_intermediate_states": True}, NotImplementedError, "output_final_state"),
    ("chunk_kda", {"chunk_size": 48}, ValueError, "power of 2, 48 was found"),
    ("chunk_kda", {"chunk_sise": 64}, TypeError, r"chunk_kda\(\) got an unexpected .* 'chunk_sise'"),
    ("chunk_kda", {"use_gate_in_kernel": True}, ValueError, "needs `A_log`"),
    ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True}, ValueError, "requires `lower_bound`"),
    ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6}, ValueError, "lie in"),
    ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": 1.0}, ValueError, "below 0"),
    ("chunk_kda", {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel=True"),
    ("chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError,
     r"`A_log` has 3 numbers; one for each of \(2, 1\)"),
    ("chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(H)}, ValueError,
     r"`dt_bias` has 2 numbers; one for each of \(2, 4\)"),
    ("chunk_kda", {"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError, "the logits"),
    ("chunk_kda", {"cu_seqlens": CU}, ValueError, "kda: "),
    ("chunk_kda", {"initial_state": torch.zeros(3, H, K, V)}, ValueError, "kda: initial_state"),
    ("chunk_kda", {"beta": None}, (TypeError, ValueError), "beta"),
    ("fused_recurrent_gated_delta_rule", {"g": None, "use_gate_in_kernel": True, "A_log": torch.zeros(H)},
     ValueError, "the raw gate"),
    ("fused_recurrent_precond_gated_delta_rule", {"gv": torch.zeros(B, T, H, V)}, NotImplementedError,
     "fold it"),
    ("fused_recurrent_gated_delta_rule", {"A": 1}, TypeError, "unexpected keyword argument 'A'"),
    ("parallel_attn", {"g": torch.zeros(B, T, H)}, NotImplementedError, "parallel_attn: .* `g`"),
    ("parallel_attn", {"sink_bias": torch.zeros(H)}, NotImplementedError, "parallel_attn: .* `sink_bias`"),
    ("chunk_log_linear_attn", {"output_final_state": True}, NotImplementedError, "whole sequence"),
    ("fused_chunk_gla", {}, NotImplementedError, "call chunk_gla"),
]


@pytest.mark.parametrize("name,options,error,sentence", REFUSALS)
def test_refusals(name, options, error, sentence):
    case = next((c for c in CASES if c.name == name and "gk" in {*c.inputs.values(), "gk"}), None)
    given = cast(drawn(case)[0], torch.float32) if case else {}
    with pytest.raises(error, match=sentence):
        getattr(ouzel.fla, name)(**given | options)


def test_the_page_names_every_function():
    page = Path(__file__).resolve().parents[2] / "docs" / "fla.md"
    told = page.read_text()
    assert all(f"`{name}`" in told for name in (*_functions, *_table.ABSENT))
    assert f"version {_table.PUBLISHED}" in told


def test_published_names_without_a_law():
    assert not set(_table.ABSENT) & set(ouzel.fla.__all__)
    with pytest.raises(AttributeError, match="no chunk_mesa_net: Ouzel has no such law.*naive.py"):
        ouzel.fla.chunk_mesa_net
    with pytest.raises(AttributeError, match="has no attribute 'chunk_nothing'"):
        ouzel.fla.chunk_nothing


# The published package, where it is installed: its sources are read, not imported.


def published_functions():
    spec = importlib.util.find_spec("fla")
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {}
    for name, module in _modules.items():
        tree = ast.parse((root / "ops" / (module.replace(".", "/") + ".py")).read_text())
        found |= {n.name: n.args for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in _modules}
    exported = ast.parse((root / "ops" / "__init__.py").read_text())
    names = {alias.name for n in exported.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    return found, names


def spelled(arguments):
    """Parameters without their annotations."""
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg]:
        if argument:
            argument.annotation = None
    return ast.unparse(arguments)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_signatures_are_the_published_ones():
    found, names = published_functions()
    assert set(_functions) == set(found) | set(_table.ALIASES)
    for name, arguments in found.items():
        ours = ast.parse(f"def f{inspect.signature(_functions[name])}: ...").body[0].args
        assert spelled(ours) == spelled(arguments), name
    assert names - set(_functions) == set(_table.ABSENT)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_signatures_of_modules_are_the_published_ones():
    root = Path(next(iter(importlib.util.find_spec("fla").submodule_search_locations))) / "modules"
    for name, (module, _) in _install._MODULES.items():
        tree = ast.parse((root / (module.replace(".", "/") + ".py")).read_text())
        ours = getattr(ouzel.fla.modules, name)
        theirs = next((n for n in tree.body if getattr(n, "name", "") == name), None)
        if theirs is None:  # the `apply` of a class
            assert any(isinstance(n, ast.Assign) and n.targets[0].id == name for n in tree.body)
            continue
        pairs = [(ours, theirs)]
        if isinstance(theirs, ast.ClassDef):
            methods = {n.name: n for n in theirs.body if isinstance(n, ast.FunctionDef)}
            pairs = [(getattr(ours, n), methods[n]) for n in ("__init__", "forward")]
        for function, published in pairs:
            mine = ast.parse(f"def f{inspect.signature(function)}: ...").body[0].args
            assert spelled(mine) == spelled(published.args), name


def test_activations():
    x, y, w, b = normal(3, K), normal(3, K), normal(V, K), normal(V)
    assert torch.equal(ouzel.fla.modules.swish(x), F.silu(x))
    assert torch.equal(ouzel.fla.modules.swiglu(x, y), F.silu(x) * y)
    assert torch.equal(ouzel.fla.modules.swiglu_linear(x, y, w, b), F.linear(F.silu(x) * y, w, b))


def test_short_convolution():
    torch.manual_seed(0)
    conv = ouzel.fla.modules.ShortConvolution(D, 3, bias=True, backend="cuda", use_fast_conv1d=True)
    assert conv.backend == "cuda" and conv.weight.shape == (D, 1, 3)
    x, residual = torch.randn(B, T, D), torch.randn(B, T, D)
    mask = torch.ones(B, T)
    mask[0, :2] = 0
    shifted = F.pad((x * mask[..., None]).transpose(1, 2), (2, 0))
    expected = F.silu(F.conv1d(shifted, conv.weight, conv.bias, groups=D)).transpose(1, 2) + residual
    y, none = conv(x, residual, mask, chunk_indices=torch.zeros(1, 2))
    close(y, expected, OUTPUT_BOUND)
    assert none is None
    first, cache = conv(x[:, :4], residual[:, :4], mask[:, :4], output_final_state=True)
    assert cache.shape == (B, D, 3)
    rest, _ = conv(x[:, 4:], residual[:, 4:], mask[:, 4:], cache=cache)
    close(torch.cat([first, rest], 1), expected, OUTPUT_BOUND)
    y, cache = ouzel.fla.modules.causal_conv1d(x * mask[..., None], conv.weight[:, 0], conv.bias, residual,
                                               activation="swish", output_final_state=True)
    close(y, expected, OUTPUT_BOUND)
    assert cache.shape == (B, D, 3)
    with pytest.raises(NotImplementedError, match="cp_context"):
        ouzel.fla.modules.causal_conv1d(x, conv.weight[:, 0], cp_context=object())


# Installation.


@pytest.fixture(autouse=True)
def clean():
    """`fla` as before, whatever a test does."""
    before = _install._loaded()
    yield
    ouzel.fla.uninstall()
    _install._restore(before)


@pytest.fixture
def nowhere(monkeypatch):
    """flash-linear-attention is not installed."""
    monkeypatch.setattr(_install, "_imported", lambda names: {})


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed flash-linear-attention: a function of ours, one of its own, a layer."""
    files = {
        "fla/__init__.py": "__version__ = '9.9'",
        "fla/ops/__init__.py": "from .gla import chunk_gla\nfrom .own import own",
        "fla/ops/gla/__init__.py": "from .chunk import chunk_gla, helper",
        "fla/ops/gla/chunk.py": "def chunk_gla(): return 'theirs'\ndef helper(): return chunk_gla",
        "fla/ops/own.py": "def own(): return 'own'",
        "fla/layers.py": "from fla.ops.gla import chunk_gla",
        "fla/models.py": "from fla.ops import chunk_gla",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _install._restore({})
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_install_stands_in_for_what_is_not_there(nowhere):
    finders, modules = list(sys.meta_path), set(sys.modules)
    with ouzel.fla.install() as installation:
        assert installation.active
        import fla.ops
        from fla.ops import chunk_gla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.generalized_delta_rule.dplr.chunk import chunk_dplr_delta_rule
        from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.fused_norm_gate import FusedRMSNormGated as older
        from fla.ops.kda.gate import fused_kda_gate

        assert older is FusedRMSNormGated is ouzel.fla.modules.FusedRMSNormGated
        for thing in (RMSNorm, ShortConvolution, causal_conv1d):
            assert thing is getattr(ouzel.fla.modules, thing.__name__)
        assert fla.__version__ == _table.PUBLISHED
        assert fla.ops.chunk_retention is ouzel.fla.chunk_retention
        for function in (chunk_gla, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule,
                         chunk_dplr_delta_rule, fused_kda_gate):
            assert function is getattr(ouzel.fla, function.__name__)
        with pytest.raises(ImportError):
            from fla.ops import chunk_mesa_net  # noqa: F401
        with pytest.raises(ImportError):
            import fla.layers  # noqa: F401
    assert not installation.active
    assert list(sys.meta_path) == finders
    assert not {n for n in set(sys.modules) - modules if n.split(".")[0] == "fla"}


def test_install_twice_and_undo_once(nowhere):
    first = ouzel.fla.install()
    with ouzel.fla.install() as second:
        assert not second.active
    assert first.active
    ouzel.fla.uninstall()
    assert not first.active
    ouzel.fla.uninstall()
    first.uninstall()


def test_install_overlays_a_package_without_a_gpu(package, monkeypatch):
    monkeypatch.setattr(_install, "_has_gpu", lambda: False)
    layers, theirs = importlib.import_module("fla.layers"), importlib.import_module("fla.ops").chunk_gla
    with ouzel.fla.install():
        import fla.ops
        from fla.models import chunk_gla
        from fla.ops.gla import helper

        assert fla.__version__ == "9.9"
        assert all(f is ouzel.fla.chunk_gla for f in (chunk_gla, helper(), layers.chunk_gla, fla.ops.chunk_gla))
        assert fla.ops.own() == "own"
    models = importlib.import_module("fla.models")
    assert all(f is theirs for f in (fla.ops.chunk_gla, helper(), layers.chunk_gla, models.chunk_gla))


def test_install_stands_in_for_a_package_that_cannot_be_imported(package, monkeypatch):
    (package / "fla" / "ops" / "gla" / "chunk.py").write_text("import triton_of_no_machine")
    for gpu in (False, True):
        monkeypatch.setattr(_install, "_has_gpu", lambda: gpu)
        with ouzel.fla.install() as installation:
            from fla.ops.gla import chunk_gla

            assert installation.active and chunk_gla is ouzel.fla.chunk_gla
        assert not _install._loaded()


def test_install_leaves_a_package_with_a_gpu_alone(package, monkeypatch):
    monkeypatch.setattr(_install, "_has_gpu", lambda: True)
    with pytest.warns(UserWarning, match="left alone.*force=True"):
        installation = ouzel.fla.install()
    assert not installation.active
    import fla.ops

    assert fla.ops.chunk_gla() == "theirs"
    with ouzel.fla.install(force=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fla.ops.chunk_gla is ouzel.fla.chunk_gla


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("name", ["GLA", "GatedDeltaNet", "KDA"])
def test_published_models_run_on_cpus(name):
    """Logits of all tokens at once are those of some, then one at a time; a loss has gradients."""
    pytest.importorskip("transformers")
    if _install._has_gpu():
        pytest.skip("there is a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ouzel.fla.install()
        models = importlib.import_module("fla.models")
        torch.manual_seed(0)
        size = {} if name == "GLA" else {"head_dim": 16}
        config = getattr(models, name + "Config")(hidden_size=32, num_hidden_layers=2, num_heads=2, vocab_size=50,
                                                  fuse_cross_entropy=False, **size)
        model = getattr(models, name + "ForCausalLM")(config)
        tokens = torch.randint(0, 50, (2, 70))
        whole = model(tokens, labels=tokens)
        whole.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            result = model(tokens[:, :66], use_cache=True)
            logits = [result.logits]
            for t in range(66, 70):
                result = model(tokens[:, t : t + 1], past_key_values=result.past_key_values, use_cache=True)
                logits.append(result.logits)
        close(torch.cat(logits, 1), whole.logits, 1e-5)
