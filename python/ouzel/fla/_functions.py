"""The published functions, made from the table: what all have in common is resolved here.

Arguments that only tell a GPU how to compute change nothing; those that change results without a
counterpart are refused; layouts, sigmoids and raw gates are turned into what the laws take.
"""

import warnings

import torch

from . import _laws
from ._table import ALIASES, HELPERS, REPLACED, ROWS

_WITHOUT_EFFECT = (
    "checkpoint_level",
    "chunk_indices",
    "cu_seqlens_cpu",
    "disable_recompute",
    "max_num_seqs",
    "solve_tril_precision",
    "use_graph",
)

_REFUSED = {
    "cp_context": "context parallelism is for several GPUs; pass the whole sequence",
    "return_intermediate_states": "the states between chunks are not kept; call it piece by piece with "
    "output_final_state=True",
}


def _absorb(name, row, given, more):
    """Takes the arguments that the published function reads from **kwargs."""
    if "head_first" in more:
        raise DeprecationWarning("head_first has been removed: inputs are [B, T, H, ...]")
    if "transpose_state_layout" in more and "state_v_first" in given:
        if given["state_v_first"]:
            raise ValueError("pass `state_v_first` alone: `transpose_state_layout` is its old name")
        warnings.warn("`transpose_state_layout` is now called `state_v_first`", DeprecationWarning, 4)
        given["state_v_first"] = more.pop("transpose_state_layout")
    size = more.pop("chunk_size", None)
    if size is not None and (size <= 0 or size & (size - 1)):
        raise ValueError(f"{name}: `chunk_size` must be a power of 2, {size} was found")
    for extra, value in more.items():
        if extra not in row.extras:
            raise TypeError(f"{name}() got an unexpected keyword argument '{extra}'")
        given[extra] = value


def _resolve_beta(name, given):
    logits, double = (given.pop(n, False) for n in ("use_beta_sigmoid_in_kernel", "allow_neg_eigval"))
    if double and not logits:
        raise ValueError(f"{name}: `allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`")
    if logits and given["beta"] is None:
        raise ValueError(f"{name}: `use_beta_sigmoid_in_kernel=True` requires `beta`, the logits")
    if logits:
        given["beta"] = torch.sigmoid(given["beta"].float()) * (2 if double else 1)


def _resolve_gate(name, given):
    use, safe = (given.pop(n, False) for n in ("use_gate_in_kernel", "safe_gate"))
    A_log, dt_bias, bound = (given.pop(n, None) for n in ("A_log", "dt_bias", "lower_bound"))
    if not use:
        return
    if safe and bound is None:
        raise ValueError(f"{name}: `safe_gate=True` with `use_gate_in_kernel=True` requires `lower_bound`")
    if safe and not -5 <= bound < 0:
        raise ValueError(f"{name}: `lower_bound` must lie in [-5, 0), {bound} was found")
    if given["g"] is None:
        raise ValueError(f"{name}: `use_gate_in_kernel=True` requires `g`, the raw gate")
    given["g"] = _laws.gate(given["g"], A_log, dt_bias, bound, heads=2)


def _turned(state):
    """K x V as V x K, or back; of a tuple, its first. A view: states that come back need no copy."""
    if state is None:
        return None
    if isinstance(state, (tuple, list)):
        return (_turned(state[0]), *state[1:])
    return state.transpose(-1, -2)


def _call(name, row, given):
    more = given.pop("kwargs", None)
    if more:
        _absorb(name, row, given, dict(more))
    for argument, why in _REFUSED.items():
        if given.pop(argument, None):
            raise NotImplementedError(f"{name}: {argument}: {why}")
    for argument in _WITHOUT_EFFECT:
        given.pop(argument, None)
    _resolve_beta(name, given)
    _resolve_gate(name, given)
    if "use_qk_l2norm_in_kernel" in given:
        given["use_qk_l2norm"] = given.pop("use_qk_l2norm_in_kernel")
    if not any([given.pop(n, False) for n in ("state_v_first", "transpose_state_layout")]):
        return row.law(**given)
    o, state, *rest = row.law(**given | {"initial_state": _turned(given["initial_state"])})
    return o, _turned(state), *rest


def _made(row):
    name = row.prototype.split("(")[0]
    space = {"_call": _call, "_row": row, "__name__": "ouzel.fla"}
    body = f"def {row.prototype}:\n    return _call({name!r}, _row, locals())\n"
    exec(compile(body, f"<ouzel.fla.{name}>", "exec"), space)
    function = space[name]
    function.__doc__ = (
        f"fla.ops.{row.module}.{name} on the CPU, with gradients: its arguments, shapes and results.\n\n"
        "What has no effect here and what is refused is in docs/fla.md."
    )
    return name, function


def _replaced(name, successor):
    def function(**kwargs):
        raise NotImplementedError(f"{name} is deprecated: call {successor}, which computes the same")

    function.__name__ = function.__qualname__ = name
    return function


def functions():
    """All functions by names, with the modules below fla.ops that publish them."""
    made = dict(HELPERS)
    for row in ROWS:
        name, function = _made(row)
        made[name] = row.module, function
    for name, (module, successor) in REPLACED.items():
        made[name] = module, _replaced(name, successor)
    for alias, name in ALIASES.items():
        made[alias] = made[name]
    return made
