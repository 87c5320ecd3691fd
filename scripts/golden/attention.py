"""Softmax attention."""

from golden.case import Case
from golden.tape import Var, divide, dot, exponential, plus, times


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
