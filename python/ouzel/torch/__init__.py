"""Ouzel for PyTorch on CPUs: every operator with a backward as a function of tensors, with autograd.

A function has the name, parameters and defaults of its relative in `ouzel`, and returns the same:

    import torch, ouzel.torch

    q, k, v = (torch.randn(1, 512, 4, 64, requires_grad=True) for _ in range(3))
    o, state = ouzel.torch.retention(q, k, v, output_final_state=True)
    o.sum().backward()

Tensors are float32, bfloat16 or float16 on the CPU, of any strides (a last axis that is not contiguous
is copied); the first result has the type of the first tensor, states are float32. Every input of the
table that has a gradient gets one, initial states and gates too, and final states take gradients.
Second derivatives are refused. `context=` is the ouzel.Context that computes, forward and backward.

To decode, `retention.step(q, k, v, initial_state=state)` takes one token and updates the state in
place, without gradients. torch.compile and torch.export see an operator as one node, ouzel::retention,
with PyTorch 2.4 or newer. Modules have the names of flash-linear-attention's.
"""

from .._extras import require

require(__name__, "torch")

from ._functions import FUNCTIONS  # noqa: E402
from .modules import (  # noqa: E402
    DPFPFeatureMap,
    FeatureMap,
    FusedRMSNormGated,
    HadamardFeatureMap,
    HedgehogFeatureMap,
    ReLUFeatureMap,
    RMSNorm,
    ShortConvolution,
    SquaredReLUFeatureMap,
    T2RFeatureMap,
    TaylorFeatureMap,
)

globals().update(FUNCTIONS)

__all__ = [
    "DPFPFeatureMap",
    "FeatureMap",
    "FusedRMSNormGated",
    "HadamardFeatureMap",
    "HedgehogFeatureMap",
    "RMSNorm",
    "ReLUFeatureMap",
    "ShortConvolution",
    "SquaredReLUFeatureMap",
    "T2RFeatureMap",
    "TaylorFeatureMap",
    *FUNCTIONS,
]
