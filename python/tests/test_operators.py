"""Every operator of the table as a function: results, gradients, signatures, documentation."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import golden
import ouzel
from ouzel import _operators

OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 2e-5  # docs/numerics.md


def sample(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("path", golden.files(), ids=lambda path: path.stem)
def test_golden_files(path):
    file = golden.Golden(path)
    function = getattr(ouzel, file.metadata["op"])
    law = ouzel.laws()[function.__name__]
    given = file.arguments(law, file.metadata["inputs"]) | file.attributes(law)
    stateful = any(t.is_state and _operators.holds(t.when, law, given) for t in law.outputs)
    results = function(**given, **({"output_final_state": True} if stateful else {}))
    results = results if isinstance(results, tuple) else (results,)
    names = [output.name for output in law.outputs if _operators.holds(output.when, law, given)]
    got = dict(zip(names, [r for r in results if r is not None], strict=True))
    golden.check({n: file.tensors[n] for n in file.metadata["outputs"]}, got, OUTPUT_BOUND)

    if not file.metadata.get("grads"):
        return
    upstream = file.arguments(law, file.metadata["upstream"])
    gradients = function.vjp(**given, **upstream)
    expected = {name: file.tensors[name] for name in file.metadata["grads"]}
    golden.check(expected, gradients, GRADIENT_BOUND)


def test_a_state_that_is_asked_for_is_given_or_refused():
    """No call returns None where attributes leave no state."""
    q, k, v = (sample((1, 5, 2, 4), seed) for seed in range(3))
    for name, attributes in (("linear_attention", {"causal": False}),
                             ("linear_attention", {"form": "parallel"}),
                             ("retention", {"form": "parallel"}),
                             ("efficient_attention", {"causal": False})):
        function = getattr(ouzel, name)
        sentence = f"{name}: output_final_state asks for final_state, which is only given with "
        with pytest.raises(ouzel.InvalidArgumentError, match=sentence):
            function(q, k, v, **attributes, output_final_state=True)
        function(q, k, v, **attributes)


def test_every_row_of_the_table_is_a_function():
    laws = ouzel.laws()
    assert len(laws) >= 4
    for name, law in laws.items():
        function = getattr(ouzel, name)
        assert all(getattr(ouzel, alias) is function for alias in law.aliases)
        assert name in ouzel.__all__
        for part in [law.formula, law.source, *(f"    {t.name}: [" for t in law.inputs)]:
            assert part in function.__doc__
        parameters = list(inspect.signature(function).parameters)
        assert parameters[-1] == "context"
        assert set(parameters) >= {t.name for t in law.inputs} | {a.name for a in law.attributes}
        if hasattr(function, "step"):
            assert not {"output_final_state"} & set(inspect.signature(function.step).parameters)
        gradients = {output.gradient for output in law.outputs if output.gradient}
        assert gradients <= set(inspect.signature(function.vjp).parameters)
        assert all(tensor.gradient in function.vjp.__doc__ for tensor in law.inputs)


def test_help_explains_what_stands_in_it():
    """Every letter of a shape once, and which gradients from above may be left out."""
    for name, law in ouzel.laws().items():
        function = getattr(ouzel, name)
        for f in filter(None, (function, function.vjp, getattr(function, "step", None))):
            arguments, sizes = f.__doc__.split("\nSizes:\n")
            letters = set(re.findall(r"[A-Z]+", " ".join(re.findall(r": \[(.*?)\][,;]", arguments))))
            explained = re.findall(r"^    ([A-Z]+): \w", sizes, re.MULTILINE)
            assert letters and letters <= set(explained) and len(explained) == len(set(explained)), name
        above = [output.gradient for output in law.outputs if output.gradient]
        said = f"of {', '.join(above)} one or more must be given"
        assert (said in function.vjp.__doc__) == (len(above) > 1)
    assert "    HQ: query heads" in ouzel.gated_delta_rule.__doc__
    assert "    do: [B, T, HO, V], float32, bfloat16 or float16; the gradient of o" in ouzel.retention.vjp.__doc__


def test_functions_are_found_however_they_are_asked_for():
    """Each is written when it is first asked for, in a process of its own here."""
    code = """
import pickle
from concurrent.futures import ThreadPoolExecutor
import ouzel
assert set(ouzel.__all__) <= set(dir(ouzel))
with ThreadPoolExecutor(4) as pool:
    assert len(set(pool.map(lambda _: ouzel.kda, range(16)))) == 1
