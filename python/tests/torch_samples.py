"""Random tensors for the tests of ouzel.torch."""

import torch


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
