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

OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 2e-5  # docs/numerics.md


def tensors(array, **options):
    return torch.tensor(np.array(array), **options)


def sample(shape, seed=0, dtype=torch.float32, grad=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(grad)


def triple(shape=(2, 37, 3, 8), **options):
    return [sample(shape, seed, **options) for seed in range(3)]


def gated(T=37, dtype=torch.float32):
    """q, k, v, g, beta and the initial state of a gated delta rule."""
    q, k, v = triple((2, T, 3, 8))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.nn.functional.logsigmoid(sample((2, T, 3), 3))
    beta = torch.sigmoid(sample((2, T, 3), 4))
    h = sample((2, 3, 8, 8), 5)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)] + [h.requires_grad_()]


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
    stateful = any(output.is_state for output in law.outputs)
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
        (k.double(), ouzel.InvalidArgumentError, r"retention: k is F64 .*; F32, BF16 or F16"),
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


def silu(x):
    return x * torch.sigmoid(x)


def same(module, plain, *inputs):
    """Outputs and gradients of a module and of the same in double."""
    inputs = [x.requires_grad_() for x in inputs]
    twins = [x.detach().double().requires_grad_() for x in inputs]
    parameters = dict(module.named_parameters())
    doubles = {n: p.detach().double().requires_grad_() for n, p in parameters.items()}
    got, want = module(*inputs), plain(doubles, *twins)
    got = got[0] if isinstance(got, tuple) else got
    upstream = torch.randn(want.shape, dtype=torch.float64)
    assert torch.allclose(got.double(), want, atol=1e-5, rtol=1e-5)
    have = torch.autograd.grad(got, [*inputs, *parameters.values()], upstream.float())
    need = torch.autograd.grad(want, [*twins, *doubles.values()], upstream)
    for x, y in zip(have, need):
        assert torch.allclose(x.double(), y, atol=1e-4, rtol=1e-4)


def randomized(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def rms(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 7, 16), (2, 7, 3, 16), (2, 2, 7, 3, 16)])
def test_norms(shape):
    x, g = sample(shape), sample(shape, 1)
    norm = randomized(ouzel.torch.RMSNorm(16, bias=True))
    same(norm, lambda p, x: rms(x, 1e-5) * p["weight"] + p["bias"], x)
    norm = ouzel.torch.RMSNorm(16, elementwise_affine=False, eps=0.1)
    same(norm, lambda p, x: rms(x, 0.1), x)
    norm = randomized(ouzel.torch.FusedRMSNormGated(16))
    same(norm, lambda p, x, g: rms(x, 1e-5) * p["weight"] * silu(g), x, g)
    norm = randomized(ouzel.torch.FusedRMSNormGated(16, activation="sigmoid"))
    same(norm, lambda p, x, g: rms(x, 1e-5) * p["weight"] * torch.sigmoid(g), x, g)


