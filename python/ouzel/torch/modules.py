"""Modules on Ouzel's operators, with the names, parameters and defaults of flash-linear-attention's."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from ._functions import FUNCTIONS

_short_conv, _rms_norm = FUNCTIONS["short_conv"], FUNCTIONS["rms_norm"]


class ShortConvolution(nn.Module):
    """Depthwise causal convolution: y_t = act(bias + sum_j weight[:, 0, j] x_{t-W+1+j}).

    `weight` is [D, 1, W], `bias` [D] or None, initialised as those of torch.nn.Conv1d.
    """

    def __init__(
        self, hidden_size, kernel_size, bias=False, activation="silu", device=None, dtype=None
    ):
        super().__init__()
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"ShortConvolution: activation '{activation}' is not None, silu or swish")
        self.hidden_size, self.kernel_size, self.activation = hidden_size, kernel_size, activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.kernel_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self):
        return (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={self.bias is not None}, "
            f"activation={self.activation}"
        )

    def forward(
        self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None
    ):
        """(y, cache): y [B, T, D], and the last W inputs of each sequence [N, D, W], float32, or None
        without `output_final_state`. `mask` [B, T] is 0 where a token is padding; `residual` is added
        to y. One token without gradients updates a float32 cache in place, and returns it."""
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask and cu_seqlens exclude each other")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        operands = {
            "x": x,
            "weight": self.weight,
            "bias": self.bias,
            "initial_state": cache,
            "activation": "none" if self.activation is None else "silu",
            "cu_seqlens": cu_seqlens,
        }
        in_place = cache is not None and cache.dtype == torch.float32 and x.shape[1] == 1
        if in_place and not torch.is_grad_enabled():
            y, state = _short_conv.step(**operands), cache if output_final_state else None
        else:
            y, state = _short_conv(**operands, output_final_state=output_final_state)
        return (y if residual is None else y + residual), state


class _Norm(nn.Module):
    def __init__(self, hidden_size, elementwise_affine, bias, eps, device, dtype):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps

        def parameter(wanted):
            if not wanted:
                return None
            return nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

        self.weight = parameter(elementwise_affine)
        self.bias = parameter(elementwise_affine and bias)
        self.reset_parameters()

    def reset_parameters(self):
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self):
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"

    def normalize(self, x, residual, prenorm, residual_in_fp32, gate=None, **options):
        total = x.float() if residual_in_fp32 else x
        if residual is not None:
            total = total + residual
        # The operator's axes are B, T, H and D, of which T alone may be empty.
        plain = x.dim() <= 4 and x.numel() > 0
        shape = (1,) * (4 - x.dim()) + tuple(x.shape) if plain else (1, -1, 1, x.shape[-1])
        y = _rms_norm(
            total.reshape(shape),
            weight=self.weight,
            gate=None if gate is None else gate.reshape(shape),
            eps=self.eps,
            **options,
        )
        y = y.reshape(x.shape).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return (y, total) if prenorm else y


class RMSNorm(_Norm):
    """y = x (mean(x^2) + eps)^-1/2 weight + bias over the last axis."""

    def __init__(
        self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None
    ):
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        """Of x + residual, which is returned as well with `prenorm`."""
        return self.normalize(x, residual, prenorm, residual_in_fp32)


class FusedRMSNormGated(_Norm):
    """y = x (mean(x^2) + eps)^-1/2 weight act(g) over the last axis; act is swish or sigmoid."""

    def __init__(
        self,
        hidden_size,
        elementwise_affine=True,
        eps=1e-5,
        activation="swish",
        device=None,
        dtype=None,
    ):
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(
                f"FusedRMSNormGated: activation '{activation}' is not swish, silu or sigmoid"
            )
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        """Of x + residual, which is returned as well with `prenorm`, times the gate."""
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        return self.normalize(x, residual, prenorm, residual_in_fp32, g, activation=activation)


class FeatureMap(nn.Module):
    """A map of every row of q and k. `map(x)` forms the features [..., F];

        ouzel.torch.linear_attention(q, k, v, **map.operands())

    applies the map inside the operator, which forms none.
    """

    def operands(self):
        """What ouzel.torch.linear_attention takes to apply the map itself."""
        raise NotImplementedError


class ReLUFeatureMap(FeatureMap):
    """max(x, 0)."""

    def forward(self, x):
        return F.relu(x)

    def operands(self):
        return {"feature_map": "relu"}


class SquaredReLUFeatureMap(FeatureMap):
    """max(x, 0)^2."""

    def forward(self, x):
        return F.relu(x).square()

    def operands(self):
        return {"feature_map": "relu2"}


class HedgehogFeatureMap(FeatureMap):
    """softmax([y, -y]), y = 2 (W x + b), which begins as 2 x (arXiv:2402.04347)."""

    def __init__(self, head_dim):
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        y = 2 * self.layer(x)
        return torch.cat([y, -y], dim=-1).softmax(-1)

    def operands(self):
        return {"feature_map": "hedgehog", "W": self.layer.weight, "b": self.layer.bias}


class T2RFeatureMap(FeatureMap):
    """max(W x + b, 0), W [dot_dim, head_dim] (arXiv:2103.13076)."""

    def __init__(self, head_dim, dot_dim=None, bias=False):
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim if dot_dim is None else dot_dim, bias=bias)

    def forward(self, x):
        return F.relu(self.layer(x))

    def operands(self):
        return {"feature_map": "t2r", "W": self.layer.weight, "b": self.layer.bias}


class DPFPFeatureMap(FeatureMap):
    """r_i r_(i-j), j = 1 ... nu outer, r = [max(x, 0), max(-x, 0)] (arXiv:2102.11174)."""

    def __init__(self, head_dim, nu=4):
        super().__init__()
        self.head_dim, self.nu = head_dim, nu

    def forward(self, x):
        r = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
        return torch.cat([r * r.roll(j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)

    def operands(self):
        return {"feature_map": "dpfp", "nu": self.nu, "scale": 1.0}


class HadamardFeatureMap(FeatureMap):
    """(W1 x + b1) (W2 x + b2), number by number."""

    def __init__(self, head_dim):
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x):
        return self.layer1(x) * self.layer2(x)

    def operands(self):
        return {
            "feature_map": "elementwise_product",
            "W1": self.layer1.weight,
            "b1": self.layer1.bias,
            "W2": self.layer2.weight,
            "b2": self.layer2.bias,
        }


class TaylorFeatureMap(FeatureMap):
    """[1, x / K^1/4, x_i^2 / (2 K)^1/2, x_i x_j / K^1/2 (i < j)], so that q and k weigh
    1 + s + s^2 / 2, s = q.k / K^1/2 (arXiv:2402.18668)."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x):
        i, j = torch.triu_indices(self.head_dim, self.head_dim, 1)
        return torch.cat(
            [
                torch.ones_like(x[..., :1]),
                x / self.head_dim**0.25,
                x.square() / math.sqrt(2 * self.head_dim),
                x[..., i] * x[..., j] / math.sqrt(self.head_dim),
            ],
            dim=-1,
        )

    def operands(self):
        return {"feature_map": "taylor2", "variant": "symmetric"}
