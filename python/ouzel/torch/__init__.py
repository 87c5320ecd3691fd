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
"""

from ._functions import functions as _make

_functions = _make()
globals().update(_functions)

__all__ = [*_functions]