assert pickle.loads(pickle.dumps(ouzel.gla)) is ouzel.gla
from ouzel import *
assert retention is ouzel.retention and selective_scan is ouzel.mamba1
assert not hasattr(ouzel, "retntion")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_aliases_find_laws():
    laws = ouzel.laws()
    assert laws["mamba1"] is laws["selective_scan"] is laws.get("mamba1")
    assert "mamba1" in laws and "mamba1" not in list(laws) and "mamba7" not in laws
    with pytest.raises(KeyError):
        laws["mamba7"]


def test_random_projections_are_drawn_by_seed():
    w = ouzel.draw_orthogonal_projection(7, 6, 4)
    assert w.shape == (6, 4) and w.dtype == np.float32
    assert (w == ouzel.draw_orthogonal_projection(7, 6, 4)).all()
    assert (w != ouzel.draw_orthogonal_projection(8, 6, 4)).any()
    inner = w[:4] @ w[:4].T
    assert abs(inner - np.diag(np.diag(inner))).max() < 1e-5
    even = ouzel.draw_orthogonal_projection(7, 6, 4, norms="sqrt")
    assert abs((even**2).sum(axis=1) - 4).max() < 1e-5
    for rows, keys, norms in [(0, 4, "chi"), (4, -1, "chi"), (4, 4, "cho")]:
        with pytest.raises(ouzel.InvalidArgumentError):
            ouzel.draw_orthogonal_projection(7, rows, keys, norms)


def test_arrays_out_of_place_are_told_their_names():
    x = np.ones((1, 3, 2, 4), np.float32)
    with pytest.raises(TypeError, match="scale is of type float, not an array; .* do=..."):
        ouzel.retention.vjp(x, x, x, x)


def test_signatures_are_those_of_the_field():
    assert str(inspect.signature(ouzel.gated_delta_rule)).startswith(
        "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
    )
    assert list(inspect.signature(ouzel.gated_delta_rule).parameters)[-3:] == [
        "cu_seqlens", "form", "context",
    ]


@pytest.mark.parametrize("package", ["", "torch"])
def test_stubs_have_the_same_signatures(package):
    folder = Path(ouzel.__file__).parent
    assert (folder / "py.typed").exists() and ast.parse((folder / "_core.pyi").read_text()).body
    tree = ast.parse((folder / package / "__init__.pyi").read_text())
    protocols = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    types = {
        node.target.id: node.annotation.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.annotation.id in protocols
    }
    laws = ouzel.laws().values()
    differentiable = [law for law in laws if any(tensor.gradient for tensor in law.inputs)]
    for law in differentiable if package else laws:
        function = getattr(ouzel, law.name)
        kinds = {"__call__": function}
        if not package:
            kinds["vjp"] = function.vjp
        if hasattr(function, "step"):
            kinds["step"] = function.step
        methods = {m.name: m for m in protocols[types[law.name]].body}
        assert set(methods) == set(kinds)
        for method, real in kinds.items():
            args = methods[method].args
            named = [arg.arg for arg in args.args[1:] + args.kwonlyargs]
            assert named == list(inspect.signature(real).parameters)


def test_what_is_returned_follows_what_is_asked_for():
    q = k = v = sample((2, 5, 2, 4))
    o, state = ouzel.retention(q, k, v)
    assert state is None
    o2, state = ouzel.retention(q, k, v, output_final_state=True)
    assert state.shape == (2, 2, 4, 4) and np.array_equal(o, o2)
    assert [x is None for x in ouzel.retention(q, k, v, form="parallel")] == [False, True, False]
    o, state, z = ouzel.linear_attention(q, k, v, normalize=True, feature_map="elu1",
                                         output_final_state=True)
    assert z.shape == (2, 2, 4)
    assert isinstance(ouzel.softmax_attention(q, k, v), np.ndarray)
    gradients = ouzel.retention.vjp(q, k, v, do=o)
    assert list(gradients) == ["dq", "dk", "dv"]
    gradients = ouzel.retention.vjp(q, k, v, initial_state=state, do=o)
    assert gradients["dh0"].shape == state.shape


def test_states_carry_a_sequence_on():
    q, k, v = (sample((1, 128, 2, 16), seed) for seed in range(3))
    whole, _ = ouzel.retention(q, k, v)
    first, state = ouzel.retention(q[:, :64], k[:, :64], v[:, :64], output_final_state=True)
    second, _ = ouzel.retention(q[:, 64:], k[:, 64:], v[:, 64:], initial_state=state)
    assert np.array_equal(np.concatenate([first, second], axis=1), whole)


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda x: np.array(x, np.int32)])
def test_packed_sequences(make):
    q, k, v = (sample((1, 9, 2, 4), seed) for seed in range(3))
    packed, states = ouzel.retention(q, k, v, cu_seqlens=make([0, 4, 4, 9]), output_final_state=True)
    assert states.shape == (3, 2, 4, 4)
    alone, _ = ouzel.retention(q[:, 4:], k[:, 4:], v[:, 4:])
    assert np.array_equal(packed[:, 4:], alone)


