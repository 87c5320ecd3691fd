"""The short convolution."""

from golden.case import Case
from golden.tape import Var, divide, dot, exponential, plus, times


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
