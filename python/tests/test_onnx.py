"""ouzel.onnx: the node tests of the onnx package, and models of our own, through its ReferenceEvaluator."""

from pathlib import Path

import numpy as np
import pytest

import ouzel

onnx = pytest.importorskip("onnx", minversion="1.23")
ml_dtypes = pytest.importorskip("ml_dtypes")

from onnx.backend.test.case import node as node_cases  # noqa: E402
from onnx.backend.test.case.node import causal_conv_with_state, linear_attention  # noqa: E402, F401
from onnx.helper import (  # noqa: E402
    make_graph, make_model, make_node, make_opsetid, make_tensor_value_info, np_dtype_to_tensor_dtype,
)  # fmt: skip
from onnx.reference import ReferenceEvaluator  # noqa: E402

import ouzel.onnx  # noqa: E402

# Of the two files that were imported: collect_testcases() would run those of all operators. The
# expansions of a node into others do without it.
CASES = {
    case.name: case
    for case in node_cases._NodeTestCases
    if case.model.graph.node[0].op_type in ("LinearAttention", "CausalConvWithState")
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_node_tests_of_onnx(case):
    session = ReferenceEvaluator(case.model, new_ops=ouzel.onnx.operators)
    for inputs, expected in case.data_sets:
        names = [x.name for x in case.model.graph.input]
        results = session.run(None, dict(zip(names, inputs, strict=True)))
        for got, want in zip(results, expected, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol)


def test_the_node_tests_are_there():
    assert sum("linear_attention" in name for name in CASES) >= 14
    assert sum("causal_conv" in name for name in CASES) >= 10


def test_the_example_of_the_page_works_as_pasted():
    page = Path(__file__).resolve().parents[2] / "docs" / "python.md"
    example = page.read_text().split("## ONNX")[1].split("```python\n")[1].split("```")[0]
    space = {}
    exec(compile(example, str(page), "exec"), space)
    assert space["output"].shape == (1, 512, 256) and space["present_state"].shape == (1, 4, 64, 64)


def model_of(op, inputs, **attributes):
    """A model of one node with both outputs, of these inputs by name."""
    order = list(onnx.defs.get_schema(op).inputs)
    info = [make_tensor_value_info(name, np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in inputs.items()]
    names = [i.name if i.name in inputs else "" for i in order]
    node = make_node(op, names, ["output", "present_state"], **attributes)
    outputs = [make_tensor_value_info(name, info[0].type.tensor_type.elem_type, None)
               for name in node.output]
    return make_model(make_graph([node], op, info, outputs), opset_imports=[make_opsetid("", 27)])


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def attention(T=70, heads=2, dtype=np.float32, state_dtype=np.float32):
    k = random(2, T, heads, 16)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    inputs = {
        "query": random(2, T, 4 * 16),
        "key": k.reshape(2, T, -1),
        "value": random(2, T, heads * 8),
        "decay": -0.1 * np.abs(random(2, T, heads, seed=1)),
        "beta": 1 / (1 + np.exp(random(2, T, heads, seed=2))),
    }
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    return inputs | {"past_state": random(2, heads, 16, 8).astype(state_dtype)}


def convolution(T=70, dtype=np.float32):
    return {"input": random(2, 6, T, dtype=dtype), "weight": random(6, 1, 4, dtype=dtype),
            "bias": random(6, dtype=dtype), "past_state": random(2, 6, 3, dtype=dtype)}


def both(op, inputs, **attributes):
    """Ours, and onnx's own evaluation."""
    model = model_of(op, inputs, **attributes)
    return [ReferenceEvaluator(model, **k).run(None, inputs)
            for k in ({"new_ops": ouzel.onnx.operators}, {})]


TYPES = [(np.float32, 1e-5), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)]


@pytest.mark.parametrize("dtype, bound", TYPES)
@pytest.mark.parametrize("state_dtype", [np.float32, np.float16])
def test_long_sequences_and_types(dtype, bound, state_dtype):
    inputs = attention(T=300, dtype=dtype, state_dtype=state_dtype)
    ours, theirs = both("LinearAttention", inputs, q_num_heads=4, kv_num_heads=2)
    for got, want, of, limit in zip(ours, theirs, [dtype, state_dtype], [bound, 2e-3], strict=True):
        assert got.dtype == want.dtype == of
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype, bound", TYPES)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_long_convolutions_and_types(dtype, bound, activation):
    inputs = convolution(300, dtype)
    ours, theirs = both("CausalConvWithState", inputs, activation=activation)
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=4 * bound, rtol=bound)


def test_tokens_one_by_one_go_on_where_a_prompt_ended():
    inputs = attention(T=20)
    attributes = {"q_num_heads": 4, "kv_num_heads": 2}
    whole, last = both("LinearAttention", inputs, **attributes)[0]
    state = inputs.pop("past_state")
    for t in range(20):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()} | {"past_state": state}
        output, state = both("LinearAttention", token, **attributes)[0]
        np.testing.assert_allclose(output[:, 0], whole[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)

    inputs = convolution(20)
    whole, last = both("CausalConvWithState", inputs)[0]
    state = inputs.pop("past_state")
    x = inputs.pop("input")
    for t in range(20):
        token = {"input": x[:, :, t : t + 1], **inputs, "past_state": state}
        output, state = both("CausalConvWithState", token)[0]
        np.testing.assert_allclose(output[:, :, 0], whole[:, :, t], atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_a_decay_above_0_is_told_by_its_name_here():
    inputs = attention(T=5)
    inputs["decay"] = inputs["decay"] + 9
    with pytest.raises(ouzel.InvalidArgumentError, match="^LinearAttention: decay is g here: gated_delta_rule"):
        ouzel.LinearAttention(**inputs, q_num_heads=4, kv_num_heads=2)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_what_the_specification_forbids_is_an_error(rule):
    inputs = attention(T=5)
    with pytest.raises(ouzel.InvalidArgumentError, match="q_num_heads 3 must be a multiple"):
        both("LinearAttention", inputs, q_num_heads=3, kv_num_heads=2, update_rule="gated_delta")
    for name in ("decay", "beta"):
        wanted = rule == "gated_delta" or rule == {"decay": "gated", "beta": "delta"}[name]
        other = {"decay": "beta", "beta": "decay"}[name]
        given = dict(inputs)
        if rule in ("linear", "gated" if name == "decay" else "delta"):
            del given[other]
        if wanted:
            del given[name]
        match = "is missing" if wanted else "only taken with"
        with pytest.raises(ouzel.InvalidArgumentError, match=f"'{name}' .*{match}"):
            both("LinearAttention", given, q_num_heads=4, kv_num_heads=2, update_rule=rule)


def test_a_state_of_another_width_is_an_error():
    inputs = convolution(5)
    inputs["past_state"] = inputs["past_state"][:, :, 1:]
    with pytest.raises(ouzel.InvalidArgumentError, match="past_state has TP = 2; the width of weight makes it 3"):
        both("CausalConvWithState", inputs)