def test_initial_and_final_states_are_in_one_order():
    """Which is how a step knows them apart."""
    for law in ouzel.laws().values():
        initial = [tensor for tensor in law.inputs if tensor.is_state]
        final = [output for output in law.outputs if output.is_state]
        assert [(t.shape, t.when) for t in initial] == [(t.shape, t.when) for t in final], law.name
        assert hasattr(getattr(ouzel, law.name), "step") == bool(final)


def tokens_of(law, name, array):
    """The axis of the tokens, or None."""
    for shape in next(t.shape for t in law.inputs if t.name == name).split("|"):
        axes = [i for i, letter in enumerate(shape.split()) if letter.startswith("T")]
        if len(shape.split()) == array.ndim and axes:
            return axes[0]
    return None


def goes_on(path):
    """Whether its tokens follow one another to a state that is kept."""
    file = golden.Golden(path)
    law = ouzel.laws()[getattr(ouzel, file.metadata["op"]).__name__]
    attributes = file.attributes(law)
    kept = [t for t in law.inputs if t.is_state and _operators.holds(t.when, law, attributes)]
    return bool(kept) and not attributes.get("reverse") and "cu_seqlens" not in attributes


@pytest.mark.parametrize("path", [*filter(goes_on, golden.files())], ids=lambda path: path.stem)
def test_golden_files_token_by_token(path):
    """States of no tokens, then steps of all tokens but three, and of one each."""
    file = golden.Golden(path)
    function = getattr(ouzel, file.metadata["op"])
    law = ouzel.laws()[function.__name__]
    attributes = file.attributes(law)
    names = [t.name for t in law.inputs if t.is_state and _operators.holds(t.when, law, attributes)]
    given = file.arguments(law, file.metadata["inputs"])
    axes = {name: tokens_of(law, name, array) for name, array in given.items()}
    length = next(given[n].shape[axis] for n, axis in axes.items() if axis is not None)

    def part(begin, end):
        def of(array, axis):
            rows = array.shape[axis] // length
            return array.take(range(begin * rows, end * rows), axis)

        return {n: x if axes[n] is None else of(x, axes[n]) for n, x in given.items()}

    none = function(**part(0, 0), **attributes, output_final_state=True)
    states = dict(zip(names, none[1:]))
    cut = max(length - 3, 0)
    parts = [(0, cut), *((t, t + 1) for t in range(cut, length))]
    o = [function.step(**(part(*p) | states), **attributes) for p in parts]
    got = {"o": np.concatenate(o, axis=1)}
    got |= zip((output.name for output in law.outputs if output.is_state), states.values())
    golden.check({n: file.tensors[n] for n in file.metadata["outputs"]}, got, OUTPUT_BOUND)


