"""The operators as autograd functions, written from the library's table as those of `ouzel` are."""

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from .. import _core, _operators
from .._errors import InvalidArgumentError


class Operator:
    """A row of the table as its functions here need it."""

    def __init__(self, index, law):
        self.index = index
        self.law = law
        self.inputs = [tensor.name for tensor in law.inputs]
        self.gradients = [tensor.gradient for tensor in law.inputs]
        self.above = {output.name: output.gradient for output in law.outputs}
        self.upstream = [output.gradient for output in _operators.upstream(law)]
        self.packing = next(
            (i for i, a in enumerate(law.attributes) if a.name == "cu_seqlens"), None
        )


def _refuse(operator, name, what):
    raise InvalidArgumentError(f"{operator.law.name}: {name} {what}")


def _export(operator, name, tensor):
    """What the library reads the tensor through: its very memory."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{operator.law.name}: {name} is of type {type(tensor).__name__}; "
            "a torch.Tensor was expected"
        )
    if not tensor.is_cpu:
        _refuse(operator, name, f"lives on the device {tensor.device}; move it to the CPU first")
    try:
        return to_dlpack(tensor.resolve_neg() if tensor.is_neg() else tensor)
    except Exception as error:
        raise InvalidArgumentError(
            f"{operator.law.name}: {name} (layout {tensor.layout}, {tensor.dtype}) has no plain "
            "memory; a dense tensor was expected"
        ) from error


def _compute(operator, tensors, attributes, states, context):
    """The outputs by name."""
    arrays = tuple([_export(operator, *named) for named in zip(operator.inputs, tensors)])
    results = _core.outputs(operator.index, arrays, attributes, states, context)
    return {n: None if r is None else from_dlpack(r) for n, r in results.items()}


class _Differentiable(torch.autograd.Function):
    """An operator with its backward pass."""

    @staticmethod
    def forward(ctx, operator, attributes, states, context, *tensors):
        results = _compute(operator, tensors, attributes, states, context)
        ctx.call = operator, attributes, context
        ctx.above = [operator.above[name] for name in results]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(r for n, r in results.items() if r is not None and not operator.above[n])
        )
        return tuple(results.values())

    @staticmethod
    def backward(ctx, *above):
        operator, attributes, context = ctx.call
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        given = dict(zip(ctx.above, above))
        arrays = [_export(operator, *named) for named in zip(operator.inputs, tensors)]
        arrays += [_export(operator, name, given.get(name)) for name in operator.upstream]
        results = _core.vjp(operator.index, tuple(arrays), attributes, context, wanted)
        gradients = [from_dlpack(results[n]) if w else None for n, w in zip(operator.gradients, wanted)]
        if torch.is_grad_enabled():
            gradients = _Once.apply(operator, len(gradients), *gradients, *tensors, *above)
        return None, None, None, None, *gradients


class _Once(torch.autograd.Function):
    """Passes gradients on as functions of what they were computed from, without a derivative."""

    @staticmethod
    def forward(ctx, operator, count, *tensors):
        ctx.operator = operator
        return tensors[:count]

    @staticmethod
    def backward(ctx, *above):
        raise NotImplementedError(
            f"ouzel.torch.{ctx.operator.law.name} has no second derivative: differentiate it once, "
            "without create_graph=True where its gradients are to be differentiated again"
        )


def _call(operator, tensors, attributes, states, context):
    if operator.packing is not None and isinstance(attributes[operator.packing], torch.Tensor):
        attributes = list(attributes)
        attributes[operator.packing] = attributes[operator.packing].tolist()
        attributes = tuple(attributes)
    if torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in tensors]):
        for name, gradient, x in zip(operator.inputs, operator.gradients, tensors):
            if not gradient and isinstance(x, torch.Tensor) and x.requires_grad:
                _refuse(operator, name, "has no gradient: pass it detached")
        results = _Differentiable.apply(operator, attributes, states, context, *tensors)
    else:
        results = tuple(_compute(operator, tensors, attributes, states, context).values())
    return results if len(results) > 1 else results[0]


def functions():
    """All functions, by names and aliases."""
    made = {}
    for index, law in enumerate(_operators.laws().values()):
        if not any(tensor.gradient for tensor in law.inputs):
            continue
        space = {"_call": _call, "_operator": Operator(index, law), "__name__": "ouzel.torch"}
        body = f"_call(_operator, {_operators.arguments(law)}, context)"
        function = _operators.define(law, False, body, space)
        for name in (law.name, *law.aliases):
            made[name] = function
    return made
