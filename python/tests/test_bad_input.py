"""What cannot be right is refused with a sentence, by every operator: types, shapes, values. What can be
is right. Nothing crashes."""

import itertools

import numpy as np
import pytest

import ouzel

LAWS = ouzel.laws()
SIZES = {"B": 2, "T": 5, "TQ": 5, "TK": 5, "TN": 5, "N": 2, "R": 8, "OD": 4, "QD": 4, "KD": 4, "VD": 4, "GD": 2,
         "BD": 2, "TP": 3}
ATTRIBUTES = {
    "LinearAttention": {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated_delta"},
    "lightning_attention": {"layer_idx": 0, "num_layers": 2},
}
GATES = {"g", "gv", "w", "gate", "decay", "dt"}
CONTEXT = ouzel.Context(threads=2)


def extent(letter):
    return int(letter) if letter.isdigit() else SIZES.get(letter, 2 if letter[0] == "H" else 4)


def array_of(tensor, seed=0):
    shape = [extent(letter) for letter in tensor.shape.split("|")[0].split()]
    # Gates, in logarithms or not, may be 0.
    scale = 0.0 if tensor.name in GATES else 0.5
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(tensor.dtype)


def arguments(law):
    """A small call that is right: what the operator always needs, and its attributes."""
    wanted = [t for t in law.inputs if not t.optional and (not t.when or law.name in ATTRIBUTES)]
    return {t.name: array_of(t, seed) for seed, t in enumerate(wanted)}, ATTRIBUTES.get(law.name, {})


def upstream(law):
    first = law.outputs[0]
    return {first.gradient: array_of(first)}


def arrays_in(results):
    values = results.values() if isinstance(results, dict) else results
    values = values if isinstance(results, (tuple, dict)) else (results,)
    return [value for value in values if value is not None]


def calls(law):
    """Forward and backward, as functions of the tensors and attributes."""
    function = getattr(ouzel, law.name)
    above = upstream(law)
    return [
        lambda **given: arrays_in(function(**given, context=CONTEXT)),
        lambda **given: arrays_in(function.vjp(**given, **above, context=CONTEXT)),
    ]


def same_or_refused(call, **given):
    """A result, or an error with a sentence of its own: nothing else."""
    try:
        return call(**given)
    except (ouzel.Error, TypeError) as error:
        assert len(str(error)) > 10
        return None


@pytest.fixture(params=LAWS.values(), ids=LAWS)
def law(request):
    return request.param


def test_the_calls_that_are_varied_here_are_right(law):
    tensors, attributes = arguments(law)
    assert tensors
    for call in calls(law):
        assert call(**tensors, **attributes)


def test_types_that_are_wrong(law):
    tensors, attributes = arguments(law)
    wrong = [[1.0], 3, "text", object(), len, {}, np.float32, b"bytes"]
    for call, name in itertools.product(calls(law), tensors):
        array = tensors[name]
        others = ["int64", "bool", "complex64", "object", "U3", "datetime64[s]", "longdouble"]
        others += ["float64"] if array.dtype == np.float32 else []
        with np.errstate(all="ignore"):
            bad = wrong + [np.zeros(array.shape).astype(dtype) for dtype in others]
        bad.append(array.astype(">f4" if array.dtype == np.float32 else ">f8"))
        bad.append(np.zeros(array.shape, [("a", "f4")]))
        for value in bad:
            with pytest.raises((ouzel.InvalidArgumentError, TypeError, BufferError)) as error:
                call(**{**tensors, name: value}, **attributes)
            assert name in str(error.value) or len(str(error.value)) > 10


def test_shapes_that_are_wrong(law):
    tensors, attributes = arguments(law)
    for call, name in itertools.product(calls(law), tensors):
        array = tensors[name]
        shapes = [(), (1,), (*array.shape, 1), (1, *array.shape), array.shape[1:], array.shape[:-1]]
        for axis, change in itertools.product(range(array.ndim), (-1, 1, 1000)):
            shape = list(array.shape)
            shape[axis] += change
            shapes.append(tuple(shape))
        for shape in shapes:
            same_or_refused(call, **{**tensors, name: np.zeros(shape, array.dtype)}, **attributes)
        with pytest.raises(ouzel.InvalidArgumentError, match=f"{name} has (shape|[0-9]+ axes)"):
            call(**{**tensors, name: array[None, None, None]}, **attributes)


def test_sizes_of_zero(law):
    tensors, attributes = arguments(law)
    letters = {letter for t in law.inputs for letter in t.shape.split("|")[0].split()}
    info = {t.name: t.shape.split("|")[0].split() for t in law.inputs}
    for call, letter in itertools.product(calls(law), sorted(letters)):
        given = {}
        for name, array in tensors.items():
            shape = [0 if of == letter else n for of, n in zip(info[name], array.shape, strict=True)]
            given[name] = np.zeros(shape, array.dtype)
        results = same_or_refused(call, **given, **attributes)
        assert results is None or all(np.isfinite(result).all() for result in results)


LAYOUTS = {
    "fortran": np.asfortranarray,
    "backwards": lambda x: x[(slice(None, None, -1),) * x.ndim].copy()[(slice(None, None, -1),) * x.ndim],
    "gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "rows with gaps": lambda x: np.repeat(x, 2, axis=0)[::2],
    "misaligned": lambda x: np.frombuffer(b"?" + x.tobytes(), "u1")[1:].view(x.dtype).reshape(x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_is_right(law, layout):
    tensors, attributes = arguments(law)
    for call in calls(law):
        expected = call(**tensors, **attributes)
        got = call(**{name: layout(x) for name, x in tensors.items()}, **attributes)
        assert all(map(np.array_equal, got, expected)) and len(got) == len(expected)


def test_broadcast_arrays_are_right(law):
    tensors, attributes = arguments(law)
    for call, name in itertools.product(calls(law), tensors):
        array = tensors[name]
        for axis in range(array.ndim):
            one = np.broadcast_to(array.take([0], axis), array.shape)
            expected = call(**{**tensors, name: one.copy()}, **attributes)
            assert all(map(np.array_equal, call(**{**tensors, name: one}, **attributes), expected))


def test_attributes_that_are_wrong(law):
    tensors, attributes = arguments(law)
    values = {
        "bool": ["perhaps", 7, object(), []],
        "int": [-1, 0, 2**31, 2**62, -(2**63), 2**63, 2**200, 1.5, "x", object(), np.float32(2)],
        "float": [float("nan"), float("inf"), -1e308, 1e308, -1.0, 0.0, "x", object(), 10**400, [1.0]],
        "str": ["nonsense", "", "\0", "x" * 100_000, 3, object()],
        "Sequence[int]": [[], [0], [5], [0, 9], [0, 3, 2, 5], [-1, 5], [0, 2**62], [0, 2**63], [0.5, 5],
                          ["a"], 3, "05", object(), [0] * 5000, [5, 0]],
    }  # fmt: skip
    for call, attribute in itertools.product(calls(law), law.attributes):
        for value in values[attribute.kind]:
            same_or_refused(call, **tensors, **{**attributes, attribute.name: value})


def test_values_of_all_kinds(law):
    """NaN, infinities and extremes are numbers: what comes out need not be finite, but it comes."""
    tensors, attributes = arguments(law)
    for call, name in itertools.product(calls(law), tensors):
        for value in (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1.0):
            array = np.full_like(tensors[name], value)
            same_or_refused(call, **{**tensors, name: array}, **attributes)


def test_states_that_are_wrong(law):
    states = [t for t in law.inputs if t.shape.startswith("N ") and t.optional]
    tensors, attributes = arguments(law)
    for call, state in itertools.product(calls(law), states):
        whole = array_of(state)
        for shape in [(), whole.shape[1:], (*whole.shape, 1), (1, *whole.shape[1:])]:
            same_or_refused(call, **tensors, **attributes, **{state.name: np.zeros(shape, np.float32)})
        with pytest.raises((ouzel.InvalidArgumentError, TypeError)):
            call(**tensors, **attributes, **{state.name: whole.astype(np.float64)})


def test_what_is_missing_or_unknown(law):
    tensors, attributes = arguments(law)
    for call, name in itertools.product(calls(law), tensors):
        with pytest.raises(ouzel.InvalidArgumentError, match=name):
            call(**{**tensors, name: None}, **attributes)
    function = getattr(ouzel, law.name)
    with pytest.raises(TypeError, match="unknown"):
        function(**tensors, **attributes, unknown=1)
    with pytest.raises(TypeError):
        function(**tensors, **attributes, context="none")
    with pytest.raises(ouzel.InvalidArgumentError, match="backward pass needs"):
        function.vjp(**tensors, **attributes)


class Own(Exception):
    pass


class Raises:
    def fail(self, *_):
        raise Own("of the argument")

    __iter__ = __index__ = __float__ = __str__ = __fspath__ = fail


def begins_well():
    yield 0
    raise Own("in the middle")


@pytest.mark.parametrize(
    "attributes",
    [{"cu_seqlens": begins_well()}, {"cu_seqlens": Raises()}, {"cu_seqlens": [0, Raises()]},
     {"scale": Raises()}, {"H": Raises()}, {"form": Raises()}, {"reverse": Raises()}],
    ids=lambda attributes: next(iter(attributes)),
)  # fmt: skip
def test_what_arguments_raise_themselves_comes_out(attributes):
    x = np.ones((1, 5, 2, 4), np.float32)
    with pytest.raises(TypeError, match=f"retention: {next(iter(attributes))} was not given") as error:
        ouzel.retention(x, x, x, **attributes)
    assert isinstance(error.value.__cause__, Own)


def test_what_paths_and_configurations_raise_themselves_comes_out(tmp_path):
    for call in (ouzel.Model.load, lambda path: ouzel.Model.random({}).save(path)):
        with pytest.raises((Own, TypeError, ouzel.Error)):
            call(Raises())
    with pytest.raises(TypeError, match="not JSON serializable"):
        ouzel.Model.random({"hidden_size": Raises()})
    with pytest.raises(ouzel.Error):
        ouzel.Model.load(tmp_path / ("x" * 5000))


def test_an_interrupt_in_an_argument_is_no_error_of_it():
    def interrupted():
        yield 0
        raise KeyboardInterrupt

    x = np.ones((1, 5, 2, 4), np.float32)
    with pytest.raises(KeyboardInterrupt):
        ouzel.retention(x, x, x, cu_seqlens=interrupted())


def test_texts_that_are_no_utf8(tmp_path):
    x = np.ones((1, 5, 2, 4), np.float32)
    with pytest.raises(TypeError, match="retention: form was not given a value of type str"):
        ouzel.retention(x, x, x, form="\udcff")
    with pytest.raises(ouzel.Error, match=r"\\xff"):
        ouzel.Model.load(bytes(tmp_path) + b"/\xff\xfe")


@pytest.mark.parametrize("value", [True, np.True_, 1])
def test_flags_of_calls(value):
    x = np.ones((1, 5, 2, 4), np.float32)
    assert ouzel.retention(x, x, x, output_final_state=value)[1] is not None


def test_flags_and_contexts_of_another_type():
    x = np.ones((1, 5, 2, 4), np.float32)
    for wrong in ("yes", x, None, 2):
        with pytest.raises(TypeError, match="retention: output_final_state is of type"):
            ouzel.retention(x, x, x, output_final_state=wrong)
    for call in (ouzel.retention, ouzel.retention.vjp, ouzel.retention.step):
        state = {"initial_state": np.zeros((1, 2, 4, 4), np.float32)} if call is ouzel.retention.step else {}
        upstream = {"do": x} if call is ouzel.retention.vjp else {}
        one = [x[:, :1].copy()] * 3 if state else [x] * 3
        with pytest.raises(TypeError, match="retention: context is of type int, not ouzel.Context"):
            call(*one, **state, **upstream, context=2)


# Of an operator with states, those that all its calls may have.
def states_of(law):
    return [t for t in law.inputs if t.shape.startswith("N ") and "normalize" not in t.when]


STEPS = {name: law for name, law in LAWS.items() if hasattr(getattr(ouzel, name), "step")}


def token_of(law):
    tensors, attributes = arguments(law)
    tensors = {
        t.name: tensors[t.name][:, :1].copy() if " T" in t.shape else tensors[t.name]
        for t in law.inputs
        if t.name in tensors
    }
    states = {t.name: array_of(t, seed) for seed, t in enumerate(states_of(law))}
    if law.name == "efficient_attention":
        attributes = {"causal": True}
    return tensors, attributes, states


@pytest.mark.parametrize("name", STEPS)
def test_states_of_steps(name):
    law, function = LAWS[name], getattr(ouzel, name)
    tensors, attributes, states = token_of(law)

    def step(given):
        o = function.step(**tensors, **attributes, **given, context=CONTEXT)
        return [o, *given.values()]

    expected = step({n: x.copy() for n, x in states.items()})
    for layout in ("fortran", "backwards", "gaps", "rows with gaps"):
        got = step({n: LAYOUTS[layout](x) for n, x in states.items()})
        assert all(map(np.array_equal, got, expected)), layout
    for state, x in states.items():
        others = {n: y.copy() for n, y in states.items() if n != state}
        with pytest.raises(ouzel.InvalidArgumentError, match="read-only"):
            step({**others, state: LAYOUTS["read-only"](x)})
        with pytest.raises(ouzel.InvalidArgumentError, match="overwrite each other|read-only"):
            step({**others, state: np.broadcast_to(x[:1], x.shape)})
        for bad in (x.astype(np.float64), x.astype(np.int32), x[None], x[..., :-1], [1.0], "x"):
            with pytest.raises((ouzel.InvalidArgumentError, TypeError)):
                step({**others, state: bad})
        # The memory of a token, or of another state, is none of a state's.
        for other in [*tensors.values(), *others.values()]:
            if other.size < x.size or other.dtype != x.dtype:
                continue
            shared = other.reshape(-1)[: x.size].reshape(x.shape)
            with pytest.raises(ouzel.InvalidArgumentError, match="overlaps"):
                step({**others, state: shared})
