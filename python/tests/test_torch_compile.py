"""ouzel.torch under torch.compile, torch.export and PyTorch's modes."""

import pytest

torch = pytest.importorskip("torch")

import ouzel.torch  # noqa: E402
from torch_samples import gated, triple  # noqa: E402

registers = pytest.mark.skipif(
    not hasattr(torch.library, "register_autograd"), reason="this PyTorch registers no gradients"
)


def loss(q, k, v, g, beta, h):
    o, state = ouzel.torch.gated_delta_rule(q * 2, k, v, g, beta, initial_state=h,
                                            output_final_state=True)
    return o.square().mean() + state.sum(), state


@registers
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_are_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (37, 40, 64):  # one graph for all lengths
            inputs = gated(T)
            got, want = compiled(*inputs), loss(*inputs)
            assert all(map(torch.equal, got, want))
            gradients = [torch.autograd.grad(x[0], inputs) for x in (got, want)]
            assert all(map(torch.equal, *gradients))
    inputs = [x.detach() for x in gated()]
    with torch.no_grad():
        assert all(map(torch.equal, compiled(*inputs), loss(*inputs)))


@registers
def test_compiled_calls_return_the_same():
    def compiled(function, *arrays):
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)(*arrays)

    q, k, v = triple((1, 9, 2, 4))
    for options in (
        {},
        {"output_final_state": True},
        {"form": "parallel"},
        {"cu_seqlens": [0, 4, 9], "output_final_state": True},
        {"cu_seqlens": torch.tensor([0, 4, 9]), "scale": 0.5, "reverse": True},
    ):
        def call(q, k, v):
            return ouzel.torch.retention(q, k, v, **options)

        for got, want in zip(compiled(call, q, k, v), call(q, k, v), strict=True):
            assert got is want is None or torch.equal(got, want)

    def normalized(q, k, v):
        return ouzel.torch.linear_attention(q, k, v, feature_map="taylor2", normalize=True,
                                            output_final_state=True)

    assert all(map(torch.equal, compiled(normalized, q, k, v), normalized(q, k, v)))
    o = compiled(ouzel.torch.softmax_attention, q, k, v)
    assert torch.equal(o, ouzel.torch.softmax_attention(q, k, v))
    with pytest.raises(Exception, match="F32, BF16 or F16"):
        compiled(ouzel.torch.softmax_attention, q, k.double(), v)
    context = ouzel.Context(threads=1)  # which no graph can hold
    around = torch.compile(lambda *x: ouzel.torch.retention(*x, context=context)[0], backend="eager")
    assert torch.equal(around(q, k, v), ouzel.torch.retention(q, k, v)[0])


@registers
def test_compiled_steps_update_states():
    def step(q, k, v, state):
        return ouzel.torch.retention.step(q, k, v, initial_state=state)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    q, k, v = triple((2, 1, 3, 8))
    states = [torch.ones(2, 3, 8, 8), torch.ones(2, 3, 8, 8)]
    for _ in range(2):
        assert torch.allclose(compiled(q, k, v, states[0]), step(q, k, v, states[1]), atol=1e-6)
    assert torch.allclose(*states, atol=1e-6) and not torch.equal(states[0], torch.ones(2, 3, 8, 8))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="initial_state"):
        torch.compile(lambda *x: ouzel.torch.retention.step(*x), backend="eager")(q, k, v)


@registers
def test_exported_programs_take_other_lengths():
    class Packed(torch.nn.Module):
        def forward(self, q, k, v, bounds):
            return ouzel.torch.retention(q, k, v, cu_seqlens=bounds, output_final_state=True)

    T, N = torch.export.Dim("T", min=2, max=4096), torch.export.Dim("N", min=3, max=64)
    arrays = triple((1, 9, 2, 4))
    bounds = torch.tensor([0, 4, 4, 9])
    program = torch.export.export(Packed(), (*arrays, bounds), dynamic_shapes=({1: T},) * 3 + ({0: N},))
    nodes = [n for n in program.graph.nodes if n.target == torch.ops.ouzel.retention.default]
    assert len(nodes) == 1
    longer, bounds = triple((1, 19, 2, 4)), torch.tensor([0, 4, 4, 9, 19])
    got = program.module()(*longer, bounds)
    want = ouzel.torch.retention(*longer, cu_seqlens=bounds, output_final_state=True)
    assert all(map(torch.equal, got, want))


@registers
@pytest.mark.parametrize("name", ["retention", "gated_delta_rule"])
def test_registrations_by_the_rules_of_torch(name):
    operator = getattr(torch.ops.ouzel, name).default
    inputs = gated() if name == "gated_delta_rule" else [*triple(grad=True), None, None]
    attributes = [None] * (len(operator._schema.arguments) - len(inputs) - 1)
    torch.library.opcheck(operator, (*inputs, *attributes, True))


@registers
def test_modes_and_tracers_see_the_call():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = triple()
    graph = make_fx(lambda *x: ouzel.torch.retention(*x)[0])(q, k, v)
    assert torch.equal(graph(v, q, k), ouzel.torch.retention(v, q, k)[0])
    with FakeTensorMode():
        x = torch.empty(1, 5, 2, 4, dtype=torch.bfloat16)
        o, state = ouzel.torch.retention(x, x, x, output_final_state=True)
    assert o.shape == x.shape and o.dtype == x.dtype
    assert state.shape == (1, 2, 4, 4) and state.dtype == torch.float32
