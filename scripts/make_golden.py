#!/usr/bin/env python3
"""Writes the golden files of the operators: small calls with outputs and gradients in float64.

usage: make_golden.py FOLDER

The numbers come from the formulas as quadratic sums (never a recurrence), differentiated by the tape
below; nothing is shared with the library. The same bytes come out on every machine: sums are exactly
rounded (math.fsum), exp and log come from the decimal module, and random numbers are our own.

OP-CASE.safetensors holds inputs and upstream gradients (do, dht, dzt) in F32, outputs and gradients
(d + input; dh0, dz0 of the initial states) in F64, and the call's attributes as metadata.
index.json lists the files with their sizes and SHA-256.
"""
import decimal
import hashlib
import json
import math
import os
import struct
import sys

DECIMAL = decimal.Context(prec=40)


def exp(x):
    return float(DECIMAL.exp(decimal.Decimal(x)))


def log(x):
    return float(DECIMAL.ln(decimal.Decimal(x)))


def power_of_two(x):
    return float(DECIMAL.power(2, decimal.Decimal(x)))


class Random:
    """SplitMix64."""

    def __init__(self, text):
        self.state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def uniform(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def normal(self):
        return math.fsum(self.uniform() for _ in range(12)) - 6


def to_f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


class Var:
    """A number on the tape: its value and its derivatives by the numbers that it was made of."""

    tape = []

    def __init__(self, value, parents=()):
        self.value, self.parents, self.gradient = value, parents, 0.0
        Var.tape.append(self)


def dot(a, b, c=()):
    """sum a_i b_i + sum c_i."""
    value = math.fsum([x.value * y.value for x, y in zip(a, b)] + [x.value for x in c])
    parents = [(x, y.value) for x, y in zip(a, b)] + [(y, x.value) for x, y in zip(a, b)]
    return Var(value, parents + [(x, 1.0) for x in c])


def times(x, factor):
    return Var(x.value * factor, [(x, factor)])


def divide(x, y):
    return Var(x.value / y.value, [(x, 1 / y.value), (y, -x.value / (y.value * y.value))])


def plus(x, constant):
    return Var(x.value + constant, [(x, 1.0)])


def exponential(x):
    e = exp(x.value)
    return Var(e, [(x, e)])


def one_minus_exponential(x):
    if x.value == -math.inf:
        return Var(1.0, [(x, 0.0)])
    value = float(DECIMAL.subtract(1, DECIMAL.exp(decimal.Decimal(x.value))))
    return Var(value, [(x, -exp(x.value))])


def product(*factors):
    value = Var(1.0)
    for x in factors:
        value = dot([value], [x])
    return value


def differentiate(outputs):
    """Gradients of the sum of output * upstream over the pairs, for everything on the tape."""
    for y, upstream in outputs:
        y.gradient += upstream
    for y in reversed(Var.tape):
        for x, slope in y.parents:
            x.gradient += y.gradient * slope


class Tensor:
    def __init__(self, shape, fill):
        self.shape = list(shape)
        self.data = [fill() for _ in range(math.prod(shape))]

    def offset(self, index):
        at = 0
        for i, extent in zip(index, self.shape):
            at = at * extent + i
        return at * math.prod(self.shape[len(index):])

    def __getitem__(self, index):
        return self.data[self.offset(index)]

    def __setitem__(self, index, value):
        self.data[self.offset(index)] = value

    def row(self, *index):
        at = self.offset(index)
        return self.data[at:at + math.prod(self.shape[len(index):])]


class Case:
    """One call: inputs drawn at random, outputs that the operator's formula sets, attributes."""

    def __init__(self, op, name, attributes):
        self.op, self.name, self.attributes = op, name, attributes
        self.random = Random(op + " " + name)
        self.inputs, self.outputs, self.upstream = {}, {}, {}

    def input(self, name, shape, draw=None):
        draw = draw or self.random.normal
        self.inputs[name] = Tensor(shape, lambda: Var(to_f32(draw())))
        return self.inputs[name]

    def output(self, name, shape, upstream=None):
        """Zeros until the formula says otherwise; `upstream` names its upstream gradient."""
        self.outputs[name] = Tensor(shape, lambda: Var(0.0))
        if upstream:
            self.upstream[upstream] = (name, Tensor(shape, lambda: to_f32(self.random.normal())))
        return self.outputs[name]

    def sequences(self, batch, tokens):
        """(batch row, begin, length) of every sequence."""
        if "cu_seqlens" not in self.attributes:
            return [(b, 0, tokens) for b in range(batch)]
        ends = self.attributes["cu_seqlens"]
        return [(0, a, b - a) for a, b in zip(ends, ends[1:])]

    def write(self, folder, formula):
        pairs = []
        for name, up in self.upstream.values():
            pairs += zip(self.outputs[name].data, up.data)
        differentiate(pairs)
        names = {"initial_state": "dh0", "initial_z": "dz0"}
        gradients = {names.get(n, "d" + n): t for n, t in self.inputs.items()}
        values = lambda t: [x.value for x in t.data]
        tensors = [(n, "F64", t.shape, values(t)) for n, t in self.outputs.items()]
        tensors += [(n, "F64", t.shape, [x.gradient for x in t.data]) for n, t in gradients.items()]
        tensors += [(n, "F32", t.shape, values(t)) for n, t in self.inputs.items()]
        tensors += [(n, "F32", t.shape, t.data) for n, (_, t) in self.upstream.items()]
        loss = " + ".join("sum(%s*%s)" % (n, up) for up, (n, _) in self.upstream.items())
        metadata = {"op": self.op, "case": self.name, "formula": formula, "loss": loss,
                    "source": "scripts/make_golden.py", "inputs": list(self.inputs),
                    "outputs": list(self.outputs), "upstream": list(self.upstream),
                    "grads": list(gradients), **self.attributes}
        text_of = lambda value: value if isinstance(value, str) else json.dumps(value)
        header, blob = {"__metadata__": {k: text_of(v) for k, v in metadata.items()}}, b""
        for name, dtype, shape, data in tensors:
            raw = struct.pack("<%d%s" % (len(data), "d" if dtype == "F64" else "f"), *data)
            offsets = [len(blob), len(blob) + len(raw)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            blob += raw
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        content = struct.pack("<Q", len(text)) + text + blob
        file = "%s-%s.safetensors" % (self.op, self.name)
        with open(os.path.join(folder, file), "wb") as f:
            f.write(content)
        Var.tape.clear()
        digest = hashlib.sha256(content).hexdigest()
        return {"file": file, "op": self.op, "case": self.name, "bytes": len(content),
                "sha256": digest}


# --- linear attention and retention ---------------------------------------------------------------


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


# --- laws with gates and erases -------------------------------------------------------------------
#
# Every law is S_t = (A_t S_{t-1} + write keys times values) Diag(e^gv), so that column j of what a
# query q reads is a sum over the past: with u = q, then from the last token to the first, every
# write adds (u . key) value and u becomes A_t^T u. No state is ever formed. A law is the list of
# what a token does, last first: ("write", keys, value of column j), ("times", factors of u), or
# ("rank1", x, y), the factor I + x y^T of A_t, by which u becomes u + y (x . u).


def negative(xs):
    return [times(x, -1.0) for x in xs]


def scaled(xs, factor):
    return [product(x, factor) for x in xs]


def each(xs, ys):
    return [product(x, y) for x, y in zip(xs, ys)]


def gates(xs):
    return [exponential(x) for x in xs]


def entry(xs, j):
    return xs[j if len(xs) > 1 else 0]


def delta(x, j, k, v, beta):
    return [("write", k, product(v[j], entry(beta, j))),
            ("rank1", negative(scaled(k, entry(beta, j))), k)]


def delta_rule(x, j):
    return delta(x, j, x["k"], x["v"], x["beta"]) + ([("times", gates(x["g"]))] if "g" in x else [])


def gated_delta_product(x, j):
    K, V = len(x["q"]), len(x["v"]) * len(x["q"]) // len(x["k"])
    steps = []
    for i in reversed(range(len(x["k"]) // K)):
        steps += delta(x, j, x["k"][i * K:][:K], x["v"][i * V:][:V], [x["beta"][i]])
    return steps + ([("times", gates(x["g"]))] if "g" in x else [])


def gla(x, j):
    column = [exponential(x["gv"][j])] * len(x["g"]) if "gv" in x else None
    return ([("write", x["k"], x["v"][j]), ("times", gates(x["g"]))]
            + ([("times", column)] if column else []))


def hgrn2(x, j):
    return gla({**x, "k": [one_minus_exponential(g) for g in x["g"]]}, j)


def mamba2_ssd(x, j):
    return gla({"k": x["B"], "v": scaled(x["x"], x["dt"][0]), "g": scaled(x["A"], x["dt"][0])}, j)


def rwkv(x, j):
    return gla({**x, "g": x["w"]}, j)


def gdn2(x, j):
    return [("write", x["k"], product(x["w"][j], x["v"][j])),
            ("rank1", negative(x["k"]), each(x["b"], x["k"])), ("times", gates(x["g"]))]


def undecayed(decay, left, right, K):
    """u becomes decay u + right (left . u): the erase reads the state before it decays."""
    return ("sum", decay * (K // len(decay)) if decay else None, left, right)


def comba(x, j):
    beta = x["beta"][0]
    return [("write", x["k"], product(x["v"][j], beta)),
            undecayed(gates(x["g"]), negative(scaled(x["k"], beta)), x["p"], len(x["k"]))]


def low_rank(x, j):
    gate = x.get("g", x.get("w"))
    return [("write", x["k"], x["v"][j]),
            undecayed(gates(gate) if gate else None, x["b"], x["a"], len(x["k"]))]


# name: (inputs, what a token does, formula with R = Diag(e^g) S). Letters: B batch, T tokens,
# P num_householder rows a token, Q, H, U heads of queries, keys and values, K, V sizes.
QKV = "q:BTQK k:BTHK v:BTUV "
RKV = "r:BTQK k:BTHK v:BTUV "
READ = "; o=S'^T(scale q)"
BONUS = "o=(S+Diag(u)k v^T)^T(scale r); S'=Diag(e^w)S+k v^T"
LAWS = {
    "simple_gla": (QKV + "g:BTU", gla, "S'=R+k v^T" + READ),
    "mamba2_ssd": ("C:BTQK B:BTHK x:BTUV dt:BTU A:U D:U", mamba2_ssd,
                   "S'=e^(dt A)S+B(dt x)^T; o=S'^T(scale C)+D x"),
    "gla": (QKV + "g:BTUK", gla, "S'=R Diag(e^gv)+k v^T" + READ),
    "hgrn2": ("q:BTQK v:BTUV g:BTUK", hgrn2, "S'=R+(1-e^g)v^T" + READ),
    "rwkv5": (RKV + "w:UK u:UK", rwkv, BONUS),
    "rwkv6": (RKV + "w:BTUK u:UK", rwkv, BONUS),
    "delta_rule": (QKV + "beta:BTU", delta_rule, "S'=S+k(beta*(v-S^T k))^T" + READ),
    "gated_delta_rule": (QKV + "g:BTU beta:BTU", delta_rule, "S'=R+k(beta(v-R^T k))^T" + READ),
    "gated_delta_product": ("q:BTQK k:BPHK v:BPUV beta:BPU g:BTU", gated_delta_product,
                            "S'=R, then S'+=k(beta(v-S'^T k))^T for each row" + READ),
    "kda": (QKV + "g:BTUK beta:BTU", delta_rule, "S'=R+k(beta(v-R^T k))^T" + READ),
    "gdn2": (QKV + "g:BTUK b:BTUK w:BTUV", gdn2, "S'=R+k(w*v-R^T(b*k))^T" + READ),
    "comba": (QKV + "p:BTHK g:BTU beta:BTU", comba, "S'=R+k(beta(v-S^T p))^T" + READ),
    "iplr": (QKV + "a:BTHK b:BTHK", low_rank, "S'=S+b(S^T a)^T+k v^T" + READ),
    "dplr": (QKV + "a:BTHK b:BTHK g:BTUK", low_rank, "S'=R+b(S^T a)^T+k v^T" + READ),
    "rwkv7": ("r:BTQK w:BTUK k:BTHK v:BTUV a:BTHK b:BTHK", low_rank,
              "S'=Diag(e^w)S+b(S^T a)^T+k v^T; o=S'^T(scale r)"),
}
HARSH = [0.0, -1e-5, -0.25, -1.0, -3.0, -20.0, -1000.0, -math.inf]


def draw_of(case, name, harsh):
    random = case.random
    if name in ("g", "gv", "A") or name == "w" and case.op.startswith("rwkv"):
        if harsh and name != "A":
            return lambda: HARSH[int(random.uniform() * len(HARSH))]
        return lambda: -0.01 - 1.5 * random.uniform()
    if name in ("beta", "dt") or case.op == "gdn2" and name in "bw":
        return random.uniform
    return lambda: 0.5 * random.normal()


def law_case(op, name, B=1, T=5, HQ=2, HK=2, HV=2, K=4, V=3, state=False, harsh=False, more="",
             without="", scale=None, **attributes):
    """`more`, `without`: optional inputs beside those of LAWS, and those that are left out."""
    inputs, steps_of, formula = LAWS[op]
    usual = 1.0 if op in ("mamba2_ssd", "rwkv7") else K**-0.5
    scale = usual if scale is None else scale
    case = Case(op, name, {"scale": scale, "scale_is_default": scale == usual, **attributes})
    a = case.attributes
    rows = a.get("num_householder", 1)
    sizes = {"B": B, "T": T, "P": rows * T, "Q": HQ, "H": HK, "U": HV, "K": K, "V": V}
    given = dict(x.split(":") for x in (inputs + " " + more).split())
    for x, letters in given.items():
        if x not in without.split():
            case.input(x, [sizes[letter] for letter in letters], draw_of(case, x, harsh))
    N = len(a["cu_seqlens"]) - 1 if "cu_seqlens" in a else B
    s0 = case.input("initial_state", [N, HV, K, V]) if state else None
    HO = max(HQ, HV)
    o = case.output("o", [B, T, HO, V], "do")
    final = case.output("final_state", [N, HV, K, V], "dht" if state else None)

    def token_of(b, t, ho):
        token = {}
        for x, tensor in case.inputs.items():
            if x == "initial_state":
                continue
            if given[x][0] != "B":
                token[x] = tensor.row(ho * tensor.shape[0] // HO)
                continue
            head = ho * tensor.shape[2] // HO
            n = tensor.shape[1] // T
            token[x] = []
            for i in range(t * n, t * n + n):
                row = tensor.row(b, i, head)
                if a.get("use_qk_l2norm") and x in ("q", "k", "p"):
                    square = dot(row, row)
                    norm = math.sqrt(square.value + 1e-6)
                    row = scaled(row, Var(1 / norm, [(square, -0.5 / norm**3)]))
                token[x] += row
        return token

    def read(u, steps, initial):
        """Column j of S^T u, `steps` of all tokens being those of this column, last first."""
        terms = []
        for kind, *parts in steps:
            if kind == "write":
                terms.append(product(dot(u, parts[0]), parts[1]))
            elif kind == "times":
                u = [product(x, entry(parts[0], i)) for i, x in enumerate(u)]
            elif kind == "rank1":
                along = dot(u, parts[0])
                u = [dot([along], [y], [x]) for x, y in zip(u, parts[1])]
            else:
                decay, left, right = parts
                along = dot(u, left)
                u = [dot([along], [y], [product(x, decay[i]) if decay else x])
                     for i, (x, y) in enumerate(zip(u, right))]
        return dot(terms, [Var(1.0)] * len(terms), [dot(u, initial)] if initial else [])

    for n, (b, begin, length) in enumerate(case.sequences(B, T)):
        order = list(range(begin, begin + length))
        if a.get("reverse"):
            order.reverse()
        for ho in range(HO):
            h = ho * HV // HO
            seen = [token_of(b, t, ho) for t in order]
            for j in range(V):
                initial = [s0[n, h, i, j] for i in range(K)] if s0 else None
                steps = []
                for t, x in zip(order, seen):
                    query = [times(y, scale) for y in x.get("q", x.get("r", x.get("C")))]
                    before = steps
                    steps = steps_of(x, j) + steps
                    if op in ("rwkv5", "rwkv6"):  # reads before it writes, with a bonus
                        bonus = product(dot(query, each(x["u"], x["k"])), x["v"][j])
                        o[b, t, ho, j] = dot([Var(1.0)], [read(query, before, initial)], [bonus])
                    else:
                        skip = [product(entry(x["D"], j), x["x"][j])] if "D" in x else []
                        o[b, t, ho, j] = dot([Var(1.0)], [read(query, steps, initial)], skip)
                for i in range(K if ho * HV % HO == 0 else 0):  # the first that reads state h
                    unit = [Var(float(c == i)) for c in range(K)]
                    final[n, h, i, j] = read(unit, steps, initial)
    return case, formula


# --- softmax attention ----------------------------------------------------------------------------


def attention_case(name, B=1, T=7, TQ=None, HQ=2, H=2, K=4, V=3, causal=True, window=None,
                   offset=0, scale=None, spread=1.0, **attributes):
    TQ = T if TQ is None else TQ
    case = Case("attention", name, {"scale": scale or K**-0.5, "scale_is_default": scale is None,
                                    "causal": causal, "window_size": window, "q_offset": offset,
                                    **attributes})
    scale = case.attributes["scale"]
    draw = lambda: spread * case.random.normal()
    q = case.input("q", [B, TQ, HQ, K], draw)
    k = case.input("k", [B, T, H, K], draw)
    v = case.input("v", [B, T, H, V])
    o = case.output("o", [B, TQ, HQ, V], "do")
    pairs = zip(case.sequences(B, TQ), case.sequences(B, T))
    for (b, q_begin, q_length), (_, begin, length) in pairs:
        for h in range(HQ):
            hk = h * H // HQ
            for i in range(q_length):
                p = i + offset
                seen = [j for j in range(length)
                        if (not causal or j <= p) and (window is None or p - j < window)]
                row = q.row(b, q_begin + i, h)
                score = [times(dot(row, k.row(b, begin + j, hk)), scale) for j in seen]
                top = max(s.value for s in score)  # cancels, so it needs no gradient
                w = [exponential(plus(s, -top)) for s in score]
                total = dot(w, [Var(1.0)] * len(w))
                for c in range(V):
                    y = dot(w, [v[b, begin + j, hk, c] for j in seen])
                    o[b, q_begin + i, h, c] = divide(y, total)
    return case, "softmax(scale q.k) v"


# --- short convolution ----------------------------------------------------------------------------


def short_conv_case(name, B=1, T=7, D=5, W=4, bias=False, state=False, silu=False, **attributes):
    case = Case("short_conv", name, {"activation": "silu" if silu else "none", **attributes})
    x = case.input("x", [B, T, D])
    weight = case.input("weight", [D, W])
    shift = case.input("bias", [D]) if bias else None
    N = len(attributes["cu_seqlens"]) - 1 if "cu_seqlens" in attributes else B
    s0 = case.input("initial_state", [N, D, W]) if state else None
    o = case.output("o", [B, T, D], "do")
    final = case.output("final_state", [N, D, W], "dht" if state else None)
    for n, (b, begin, length) in enumerate(case.sequences(B, T)):
        for d in range(D):
            def token(t):  # t counts from the start of the sequence; before it stands the state
                if t >= 0:
                    return x[b, begin + t, d]
                return s0[n, d, W + t] if s0 else Var(0.0)
            for t in range(length):
                inputs = [token(t - W + 1 + j) for j in range(W)]
                u = dot(weight.row(d), inputs, [shift[d,]] if shift else [])
                sigmoid = divide(Var(1.0), plus(exponential(times(u, -1.0)), 1.0))
                o[b, begin + t, d] = dot([u], [sigmoid]) if silu else u
            for j in range(W):
                final[n, d, j] = plus(token(length - W + j), 0.0)
    return case, "y_t=act(bias+sum_j weight[:,j] x_(t-W+1+j))"


# --- the cases ------------------------------------------------------------------------------------

PACKED = [0, 0, 4, 5, 9]  # an empty sequence and one of a single token


def positive(random, _):
    return lambda: 0.1 + random.uniform()


def very_negative(random, _):
    return lambda: 4 * random.normal() - 8


def dead_rows(random, name):
    """Rows of four: queries and the first keys without a positive feature."""
    count = [0]

    def draw():
        row, count[0] = count[0] // 4, count[0] + 1
        x = random.normal()
        return -abs(x) if (row < 4 if name == "k" else row % 3 == 0) else x
    return draw


def cases():
    def linear(name, **options):
        return recurrent_case("linear_attn", name, **options)

    def elu(name, **options):
        return linear("elu_" + name, kind="elu1", normalize=True, **options)

    def relu(name, **options):
        return linear("relu_" + name, kind="relu", normalize=True, **options)

    def product(name, normalize=True, **options):
        kind = "elementwise_product"
        return linear(kind + "_" + name, kind=kind, normalize=normalize, **options)

    def retention(name, **options):
        return recurrent_case("retention", name, **options)

    def lightning(name, **options):
        return recurrent_case("lightning", name, **options)

    packed = {"T": PACKED[-1], "cu_seqlens": PACKED}
    yield linear("basic", B=2)
    yield linear("long", T=131, HQ=1, HK=1, HV=1, K=2, V=2, state=True, scale=0.3125)
    yield linear("t1", B=2, T=1, state=True)
    yield linear("odd", T=3, HQ=1, HK=1, HV=1, K=60, V=24, outputs=[])
    yield linear("varlen", state=True, **packed)
    yield linear("gqa", HQ=4, state=True)
    yield linear("gva", HV=4, state=True)
    yield linear("one_key_head", HQ=6, HK=1, HV=3, T=5, K=3, V=2)
    yield linear("reverse", state=True, reverse=True)
    yield linear("reverse_varlen", HQ=1, HK=1, HV=1, state=True, reverse=True, **packed)
    yield linear("noncausal", T=7, causal=False)
    yield linear("norm_identity", T=9, HQ=1, HK=1, HV=1, state=True, normalize=True, draw=positive)
    yield elu("basic", B=2)
    yield elu("long", T=131, HQ=1, HK=1, HV=1, K=2, V=1, state=True)
    yield elu("odd", T=3, HQ=1, HK=1, HV=1, K=60, V=24, outputs=["z"])
    yield elu("negative", T=7, draw=very_negative)
    yield elu("varlen", state=True, **packed)
    yield elu("reverse", state=True, reverse=True)
    yield elu("noncausal_varlen", HQ=1, HK=1, HV=1, causal=False, **packed)
    yield elu("gva", HV=4, state=True)
    yield relu("basic", state=True)
    yield relu("dead", T=8, draw=dead_rows)
    yield relu("gqa", HQ=4, state=True)
    yield product("basic", state=True)
    yield product("heads", features=6, per_head=True)
    yield product("no_norm", normalize=False, state=True)
    yield product("noncausal", HQ=1, HK=1, HV=1, causal=False)
    yield product("varlen", HQ=1, HK=1, HV=1, state=True, **packed)
    yield retention("basic", B=2)
    yield retention("long", T=131, HQ=1, HK=1, HV=1, K=2, V=1, state=True)
    yield retention("t1", B=2, T=1, state=True)
    yield retention("odd", T=3, HQ=1, HK=1, HV=1, K=60, V=24, outputs=[])
    yield retention("varlen", state=True, **packed)
    yield retention("reverse", state=True, reverse=True)
    yield retention("heads", HQ=4, HK=4, HV=4, K=3, V=2, state=True)
    yield retention("gva", HV=4, state=True)
    yield retention("parallel", B=2, outputs=["weights"], form="parallel")
    for op in LAWS:
        rows = {"num_householder": 2} if op == "gated_delta_product" else {}
        yield law_case(op, "basic", B=2, T=4, V=2, **rows)
        yield law_case(op, "harsh_varlen", HQ=1, HK=1, state=True, harsh=True, **rows, **packed)
    yield law_case("gla", "value_gate_reverse", state=True, more="gv:BTUV", reverse=True)
    yield law_case("delta_rule", "beta_per_value", T=4, more="beta:BTUV")
    yield law_case("gated_delta_rule", "l2norm", T=4, state=True, use_qk_l2norm=True)
    yield law_case("gated_delta_product", "nogate", T=3, state=True, without="g",
                   num_householder=3)
    yield law_case("kda", "gqa", T=4, HQ=4, state=True)
    yield law_case("comba", "l2norm", T=4, HQ=4, HK=1, use_qk_l2norm=True)
    yield law_case("mamba2_ssd", "no_skip", T=4, state=True, without="D", scale=0.5)
    yield law_case("rwkv6", "long", T=70, HQ=1, HK=1, HV=1, K=2, V=1, state=True)
    yield lightning("basic", B=2, HQ=4, HK=4, HV=4, layer_idx=1, num_layers=12)
    yield lightning("geometric_varlen", state=True, slopes="geometric", layer_idx=3, num_layers=4,
                    **packed)
    yield attention_case("causal", B=2)
    yield attention_case("full", T=9, causal=False)
    yield attention_case("long", T=131, HQ=1, H=1, K=2, V=1)
    yield attention_case("t1", B=2, T=1)
    yield attention_case("odd", T=4, HQ=1, H=1, K=60, V=24)
    yield attention_case("window", T=9, window=4)
    yield attention_case("window1", T=5, window=1)
    yield attention_case("offset", T=9, TQ=5, offset=4)
    yield attention_case("offset_window", T=9, TQ=5, offset=4, window=3)
    yield attention_case("gqa", T=5, HQ=4)
    yield attention_case("mqa_full", T=5, HQ=4, H=1, causal=False)
    yield attention_case("varlen", **packed)
    yield attention_case("varlen_window", HQ=1, H=1, window=2, **packed)
    yield attention_case("large", T=9, spread=3.0, scale=2.5)
    yield short_conv_case("basic", B=2)
    yield short_conv_case("bias_silu_state", T=9, bias=True, state=True, silu=True)
    yield short_conv_case("width3", silu=True, W=3, state=True)
    yield short_conv_case("long", T=131, D=2, bias=True, state=True, silu=True)
    yield short_conv_case("t1_state", B=2, T=1, bias=True, state=True, silu=True)
    yield short_conv_case("t2_state", T=2, state=True)
    yield short_conv_case("t2", T=2, silu=True)
    yield short_conv_case("varlen", silu=True, **packed)
    yield short_conv_case("varlen_state", bias=True, state=True, silu=True, **packed)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    files = []
    for case, formula in cases():
        files.append(case.write(folder, formula))
    with open(os.path.join(folder, "index.json"), "w", newline="\n") as f:
        f.write('{"set": "project", "files": [\n')
        f.write(",\n".join(json.dumps(x) for x in files) + "\n]}\n")


if __name__ == "__main__":
    main()
