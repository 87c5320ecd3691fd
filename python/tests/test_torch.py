"""ouzel.torch: every operator as an autograd function."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import golden
import ouzel
from ouzel import _operators

torch = pytest.importorskip("torch")

import ouzel.torch  # noqa: E402
from torch_samples import gated, sample, triple  # noqa: E402

OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 2e-5  # docs/numerics.md


def tensors(array, **options):
    return torch.tensor(np.array(array), **options)


@pytest.mark.parametrize("path", golden.files(), ids=lambda path: path.stem)
def test_golden_files(path):
    """Outputs and gradients against float64."""
    file = golden.Golden(path)
    function = getattr(ouzel.torch, file.metadata["op"])
    law = ouzel.laws()[function.__name__]
    attributes = file.attributes(law)
    differentiable = {
        t.name: t.gradient if _operators.holds(t.gradient_when, law, attributes) else ""
        for t in law.inputs
    }
    with_gradients = bool(file.metadata.get("grads"))
    given = {
        name: tensors(x, requires_grad=with_gradients and bool(differentiable[name]))
        for name, x in file.arguments(law, file.metadata["inputs"]).items()
    }
    stateful = any(t.is_state and _operators.holds(t.when, law, attributes) for t in law.outputs)
    results = function(**given, **attributes, **({"output_final_state": True} if stateful else {}))
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    names = [output.name for output in law.outputs if _operators.holds(output.when, law, attributes)]
    got = dict(zip(names, results, strict=True))
    golden.check({n: file.tensors[n] for n in file.metadata["outputs"]},
                 {n: r.detach().numpy() for n, r in got.items()}, OUTPUT_BOUND)

    if not with_gradients:
        return
    upstream = file.arguments(law, file.metadata["upstream"])
    above = {output.name: output.gradient for output in law.outputs}
    pairs = [(r, tensors(upstream[above[n]])) for n, r in got.items() if above[n] in upstream]
    torch.autograd.backward(*map(list, zip(*pairs)))
    expected = {n: file.tensors[n] for n in file.metadata["grads"]}
    gradients = {differentiable[n]: x.grad.numpy() for n, x in given.items() if x.grad is not None}
    golden.check(expected, gradients, GRADIENT_BOUND)



def test_functions_without_gradients_take_no_tensor_that_needs_one():
    q, k, v = (sample((1, 3, 1, 4)) for _ in range(3))
    turned = torch.view_as_complex(torch.randn(1, 3, 1, 4, 2)).conj().imag
    assert turned.is_neg()
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: k is a view whose sign.*resolve_neg"):
        ouzel.retention(turned.resolve_neg().contiguous(), turned, turned)
    straight = turned.resolve_neg().contiguous()
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: do is a view whose sign.*resolve_neg"):
        ouzel.retention.vjp(straight, straight, straight, do=turned)
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: q is a view whose sign.*resolve_neg"):
        ouzel.retention.vjp(turned, straight, straight, do=straight)
    token, state = straight[:, :1], torch.zeros(1, 1, 4, 4)
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: v is a view whose sign.*resolve_neg"):
        ouzel.retention.step(token, token, turned[:, :1], initial_state=state)
    with pytest.raises(ouzel.InvalidArgumentError, match="initial_state is a view whose sign.*resolve_neg"):
        ouzel.retention.step(token, token, token, initial_state=torch._neg_view(state))
    assert not state.any()
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: k requires a gradient.*torch"):
        ouzel.retention(q, k.requires_grad_(), v)
    ouzel.retention(q, k.detach(), v)


def test_every_operator_with_a_backward_is_here():
    for law in ouzel.laws().values():
        assert hasattr(ouzel.torch, law.name) == any(tensor.gradient for tensor in law.inputs)
        if not hasattr(ouzel.torch, law.name):
            continue
        function = getattr(ouzel.torch, law.name)
        assert inspect.signature(function) == inspect.signature(getattr(ouzel, law.name))
        assert law.formula in function.__doc__ and law.name in ouzel.torch.__all__
        assert all(getattr(ouzel.torch, alias) is function for alias in law.aliases)


def test_only_what_asks_for_a_gradient_gets_one():
    q, k, v, g, beta, h = (x.detach() for x in gated())
    g.requires_grad_()
    o, state = ouzel.torch.gated_delta_rule(q, k, v, g, beta, initial_state=h, output_final_state=True)
    assert o.requires_grad and state.requires_grad
    state.sum().backward()  # and of the state alone
    assert g.grad is not None and q.grad is None and h.grad is None
    for x in ouzel.torch.gated_delta_rule(q, k, v, g.detach(), beta, output_final_state=True):
        assert not x.requires_grad
    with torch.no_grad():
        assert not ouzel.torch.gated_delta_rule(q, k, v, g, beta)[0].requires_grad
    weights = ouzel.torch.retention(q, k, v.requires_grad_(), form="parallel")[2]
    assert not weights.requires_grad
    projection = sample((6, 8)).requires_grad_()
    with pytest.raises(ouzel.InvalidArgumentError, match="linear_attention: W has no gradient"):
        ouzel.torch.linear_attention(q, k, v, W=projection, feature_map="favor_positive")
    decays = torch.full((3,), -0.5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: g_gamma has no gradient"):
        ouzel.torch.retention(q, k, v, g_gamma=decays)


@pytest.mark.parametrize("lay_out", [
    lambda x: torch.stack([x, x], dim=2)[:, :, 1],
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),  # a last axis with a stride: copied
    lambda x: torch.complex(x, -x).conj().imag,  # memory holds the negatives
])  # fmt: skip
def test_any_layout(lay_out):
    arrays = triple()
    expected = ouzel.torch.retention(*arrays)[0]
    laid = [lay_out(x).requires_grad_() for x in arrays]
    o = ouzel.torch.retention(*laid)[0]
    assert torch.equal(o, expected)
    for x in arrays:
        x.requires_grad_()
    upstream = sample((2, 37, 3, 8), 3)
    ouzel.torch.retention(*arrays)[0].backward(upstream)
    o.backward(lay_out(upstream))
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(arrays, laid))
    ouzel.torch.retention(*laid)[0].sum().backward()  # one number for all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    narrow, wide = gated(dtype=dtype), gated()
    with torch.no_grad():
        for x, y in zip(wide, narrow):
            x.copy_(y)
    got = ouzel.torch.gated_delta_rule(*narrow[:5], initial_state=narrow[5], output_final_state=True)
    want = ouzel.torch.gated_delta_rule(*wide[:5], initial_state=wide[5], output_final_state=True)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    upstream = sample((2, 37, 3, 8), 6, dtype)
    torch.autograd.backward(got, [upstream, torch.ones_like(got[1])])
    torch.autograd.backward(want, [upstream.float(), torch.ones_like(want[1])])
    for x, y in zip([*got, *(x.grad for x in narrow)], [*want, *(x.grad for x in wide)]):
        error = (x.detach().double() - y.detach().double()).norm() / y.detach().double().norm()
        assert error < 4e-3
    assert all(x.grad.dtype == x.dtype for x in narrow)


def test_results_are_memory_of_their_own_without_copies():
    q, k, v = triple()
    o, state = ouzel.torch.retention(q, k, v, output_final_state=True)
    kept = o.clone()
    del q, k, v, state
    o += 1
    assert torch.equal(o, kept + 1) and o.is_contiguous() and o.data_ptr() % 64 == 0


def test_states_carry_a_sequence_on():
    q, k, v, g, beta, _ = (x.detach() for x in gated(128))
    parts = [[x[:, :64] for x in (q, k, v, g, beta)], [x[:, 64:] for x in (q, k, v, g, beta)]]
    whole, end = ouzel.torch.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    first, state = ouzel.torch.gated_delta_rule(*parts[0], output_final_state=True)
    second, state = ouzel.torch.gated_delta_rule(*parts[1], initial_state=state,
                                                 output_final_state=True)
    assert torch.equal(torch.cat([first, second], dim=1), whole) and torch.equal(state, end)


def test_packed_sequences():
    q, k, v = triple((1, 9, 2, 4))
    bounds = [0, 4, 4, 9]
    o, states = ouzel.torch.retention(q, k, v, cu_seqlens=bounds, output_final_state=True)
    for kind in (torch.int32, torch.int64):
        again = ouzel.torch.retention(q, k, v, cu_seqlens=torch.tensor(bounds, dtype=kind))[0]
        assert torch.equal(again, o)
    assert states.shape[0] == 3
    assert torch.equal(o[:, 4:], ouzel.torch.retention(q[:, 4:], k[:, 4:], v[:, 4:])[0])


def test_empty_tensors():
    q, k, v = triple((2, 0, 3, 8), grad=True)
    o, state = ouzel.torch.retention(q, k, v, output_final_state=True)
    assert o.shape == q.shape and not state.any()
    o.sum().backward()
    assert k.grad.shape == k.shape


def test_second_derivatives_are_refused():
    q, k, v = triple(grad=True)
    gradient, = torch.autograd.grad(ouzel.torch.retention(q, k, v)[0].sum(), q, create_graph=True)
    plain, = torch.autograd.grad(ouzel.torch.retention(q, k, v)[0].sum(), q)
    assert torch.equal(gradient, plain)
    with pytest.raises(NotImplementedError, match="ouzel.torch.retention has no second derivative"):
        gradient.sum().backward()


def test_what_is_not_taken():
    q, k, v = triple()
    for wrong, error, sentence in (
        (k.double(), ouzel.InvalidArgumentError,
         r"retention: k is F64 .*; F32, BF16 or F16 was expected: convert it first, as by k.float\(\)$"),
        (k.int(), ouzel.InvalidArgumentError, "retention: k is I32"),
        (k.to("meta"), ouzel.InvalidArgumentError, "retention: k lives on the device meta"),
        (k.to_sparse(), ouzel.InvalidArgumentError, "retention: k .*a dense tensor was expected"),
        (k[:, 1:], ouzel.InvalidArgumentError, r"retention: k has shape \[2, 36, 3, 8\]"),
        (k.numpy(), TypeError, "retention: k is of type ndarray; a torch.Tensor was expected"),
        (None, ouzel.InvalidArgumentError, "retention: tensor 'k' .* is missing"),
    ):
        for options in ({}, {"requires_grad": True}):
            with pytest.raises(error, match=sentence):
                ouzel.torch.retention(q.clone().requires_grad_(bool(options)), wrong, v)
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: form 'fast' is not one of"):
        ouzel.torch.retention(q, k, v, form="fast")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scael'"):
        ouzel.torch.retention(q, k, v, scael=1)


def test_tensors_of_zeros_without_memory_are_refused():
    q, k, v = triple((1, 5, 2, 4))
    zeros = torch._efficientzerotensor((1, 5, 2, 4))
    with pytest.raises(ouzel.InvalidArgumentError, match="retention: k has a shape, but no memory"):
        ouzel.torch.retention(q, zeros, v)


def test_tensors_changed_before_the_backward_pass_are_noticed():
    q, k, v = triple(grad=True)
    o = ouzel.torch.retention(q, k * 1, v)[0]
    kept = k * 1
    o = ouzel.torch.retention(q, kept, v)[0]
    kept += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_threads_of_python():
    def work(seed):
        context = ouzel.Context(threads=1)
        q, k, v = [sample((1, 200, 2, 16), seed + i, grad=True) for i in range(3)]
        for _ in range(5):
            ouzel.torch.retention(q, k, v, context=context)[0].square().sum().backward()
        return q.grad

    alone = [work(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(work, range(8)), alone))


def test_steps_update_states():
    q, k, v, g, beta, _ = (x.detach() for x in gated(70))
    whole, final = ouzel.torch.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    state = torch.zeros(2, 3, 8, 8)
    address = state.data_ptr()
    for t in range(70):
        token = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        o = ouzel.torch.gated_delta_rule.step(*token, initial_state=state)
        assert torch.allclose(o[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)
    assert torch.allclose(state, final, atol=1e-5, rtol=1e-5) and state.data_ptr() == address

    weights = torch.ones(2, 3, 8, 8, requires_grad=True)
    loss = (weights * state).sum()
    ouzel.torch.gated_delta_rule.step(*token, initial_state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    negatives = torch.complex(state, state).conj().imag
    with pytest.raises(ouzel.InvalidArgumentError, match="initial_state is a view of negatives"):
        ouzel.torch.gated_delta_rule.step(*token, initial_state=negatives)
    with pytest.raises(ouzel.InvalidArgumentError, match="a step updates 'initial_state'"):
        ouzel.torch.gated_delta_rule.step(*token)
    token[0].requires_grad_()
    with pytest.raises(ouzel.InvalidArgumentError, match="a step keeps nothing for a backward pass"):
        ouzel.torch.gated_delta_rule.step(*token, initial_state=state)
    with torch.no_grad():
        ouzel.torch.gated_delta_rule.step(*token, initial_state=state)
    with torch.inference_mode():
        ouzel.torch.gated_delta_rule.step(*token, initial_state=torch.zeros(2, 3, 8, 8))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_work_as_pasted(example):
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})


def test_a_retained_graph_goes_backward_again():
    q, k, v = (torch.randn(1, 130, 2, 8, requires_grad=True) for _ in range(3))
    g = (-torch.rand(1, 130, 2, 8)).requires_grad_()
    o, _ = ouzel.torch.gla(q, k, v, g)
    once = torch.autograd.grad(o.square().sum(), (q, k, v, g), retain_graph=True)
    again = torch.autograd.grad(o.square().sum(), (q, k, v, g))
    for a, b in zip(once, again):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
