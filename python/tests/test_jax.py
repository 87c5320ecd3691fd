"""Arrays of JAX are taken through DLPack, and results are theirs."""

import numpy as np
import pytest

import ouzel

jax = pytest.importorskip("jax")


def triple(dtype="float32", tokens=37):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, tokens, 3, 8)).astype(dtype) for key in keys]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_are_those_of_numpy(dtype):
    arrays = triple(dtype)
    got = ouzel.retention(*arrays, output_final_state=True)
    expected = ouzel.retention(*map(np.asarray, arrays), output_final_state=True)
    for x, y in zip(got, expected, strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype
        assert np.array_equal(np.asarray(x), y)
    gradients = ouzel.retention.vjp(*arrays, do=got[0])
    assert all(isinstance(x, jax.Array) and x.dtype == dtype for x in gradients.values())


def test_an_array_never_changes():
    q, k, v = triple(tokens=1)
    _, state = ouzel.retention(q, k, v, output_final_state=True)
    before = np.array(state)
    with pytest.raises(ouzel.InvalidArgumentError, match="an array of JAX, which never changes"):
        ouzel.retention.step(q, k, v, initial_state=state)
    assert np.array_equal(state, before)
    _, after = ouzel.retention(q, k, v, initial_state=state, output_final_state=True)
    assert not np.array_equal(state, after) and np.array_equal(state, before)


def test_arrays_without_values_are_refused():
    q, k, v = triple()
    with pytest.raises(jax.errors.ConcretizationTypeError, match="retention|__dlpack__"):
        jax.jit(lambda q: ouzel.retention(q, k, v)[0])(q)
