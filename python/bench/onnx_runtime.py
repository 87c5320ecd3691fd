"""Ouzel's LinearAttention and CausalConvWithState beside those of ONNX Runtime on the CPU: the same
arrays, in one process, in turns; the best time of each counts.

usage: onnx_runtime.py [--threads N] [--seconds S]     (needs onnx and onnxruntime)

ONNX Runtime's kernels are the nodes of its own domain, com.microsoft, whose defaults are the standard's.
"""

import argparse
import sys
import time

import numpy as np

import ouzel

try:
    import onnxruntime
    from onnx import TensorProto
    from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
except ImportError as missing:
    sys.exit(f"{missing}: there is nothing to compare with; run `pip install onnx onnxruntime`")

INPUTS = {
    "LinearAttention": ["query", "key", "value", "past_state", "decay", "beta"],
    "CausalConvWithState": ["input", "weight", "bias", "past_state"],
}
ATTENTION = [  # name, rule, T, query heads, heads, keys, values, whether decays are per key
    ("gated delta, 16 heads of 128", "gated_delta", 1024, 16, 16, 128, 128, False),
    ("gated delta, 16 heads of 128", "gated_delta", 4096, 16, 16, 128, 128, False),
    ("gated delta, a token", "gated_delta", 1, 16, 16, 128, 128, False),
    ("delta, 16 heads of 128", "delta", 1024, 16, 16, 128, 128, False),
    ("gated per key, 4 heads of 128, 256", "gated", 1024, 4, 4, 128, 256, True),
    ("gated, 16 heads of 64", "gated", 1024, 16, 16, 64, 64, False),
    ("linear, 16 heads of 64", "linear", 1024, 16, 16, 64, 64, False),
    ("linear, 16 query heads on 4 of 64", "linear", 1024, 16, 4, 64, 64, False),
]
CONVOLUTION = [  # name, T, channels
    ("convolution of 4, SiLU, 6,144 channels", 1024, 6144),
    ("convolution of 4, SiLU, a token", 1, 6144),
]


def session_of(op, inputs, attributes, threads):
    """ONNX Runtime with a model of one node; None where it has no such kernel."""
    infos = [make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in inputs.items()]
    outputs = [make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("output", "present_state")]
    names = [name if name in inputs else "" for name in INPUTS[op]]
    node = make_node(op, names, ["output", "present_state"], domain="com.microsoft", **attributes)
    model = make_model(make_graph([node], op, infos, outputs), ir_version=10,
                       opset_imports=[make_opsetid("", 21), make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options,
                                            providers=["CPUExecutionProvider"])
    except Exception as refusal:
        print(f"onnxruntime {onnxruntime.__version__} has no kernel for {op}: {refusal}", file=sys.stderr)
        return None


def attention_inputs(rng, rule, T, query_heads, heads, keys, values, per_key):
    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    k = normal(1, T, heads, keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    inputs = {
        "query": normal(1, T, query_heads * keys),
        "key": k.reshape(1, T, heads * keys),
        "value": normal(1, T, heads * values),
        "past_state": 0.1 * normal(1, heads, keys, values),
    }
    if "gated" in rule:
        inputs["decay"] = -0.1 * np.abs(normal(1, T, heads * keys if per_key else heads))
    if "delta" in rule:
        inputs["beta"] = 1 / (1 + np.exp(-normal(1, T, heads)))
    return inputs


def best_times(seconds, *calls):
    """In turns, until each has had its share of the time."""
    for call in calls:
        call()
    best, begin = [float("inf")] * len(calls), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def compare(name, op, inputs, attributes, arguments):
    context = ouzel.Context(threads=arguments.threads)
    function = getattr(ouzel, op)

    def ours():
        return function(**inputs, **attributes, context=context)

    session = session_of(op, inputs, attributes, arguments.threads)
    if session is None:
        (mine,) = best_times(arguments.seconds, ours)
        print(f"| {name} | - | {1e3 * mine:.3f} | - | - |")
        return
    difference = max(np.abs(a - b).max() for a, b in zip(ours(), session.run(None, inputs), strict=True))
    theirs, mine = best_times(arguments.seconds, lambda: session.run(None, inputs), ours)
    print(f"| {name} | {1e3 * theirs:.3f} | {1e3 * mine:.3f} | {theirs / mine:.1f} | {difference:.1e} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of both (default: 1)")
    parser.add_argument("--seconds", type=float, default=1, help="for a case (default: 1)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(1)
    print(f"onnxruntime {onnxruntime.__version__}, ouzel {ouzel.__version__}, "
          f"{arguments.threads} threads, float32, batch 1\n")
    print("| | onnxruntime ms | ouzel ms | ratio | largest difference |\n|---|---|---|---|---|")
    for name, rule, T, query_heads, heads, keys, values, per_key in ATTENTION:
        inputs = attention_inputs(rng, rule, T, query_heads, heads, keys, values, per_key)
        attributes = {"update_rule": rule, "q_num_heads": query_heads, "kv_num_heads": heads}
        compare(f"{name}, T {T:,}", "LinearAttention", inputs, attributes, arguments)
    for name, T, channels in CONVOLUTION:
        inputs = {
            "input": rng.standard_normal((1, channels, T), dtype=np.float32),
            "weight": rng.standard_normal((channels, 1, 4), dtype=np.float32),
            "bias": rng.standard_normal(channels, dtype=np.float32),
            "past_state": rng.standard_normal((1, channels, 3), dtype=np.float32),
        }
        compare(f"{name}, T {T:,}", "CausalConvWithState", inputs, {"activation": "silu"}, arguments)


if __name__ == "__main__":
    main()
