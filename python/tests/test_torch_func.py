"""ouzel.torch under torch.func and in forward mode: gradients, and what is refused."""

import pytest

torch = pytest.importorskip("torch")
fwAD = pytest.importorskip("torch.autograd.forward_ad")

import ouzel.torch  # noqa: E402
from torch_samples import gated, triple  # noqa: E402

transforms = pytest.mark.skipif(not hasattr(torch, "func"), reason="this PyTorch has no torch.func")
registers = pytest.mark.skipif(
    not hasattr(torch.library, "register_autograd"), reason="this PyTorch registers no gradients"
)
FORWARD = "ouzel.torch.retention has no forward-mode derivative"
BATCH = "ouzel.torch.retention has no rule for torch.func.vmap"


def retention(*arrays):
    return ouzel.torch.retention(*arrays)[0]


def registered(*arrays):
    operator = torch.ops.ouzel.retention.default
    attributes = [None] * (len(operator._schema.arguments) - len(arrays) - 1)
    return operator(*arrays, *attributes, False)[0]


def one_step(q, k, v):
    state = torch.zeros(2, 3, 8, 8)
    return ouzel.torch.retention.step(q[:, :1], k[:, :1], v[:, :1], initial_state=state)


CALLS = [retention, one_step, pytest.param(registered, marks=registers)]


@pytest.mark.parametrize("function", CALLS)
def test_duals_are_refused(function):
    q, k, v = triple()
    with fwAD.dual_level():
        with pytest.raises(NotImplementedError, match=FORWARD):
            function(q, fwAD.make_dual(k, k), v)
        assert torch.equal(function(q, k, v), function(q, k, v))  # which are none
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=FORWARD):
        retention(q.requires_grad_(), fwAD.make_dual(k, k), v)


@transforms
@pytest.mark.parametrize("function", CALLS)
def test_transforms_that_are_refused(function):
    q, k, v = triple()
    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.jvp(lambda q: function(q, k, v), (q,), (q,))
    o, tangent = torch.func.jvp(lambda x: function(q, k, v) * x.sum(), (k,), (k,))  # beside it
    assert torch.allclose(tangent, o)
    with pytest.raises(NotImplementedError, match=BATCH):
        torch.func.vmap(function)(q[None], k[None], v[None])


@transforms
def test_transforms_of_gradients_that_are_refused():
    q, k, v = triple((1, 4, 1, 2))

    def loss(q):
        return retention(q, k, v).square().sum()

    with pytest.raises(NotImplementedError, match=BATCH):
        torch.func.jacrev(lambda q: retention(q, k, v))(q)
    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.hessian(loss)(q)
    with pytest.raises(NotImplementedError, match="ouzel.torch.retention has no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)


@registers
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_transforms(backend):
    q, k, v = triple()

    def compiled(function):
        torch._dynamo.reset()
        return torch.compile(function, backend=backend)(q)

    def loss(q):
        return retention(q, k, v).square().sum()

    assert torch.equal(compiled(torch.func.grad(loss)), torch.func.grad(loss)(q))
    with pytest.raises(NotImplementedError, match=FORWARD):
        compiled(lambda q: torch.func.jvp(loss, (q,), (q,)))


@registers
def test_linearizations():
    q, k, v = triple()
    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.linearize(lambda q: retention(q, k, v), q)
    o, product = torch.func.linearize(lambda x: retention(q, k, v) * x.sum(), k)
    assert torch.allclose(product(k), o)


@transforms
def test_gradients():
    inputs = gated()

    def loss(*inputs):
        o, state = ouzel.torch.gated_delta_rule(*inputs[:5], initial_state=inputs[5],
                                                output_final_state=True)
        return o.square().mean() + state.sum()

    want = torch.autograd.grad(loss(*inputs), inputs)
    detached = [x.detach() for x in inputs]
    got = torch.func.grad(loss, argnums=tuple(range(6)))(*detached)
    assert all(map(torch.equal, got, want))
    value, pull_back = torch.func.vjp(loss, *detached)
    assert value == loss(*detached)
    assert all(map(torch.equal, pull_back(torch.tensor(1.0)), want))
    norm = ouzel.torch.RMSNorm(8)
    parameters = {n: p.detach() for n, p in norm.named_parameters()}
    gradient = torch.func.grad(
        lambda p: torch.func.functional_call(norm, p, (detached[0],)).square().sum()
    )(parameters)["weight"]
    want, = torch.autograd.grad(norm(detached[0]).square().sum(), norm.weight)
    assert torch.equal(gradient, want)


@transforms
def test_jacobians_row_by_row():
    q, k, v = triple((1, 4, 1, 2))
    got = torch.func.jacrev(lambda q: retention(q, k, v), chunk_size=1)(q)
    assert torch.equal(got, torch.autograd.functional.jacobian(lambda q: retention(q, k, v), q))


@registers
def test_traced_gradients():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = triple()
    gradient = torch.func.grad(lambda q: retention(q, k, v).square().sum())
    graph = make_fx(gradient)(q)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.ouzel.retention.default in targets
    assert torch.ops.ouzel.retention_vjp.default in targets
    assert torch.equal(graph(2 * q), gradient(2 * q))
