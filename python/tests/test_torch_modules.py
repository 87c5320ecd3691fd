"""ouzel.torch: modules against plain PyTorch, and a model that learns with them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ouzel.torch  # noqa: E402
from torch_samples import sample, triple  # noqa: E402


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


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8),
                                   (2, 0, 1, 3, 8)])  # fmt: skip
def test_norms_of_no_tokens(shape):
    x = torch.zeros(shape, requires_grad=True)
    norm = ouzel.torch.RMSNorm(8)
    y = norm(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and not norm.weight.grad.any()
    assert ouzel.torch.FusedRMSNormGated(8)(x, x).shape == x.shape


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
    y, cache = conv(x[:, :0], output_final_state=True)
    assert y.shape == (2, 0, 5) and not cache.any()
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