def test_residuals_of_norms():
    x, residual = sample((2, 7, 16), dtype=torch.bfloat16), sample((2, 7, 16), 1)
    norm = randomized(ouzel.torch.RMSNorm(16, dtype=torch.bfloat16))
    y, total = norm(x, residual, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16 and torch.equal(total, x.float() + residual)
    assert torch.equal(norm(x, residual), y)
    want = rms(total, 1e-5) * norm.weight.float()
    assert (y - want).norm() < 4e-3 * want.norm()
    with pytest.raises(ValueError, match="activation 'tanh' is not swish, silu or sigmoid"):
        ouzel.torch.FusedRMSNormGated(16, activation="tanh")


def test_short_convolution():
    def plain(p, x):
        padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
        y = torch.nn.functional.conv1d(padded, p["weight"], p.get("bias"), groups=5)
        return silu(y.transpose(1, 2))

    x = sample((2, 9, 5))
    same(ouzel.torch.ShortConvolution(5, 4), plain, x)
    conv = ouzel.torch.ShortConvolution(5, 4, bias=True)
    same(conv, plain, x)
    twin = torch.nn.Conv1d(5, 5, 4, groups=5)
    twin.load_state_dict(conv.state_dict())  # the same names and shapes

    with torch.no_grad():
        whole, cache = conv(x, output_final_state=True)
        assert cache.shape == (2, 5, 4) and conv(x)[1] is None
        _, cache = conv(x[:, :6], output_final_state=True)
        address = cache.data_ptr()
        for t in range(6, 9):
            y, cache = conv(x[:, t : t + 1], cache=cache, output_final_state=True)
            assert torch.allclose(y, whole[:, t : t + 1], atol=1e-6) and cache.data_ptr() == address
        half = cache.bfloat16()  # of another type: not updated in place
        _, new = conv(x[:, :1], cache=half, output_final_state=True)
        assert new.dtype == torch.float32 and torch.equal(half, cache.bfloat16())
    residual, mask = sample((2, 9, 5), 1), torch.ones(2, 9)
    mask[0, :2] = 0
    assert torch.equal(conv(x, residual, mask)[0], conv(x * mask[..., None])[0] + residual)
    packed = conv(x[:1], cu_seqlens=torch.tensor([0, 4, 9]))[0]
    assert torch.equal(packed[:, 4:], conv(x[:1, 4:])[0])
    with pytest.raises(ValueError, match="mask and cu_seqlens exclude each other"):
        conv(x[:1], mask=mask[:1], cu_seqlens=[0, 4, 9])


@pytest.mark.parametrize("make", [
    ouzel.torch.ReLUFeatureMap,
    ouzel.torch.SquaredReLUFeatureMap,
    lambda: ouzel.torch.HedgehogFeatureMap(8),
    lambda: ouzel.torch.T2RFeatureMap(8, 12, bias=True),
    lambda: ouzel.torch.T2RFeatureMap(8),
    lambda: ouzel.torch.DPFPFeatureMap(8),
    lambda: ouzel.torch.HadamardFeatureMap(8),
    lambda: ouzel.torch.TaylorFeatureMap(8),
])  # fmt: skip
def test_feature_maps_inside_the_operator_are_those_outside(make):
    torch.manual_seed(0)
    feature_map = make()
    q, k, v = triple(grad=True)
    o, state = ouzel.torch.linear_attention(q, k, v, **feature_map.operands(), output_final_state=True)
    want, end = ouzel.torch.linear_attention(feature_map(q), feature_map(k), v, scale=1.0,
                                             output_final_state=True)
    assert torch.allclose(o, want, atol=1e-4, rtol=1e-4)
    assert torch.allclose(state, end, atol=1e-4, rtol=1e-4)
    leaves = [q, k, v, *feature_map.parameters()]
    upstream = sample(o.shape, 3)
    for x, y in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (o, want))):
        assert torch.allclose(x, y, atol=1e-3, rtol=1e-3)


class Mixer(torch.nn.Module):
    """A layer of a gated delta rule as models have it, on Ouzel or in plain PyTorch."""

    def __init__(self, fast):
        super().__init__()
        self.fast = fast
        self.embed = torch.nn.Embedding(16, 32)
        self.conv = ouzel.torch.ShortConvolution(32, 4)
        self.qkv = torch.nn.Linear(32, 96, bias=False)
        self.gates = torch.nn.Linear(32, 4)
        self.gate = torch.nn.Linear(32, 32)
        self.norm = ouzel.torch.FusedRMSNormGated(16)
        self.out = torch.nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.fast:
            x = self.conv(x)[0]
        else:
            padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
            y = torch.nn.functional.conv1d(padded, self.conv.weight, groups=32)
            x = silu(y.transpose(1, 2))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
        g, beta = self.gates(x).chunk(2, dim=-1)
        g, beta = torch.nn.functional.logsigmoid(g), torch.sigmoid(beta)
        if self.fast:
            o, _ = ouzel.torch.gated_delta_rule(q, k, v, g, beta)
        else:
            state, rows = torch.zeros(len(q), 2, 16, 16), []
            for t in range(q.shape[1]):
                state = state * g[:, t, :, None, None].exp()
                read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
                write = beta[:, t, :, None] * (v[:, t] - read)
                state = state + k[:, t, ..., None] * write[..., None, :]
                rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / 4)
            o = torch.stack(rows, dim=1)
        gate = self.gate(x).unflatten(-1, (2, 16))
        if self.fast:
            o = self.norm(o, gate)
        else:
            o = rms(o, self.norm.eps) * self.norm.weight * silu(gate)
        return self.out(o.flatten(-2))


def test_training_is_that_of_plain_pytorch():
    losses = []
    for fast in (True, False):
        torch.manual_seed(0)
        model = Mixer(fast)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(16, (4, 33))
        losses.append([])
        for _ in range(20):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert np.allclose(*losses, atol=1e-4, rtol=0)
    assert losses[0][-1] < 0.8 * losses[0][0]


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
    with pytest.raises(RuntimeError, match="Batching rule not implemented for ouzel::retention"):
        torch.func.vmap(lambda *x: ouzel.torch.retention(*x)[0])(q[None], k[None], v[None])


PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_work_as_pasted(example):
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
