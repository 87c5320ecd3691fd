"""Laws with gates and erases.

Every law is S_t = (A_t S_{t-1} + write keys times values) Diag(e^gv), so that column j of what a
query q reads is a sum over the past: with u = q, then from the last token to the first, every
write adds (u . key) value and u becomes A_t^T u. No state is ever formed. A law is the list of
what a token does, last first: ("write", keys, value of column j), ("times", factors of u), or
("rank1", x, y), the factor I + x y^T of A_t, by which u becomes u + y (x . u).
"""

import math

from golden.case import Case
from golden.tape import (
    Var, dot, each, exponential, negative, one_minus_exponential, product, scaled, times,
)


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