def test_steps_update_states():
    q, k, v = (sample((2, 70, 3, 16), seed) for seed in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -np.abs(sample((2, 70, 3), 3)), 1 / (1 + np.exp(sample((2, 70, 3), 4)))
    weight = sample((5, 4), 5)
    x, dt = sample((2, 70, 5), 6), np.abs(sample((2, 70, 5), 7))
    for name, along, fixed, states in (
        ("retention", {"q": q, "k": k, "v": v}, {}, {"initial_state": (2, 3, 16, 16)}),
        ("gated_delta_rule", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, {"scale": 0.5},
         {"initial_state": (2, 3, 16, 16)}),
        ("linear_attention", {"q": q, "k": k, "v": v}, {"feature_map": "elu1", "normalize": True},
         {"initial_state": (2, 3, 16, 16), "initial_z": (2, 3, 16)}),
        ("mlstm", {"q": q, "k": k, "v": v, "i": g, "f": beta}, {},
         {"initial_state": (2, 3, 16, 16), "initial_z": (2, 3, 16), "initial_m": (2, 3)}),
        ("short_conv", {"x": x}, {"weight": weight, "activation": "silu"},
         {"initial_state": (2, 5, 4)}),
        ("selective_scan", {"x": x, "dt": dt, "B": x[..., :2], "C": x[..., 1:3]},
         {"A": -np.abs(sample((5, 2), 8))}, {"initial_state": (2, 5, 2)}),
    ):  # fmt: skip
        function = getattr(ouzel, name)
        states = {n: sample(shape, 9 + i) for i, (n, shape) in enumerate(states.items())}
        whole, *final = function(**along, **fixed, **states, output_final_state=True)
        kept = {n: s.transpose().copy().transpose() for n, s in states.items()}  # of any strides
        cut = 64
        parts = [function.step(**{n: a[:, :cut] for n, a in along.items()}, **fixed, **kept)]
        for t in range(cut, 70):
            token = {n: a[:, t : t + 1] for n, a in along.items()}
            parts.append(function.step(**token, **fixed, **kept))
        got = {"o": np.concatenate(parts, axis=1)} | kept
        golden.check(dict(zip(got, [whole, *final])), got, OUTPUT_BOUND)


def test_a_step_says_what_it_updates():
    text = ouzel.gated_delta_rule.step.__doc__
    assert "initial_state: [N, HV, K, V], float32, updated in place" in text
    assert "initial_z: [N, HV, F], float32, updated in place" in ouzel.linear_attention.step.__doc__


def test_what_a_step_does_not_take():
    q = k = v = sample((1, 1, 2, 4))
    state = np.zeros((1, 2, 4, 4), np.float32)
    fixed = state.copy()
    fixed.flags.writeable = False
    for given, sentence in (
        (None, r"a step updates 'initial_state' \[N, HV, K, V\] .* in place: .* not left out"),
        (state.astype(np.float16), "it must be given as F32, not F16"),
        (fixed, "initial_state is read-only; a state that is updated must be writable"),
        (np.broadcast_to(state[:, :1], state.shape), "read-only"),
    ):
        with pytest.raises(ouzel.InvalidArgumentError, match=sentence):
            ouzel.retention.step(q, k, v, initial_state=given)
    with pytest.raises(ouzel.InvalidArgumentError, match="there is no state to update"):
        ouzel.efficient_attention.step(q, k, v, causal=False)
    assert not state.any()


def test_attributes_are_values_of_python():
    q = k = v = sample((1, 5, 2, 4))
    half = ouzel.retention(q, k, v, scale=0.5)[0]
    assert np.array_equal(half, ouzel.retention(q, k, v, scale=np.float32(0.5))[0])
    turned = ouzel.retention(q, k, v, reverse=True)[0]
    assert np.array_equal(turned, ouzel.retention(q, k, v, reverse=np.True_)[0])
    assert not np.array_equal(turned, ouzel.retention(q, k, v)[0])
    ouzel.retention(q, k, v, H=np.int64(2))
    for wrong in ({"scale": "0.5"}, {"H": 2.0}, {"cu_seqlens": 5}, {"cu_seqlens": [0, 2.5, 5]}):
        with pytest.raises(TypeError, match="retention: .* was not given a value of type"):
            ouzel.retention(q, k, v, **wrong)
    for wrong, sentence in (
        ({"form": "fast"}, "retention: form 'fast' is not one of auto, scan, parallel"),
        ({"scale": float("nan")}, "scale 'nan' is not a number"),
        ({"reverse": 2}, "reverse '2' is not true or false"),
        ({"H": 3}, "retention: H says 3 heads and v has 2"),
    ):
        with pytest.raises(ouzel.InvalidArgumentError, match=sentence):
            ouzel.retention(q, k, v, **wrong)
    with pytest.raises(TypeError, match="keyword argument 'scael'; did you mean 'scale'"):
        ouzel.retention(q, k, v, scael=1)
    with pytest.raises(TypeError, match=r"vjp\(\) .* 'zzz'; it takes q, k, v"):
        ouzel.retention.vjp(q, k, v, do=v, zzz=1)


def test_what_is_printed_is_short():
    laws = ouzel.laws()
    assert "gla" in repr(laws) and len(repr(laws)) < 1000
    assert repr(laws["gla"]) == f"<gla: {laws['gla'].formula}>"
    assert len(repr(ouzel.explain("gla"))) < 500


def test_explain():
    costs = ouzel.explain("retention", T=1024, K=32, V=32, H=2)
    assert costs["law"] == "retention"
    assert costs["state_bytes"] == 2 * 32 * 32 * 4
    assert costs["softmax_cache_bytes"] == 1024 * 2 * (32 + 32) * 4
    assert costs["costs"]["decode"]["bytes"] > 0
    # The first length that is cheaper, as the program says it: 85.3 rounded up.
    assert "prefill 86," in repr(ouzel.explain("retention", T=1000, K=32, V=64, H=2))
    with pytest.raises(ouzel.InvalidArgumentError):
        ouzel.explain("softmax_attention")
    with pytest.raises(ouzel.InvalidArgumentError, match="did you mean 'retention'"):
        ouzel.explain("retntion")
