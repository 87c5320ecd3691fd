"""What the functions of fla.ops compute: a token at a time, in the type of their inputs.

What a formula returns is what is published.
"""

import torch
import torch.nn.functional as F

import ouzel.torch

B, T, H, K, V = 2, 9, 2, 4, 6  # of all calls


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
