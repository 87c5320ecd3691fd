"""What layers and models import from fla.modules: modules of ouzel.torch with the published parameters,
and the activations between them."""

import torch.nn.functional as F

from .. import torch as ops
from ..torch import FusedRMSNormGated, RMSNorm

__all__ = [
    "FusedRMSNormGated",
    "RMSNorm",
    "ShortConvolution",
    "causal_conv1d",
    "swiglu",
    "swiglu_linear",
    "swish",
]


def swish(x):
    return F.silu(x)


def swiglu(x, y):
    return F.silu(x) * y


def swiglu_linear(x, y, weight, bias):
    return F.linear(F.silu(x) * y, weight, bias)


def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
                  activation=None, backend="triton", cu_seqlens=None, cu_seqlens_cpu=None,
                  chunk_indices=None, cp_context=None, **kwargs):
    """Depthwise causal convolution of x [B, T, D] with weight [D, W]: (y, the last W inputs or None)."""
    if cp_context is not None:
        raise NotImplementedError("causal_conv1d: cp_context: context parallelism is for several GPUs")
    y, state = ops.short_conv(x, weight, bias, initial_state, output_final_state, cu_seqlens=cu_seqlens,
                              activation="none" if activation is None else "silu")
    return (y if residual is None else y + residual), state


class ShortConvolution(ops.ShortConvolution):
    """ouzel.torch.ShortConvolution. What chooses a GPU's kernels has no effect."""

    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", backend="triton",
                 device=None, dtype=None, **kwargs):
        super().__init__(hidden_size, kernel_size, bias, activation, device, dtype)
        self.backend = backend

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None,
                chunk_indices=None, **kwargs):
        return super().forward(x, residual, mask, cache, output_final_state, cu_seqlens)
