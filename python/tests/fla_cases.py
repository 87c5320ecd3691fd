"""Calls of every function of ouzel.fla, with the formulas that they are held against."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

import ouzel.fla
from fla_formulas import (
    B, H, K, T, V, as_it_is, attention, chunk_rwkv7, comba, delta, erased, gdn, gdn2, hgrn,
    lightnet, lightning, log_linear, normalized, norms, oja, preconditioned, product, raw_beta,
    raw_gate, retention, rwkv4, rwkv6, rwkv7, rwkv7_mul, scan, simple, slots, sums_of_weights,
    taylor, ttt, weights_too,
)

M, D = 3, 5
CU = [0, 4, 4, 9]

torch.set_num_threads(1)  # tensors are tiny


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
    error = float((got - expected).square().mean().sqrt()) / scale
    assert error <= bound, f"{error:.3g} is above {bound:.3g}"
