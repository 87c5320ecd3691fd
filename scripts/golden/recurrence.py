"""Linear attention and retention, as quadratic sums."""

from golden.case import Case
from golden.tape import Var, divide, dot, exp, exponential, log, plus, power_of_two, times


def feature_map(kind, parameters, head, x):
    if kind == "identity":
        return x
    if kind == "elu1":
        return [plus(y, 1.0) if y.value > 0 else exponential(y) for y in x]
    if kind == "relu":
        return [times(y, 1.0 if y.value > 0 else 0.0) for y in x]

    def affine(w, b, f):
        index = (head, f) if len(w.shape) == 3 else (f,)  # one map a head, or one for all
        return dot(w.row(*index), x, [b[index]])

    w1, b1, w2, b2 = parameters
    return [dot([affine(w1, b1, f)], [affine(w2, b2, f)]) for f in range(w1.shape[-2])]


def recurrent(case, decay, features):
    """o_t = scale sum_s e^(g (t-s)) phi(q_t).phi(k_s) v_s; the denominator is the same with v = 1.
    The initial state is one more term; the final state is the sum over all tokens."""
    a = case.attributes
    q, k, v = (case.inputs[n] for n in "qkv")
    s0, z0 = (case.inputs.get(n) for n in ("initial_state", "initial_z"))
    o, final, z, shown = (case.outputs.get(n) for n in ("o", "final_state", "z", "weights"))
    parameters = [case.inputs.get(n) for n in ("W1", "b1", "W2", "b2")]
    kind, causal = a.get("feature_map", "identity"), a.get("causal", True)
    normalize = a.get("normalize", False)
    heads, key_heads, value_heads = q.shape[2], k.shape[2], v.shape[2]
    for n, (b, begin, length) in enumerate(case.sequences(q.shape[0], q.shape[1])):
        tokens = list(range(begin, begin + length))
        if a.get("reverse"):
            tokens.reverse()
        ones = [Var(1.0)] * length
        for h in range(value_heads):
            g, hk = decay[h], h * key_heads // value_heads
            phi = [feature_map(kind, parameters, hk, k.row(b, t, hk)) for t in tokens]
            column = [[v[b, t, h, j] for t in tokens] for j in range(v.shape[3])]
            for ho in (x for x in range(o.shape[2]) if x * value_heads // o.shape[2] == h):
                hq = ho * heads // o.shape[2]
                for i, t in enumerate(tokens):
                    u = feature_map(kind, parameters, hq, q.row(b, t, hq))
                    u = [times(x, a["scale"]) for x in u]
                    seen = range(i + 1 if causal else length)
                    w = [times(dot(u, phi[s]), exp(g * (i - s)) if causal else 1.0) for s in seen]
                    old = [times(x, exp(g * (i + 1))) for x in u]
                    if normalize:
                        initial = [dot(old, z0.row(n, h))] if z0 else []
                        denominator = plus(dot(w, ones, initial), a["eps"])
                    for j in range(v.shape[3]):
                        rows = [s0[n, h, f, j] for f in range(features)] if s0 else []
                        y = dot(w, column[j], [dot(old, rows)] if s0 else [])
                        o[b, t, ho, j] = divide(y, denominator) if normalize else y
                    for s in seen if shown else ():
                        shown[b, ho, t, tokens[s]] = w[s]
            rest = [exp(g * (length - 1 - s)) for s in range(length)]
            for f in range(features):
                row = [times(phi[s][f], rest[s]) for s in range(length)]
                if z:
                    initial = [times(z0[n, h, f], exp(g * length))] if z0 else []
                    z[n, h, f] = dot(row, ones, initial)
                for j in range(v.shape[3] if final else 0):
                    initial = [times(s0[n, h, f, j], exp(g * length))] if s0 else []
                    final[n, h, f, j] = dot(row, column[j], initial)


DEFAULT_EPS = {"identity": 1e-10, "elu1": 1e-6, "relu": 1e-6, "elementwise_product": 0.0}


def recurrent_case(op, name, B=1, T=5, HQ=2, HK=2, HV=2, K=4, V=3, state=False, kind="identity",
                   features=None, per_head=False, draw=None, outputs=None, scale=None,
                   **attributes):
    """`state`: initial states, and upstream gradients of the final ones. `draw`: how q and k are
    drawn. `outputs`: which ones beside o, if not all."""
    usual = K**-0.5 if kind == "identity" else 1.0
    scale = usual if scale is None else scale
    case = Case(op, name, {"scale": scale, "scale_is_default": scale == usual, **attributes})
    a, random = case.attributes, case.random
    normalize, causal = a.get("normalize", False), a.get("causal", True)
    if op == "linear_attn":
        a.update(feature_map=kind, normalize=normalize, causal=causal)
    if normalize:
        a["eps"] = DEFAULT_EPS[kind]
    decay = [0.0] * HV
    if op == "retention":
        a["H"] = HV
        decay = [log(1 - 2.0**(-5 - h)) for h in range(HV)]
    if op == "lightning":
        depth, layers = a["layer_idx"], a["num_layers"]
        if a.get("slopes") == "geometric":
            decay = [-power_of_two(-8 * (h + 1) / HV) * (1 - depth / (layers - 1) + 1e-5)
                     for h in range(HV)]
        else:
            decay = [-8 / HV * (1 - depth / layers) * h for h in range(HV)]
    case.input("q", [B, T, HQ, K], draw and draw(random, "q"))
    case.input("k", [B, T, HK, K], draw and draw(random, "k"))
    case.input("v", [B, T, HV, V])
    F = features or K
    if kind == "elementwise_product":
        heads = [HQ] if per_head else []
        for i in "12":  # features near 1, so that no denominator comes near 0
            case.input("W" + i, heads + [F, K], lambda: 0.3 * random.normal())
            case.input("b" + i, heads + [F], lambda: 1 + 0.3 * random.normal())
    N = len(a["cu_seqlens"]) - 1 if "cu_seqlens" in a else B
    if state:
        case.input("initial_state", [N, HV, F, V])
        if normalize:
            case.input("initial_z", [N, HV, F], lambda: 0.5 + random.uniform())
    case.output("o", [B, T, max(HQ, HV), V], "do")
    if outputs is None:
        outputs = ["final_state"] * causal + ["z"] * (causal and normalize)
    if "final_state" in outputs:
        case.output("final_state", [N, HV, F, V], "dht" if state else None)
    if "z" in outputs:
        case.output("z", [N, HV, F], "dzt" if state else None)
    if "weights" in outputs:
        case.output("weights", [B, HV, T, T])
    recurrent(case, decay, F)
    factor = {"retention": "gamma_h ", "lightning": "e^(g_h) "}.get(op, "")
    return case, "S'=%sS+f(k)v^T, o=S'^T(scale f(q))%s" % (
        factor, "/(z'.(scale f(q))+eps)" * normalize)
