"""Arrays of JAX are taken through DLPack, and results are theirs."""

from pathlib import Path

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
    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda q: f(q).sum())):
        with pytest.raises(jax.errors.ConcretizationTypeError, match="retention|__dlpack__"):
            transform(lambda q: ouzel.retention(q, k, v)[0])(q)


def test_the_example_of_the_page_works_as_pasted():
    page = Path(__file__).resolve().parents[2] / "docs" / "python.md"
    example = page.read_text().split("## JAX")[1].split("```python\n")[1].split("```")[0]
    space = {}
    exec(compile(example, str(page), "exec"), space)
    q, k, v = (space[name] for name in "qkv")
    expected = ouzel.retention.vjp(q, k, v, do=jax.numpy.ones_like(v))
    for got, name in zip(space["gradients"], ("dq", "dk", "dv"), strict=True):
        assert np.array_equal(got, expected[name])
