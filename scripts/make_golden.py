#!/usr/bin/env python3
"""Writes the golden files of the operators: small calls with outputs and gradients in float64.

usage: make_golden.py FOLDER

The numbers come from the formulas as quadratic sums (never a recurrence), differentiated by the tape
in golden/tape.py; nothing is shared with the library. The same bytes come out on every machine: sums
are exactly rounded (math.fsum), exp and log come from the decimal module, and random numbers are our
own.

OP-CASE.safetensors holds inputs and upstream gradients (do, dht, dzt) in F32, outputs and gradients
(d + input; dh0, dz0 of the initial states) in F64, and the call's attributes as metadata.
index.json lists the files with their sizes and SHA-256.
"""
import json
import os
import sys

from golden.attention import attention_case
from golden.laws import LAWS, law_case
from golden.recurrence import recurrent_case
from golden.short_conv import short_conv_case

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
