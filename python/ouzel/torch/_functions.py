"""The operators as autograd functions, written from the library's table as those of `ouzel` are."""

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.utils.dlpack import from_dlpack, to_dlpack

from .. import _core, _operators
from .._errors import InvalidArgumentError


class Operator:
    """A row of the table as its function here needs it."""

    def __init__(self, index, law):
        self.index = index
        self.law = law
        self.inputs = [tensor.name for tensor in law.inputs]
        self.gradients = [tensor.gradient for tensor in law.inputs]
        self.above = {output.name: output.gradient for output in law.outputs}
        self.upstream = [output.gradient for output in _operators.upstream(law)]
        self.attributes = [attribute.name for attribute in law.attributes]
        self.packing = self.attributes.index("cu_seqlens") if "cu_seqlens" in self.attributes else None
        conditions = " ".join([output.when for output in law.outputs]).split()
        deciding = {condition.partition("=")[0].rstrip("!") for condition in conditions}
        self.deciding = [i for i, name in enumerate(self.attributes) if name in deciding]
        self.returned = {}  # gradients from above of what a call returns, by those attributes
        self.registered = None  # what compilers see

    def differentiates(self, tensor, attributes):
        """Whether the input has a gradient in calls with these attributes."""
        values = dict(zip(self.attributes, attributes))
        return tensor.gradient and _operators.holds(tensor.gradient_when, self.law, values)

    def refuse(self, name, what):
        raise InvalidArgumentError(f"{self.law.name}: {name} {what}")


def export(operator, name, tensor):
    """What the library reads the tensor through: its very memory."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{operator.law.name}: {name} is of type {type(tensor).__name__}; "
            "a torch.Tensor was expected"
        )
    if not tensor.is_cpu:
        operator.refuse(name, f"lives on the device {tensor.device}; move it to the CPU first")
    try:
        return to_dlpack(tensor.resolve_neg() if tensor.is_neg() else tensor)
    except Exception as error:
        raise InvalidArgumentError(
            f"{operator.law.name}: {name} ({tensor.layout}, {tensor.dtype}) has no memory that can be "
            "read; a dense tensor was expected"
        ) from error


def compute(operator, tensors, attributes, states, context, saved=None):
    """The outputs by name. What spares the backward pass work is put into `saved`."""
    arrays = tuple([export(operator, *named) for named in zip(operator.inputs, tensors)])
    attributes = numbered(operator, attributes)
    results = _core.outputs(operator.index, arrays, attributes, states, context, saved)
    return {n: None if r is None else from_dlpack(r) for n, r in results.items()}


def pull_back(operator, tensors, above, attributes, context, wanted, saved=None):
    """The gradients of the inputs, in order, None where they are not wanted."""
    arrays = [export(operator, *named) for named in zip(operator.inputs, tensors)]
    arrays += [export(operator, *named) for named in zip(operator.upstream, above)]
    attributes = numbered(operator, attributes)
    results = _core.vjp(operator.index, tuple(arrays), attributes, context, wanted, saved)
    return [from_dlpack(results[n]) if w else None for n, w in zip(operator.gradients, wanted)]


class _Function(torch.autograd.Function):
    """A function that `compute`s, and `keep`s what its backward pass needs, without other derivatives."""

    @classmethod
    def of(cls, operator, *inputs):
        return (cls.transformed if _any_transform() else cls).apply(operator, *inputs)

    def __init_subclass__(cls):
        if "compute" not in vars(cls):
            return

        def forward(ctx, *inputs):
            results = cls.compute(*inputs)
            cls.keep(ctx, inputs, results)
            return results

        # The form that PyTorch 1.13 knows, and that newer ones call in less time.
        cls.forward = staticmethod(forward)
        # The form that torch.func takes.
        members = {"forward": staticmethod(cls.compute), "setup_context": staticmethod(cls.keep)}
        cls.transformed = type(cls.__name__, (cls,), members)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode(ctx.operator)

    @staticmethod
    def vmap(info, in_dims, operator, *inputs):
        refuse_batching(operator)


class Differentiable(_Function):
    """An operator with its backward pass."""

    @staticmethod
    def compute(operator, attributes, states, context, saved, *tensors):
        if operator.registered is not None and _is_traced(tensors):
            return _call_registered(operator, tensors, attributes, states, context)
        return tuple(compute(operator, tensors, attributes, states, context, saved).values())

    @staticmethod
    def keep(ctx, inputs, results):
        operator, attributes, _, context, saved, *tensors = inputs
        ctx.operator, ctx.rest, ctx.saved = operator, (attributes, context), saved
        ctx.above = gradients_above(operator, attributes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(r for r, above in zip(results, ctx.above) if r is not None and not above)
        )

    @staticmethod
    def backward(ctx, *results):
        tensors, above = ctx.saved_tensors, dict(zip(ctx.above, results))
        upstream = [above.get(name) for name in ctx.operator.upstream]
        wanted = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled() or _any_transform():
            gradients = _Once.of(ctx.operator, *ctx.rest, wanted, *tensors, *upstream)
        else:
            # Freed with the tensors; a graph that is retained goes on without.
            saved, ctx.saved = ctx.saved, None
            gradients = pull_back(ctx.operator, tensors, upstream, *ctx.rest, wanted, saved)
        return None, None, None, None, None, *gradients


class _Once(_Function):
    """The backward pass as a function of what it computes from, without a derivative."""

    @staticmethod
    def compute(operator, attributes, context, wanted, *tensors):
        if operator.registered is not None and _is_traced(tensors):
            gradients = iter(operator.registered.call_vjp(*tensors, *attributes, list(wanted)))
            return tuple(next(gradients) if w else None for w in wanted)
        count = len(operator.inputs)
        return tuple(
            pull_back(operator, tensors[:count], tensors[count:], attributes, context, wanted)
        )

    @staticmethod
    def keep(ctx, inputs, gradients):
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx, *above):
        raise NotImplementedError(
            f"ouzel.torch.{ctx.operator.law.name} has no second derivative: differentiate it once, "
            "without create_graph=True where its gradients are to be differentiated again"
        )


def refuse_forward_mode(operator):
    raise NotImplementedError(
        f"ouzel.torch.{operator.law.name} has no forward-mode derivative: differentiate it backward, as "
        "torch.func.vjp, torch.func.grad and backward() do"
    )


def refuse_batching(operator):
    raise NotImplementedError(
        f"ouzel.torch.{operator.law.name} has no rule for torch.func.vmap, which jacobians use too: give "
        "it the batch as the first axis of its tensors, or take jacobians with chunk_size=1"
    )


def any_tangent(tensors):
    """Whether a forward-mode derivative is asked for."""
    return _forward_ad._current_level >= 0 and any(
        [isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None for x in tensors]
    )


def given(operator, attributes, states):
    """The names of the outputs that a call has."""
    values = dict(zip(operator.attributes, attributes))
    return [
        output.name
        for output in operator.law.outputs
        if _operators.holds(output.when, operator.law, values) and (states or not output.is_state)
    ]


def returned(operator, attributes):
    """The names of what a call returns: a state that it does not have is None."""
    names = given(operator, attributes, True)
    state = next((o.name for o in operator.law.outputs if o.is_state), None)
    return [o.name for o in operator.law.outputs if o.name in names or o.name == state]


def gradients_above(operator, attributes):
    """The names of the gradients from above of what a call returns."""
    key = tuple([attributes[i] for i in operator.deciding])
    if key not in operator.returned:
        operator.returned[key] = [operator.above[name] for name in returned(operator, attributes)]
    return operator.returned[key]


def _call_registered(operator, tensors, attributes, states, context):
    """The call as one node of a graph."""
    if context is not None:
        raise InvalidArgumentError(
            f"{operator.law.name}: a compiled graph computes in the context that all calls share; "
            "leave context= out"
        )
    i = operator.packing
    if i is not None and attributes[i] is not None and not isinstance(attributes[i], torch.Tensor):
        attributes = (*attributes[:i], torch.tensor(attributes[i]), *attributes[i + 1 :])
    results = operator.registered.call(*tensors, *attributes, states)
    named = dict(zip(given(operator, attributes, states), results))
    return tuple(named.get(name) for name in returned(operator, attributes))


def numbered(operator, attributes):
    """With the bounds of sequences as numbers, should they be a tensor."""
    i = operator.packing
    if i is None or not isinstance(attributes[i], torch.Tensor):
        return attributes
    return (*attributes[:i], attributes[i].tolist(), *attributes[i + 1 :])


def _any_gradient(tensors):
    if not torch.is_grad_enabled():
        return False
    return any([isinstance(x, torch.Tensor) and x.requires_grad for x in tensors])


def call(operator, tensors, attributes, states, context):
    with_gradients = _any_gradient(tensors)
    if with_gradients:
        for info, x in zip(operator.law.inputs, tensors):
            asks = isinstance(x, torch.Tensor) and x.requires_grad
            if asks and not operator.differentiates(info, attributes):
                operator.refuse(info.name, "has no gradient: pass it detached")
    if any_tangent(tensors):
        refuse_forward_mode(operator)
    # The question for a compiler stands in the frame that answers it: a frame that only asks would be
    # compiled by itself, to a yes.
    if operator.registered is not None and (torch.compiler.is_compiling() or _is_traced(tensors)):
        results = _call_registered(operator, tensors, attributes, states, context)
        return results if len(results) > 1 else results[0]
    attributes = numbered(operator, attributes)
    if with_gradients or _any_transform():
        results = Differentiable.of(operator, attributes, states, context, _core.Saved(), *tensors)
    else:
        results = tuple(compute(operator, tensors, attributes, states, context).values())
    return results if len(results) > 1 else results[0]


def step(operator, tensors, attributes, context):
    """The first output; the states among the tensors are updated."""
    if _any_gradient(tensors):
        raise InvalidArgumentError(
            f"{operator.law.name}: a step keeps nothing for a backward pass; call it under "
            "torch.no_grad(), or the operator itself with output_final_state=True"
        )
    if any_tangent(tensors):
        refuse_forward_mode(operator)
    states = {info.name: x for info, x in zip(operator.law.inputs, tensors) if info.is_state}
    if operator.registered is not None and (torch.compiler.is_compiling() or _is_traced(tensors)):
        results = _call_registered(operator, tensors, attributes, True, context)
        for (name, state), result in zip(states.items(), results[1:]):
            if state is None:
                operator.refuse(name, "is missing: a step updates it in place")
            state.copy_(result)
        return results[0]
    for name, state in states.items():
        if isinstance(state, torch.Tensor) and state.is_neg():
            operator.refuse(name, "is a view of negatives, which a step cannot update: clone it")
    arrays = tuple([export(operator, *named) for named in zip(operator.inputs, tensors)])
    result = _core.step(operator.index, arrays, numbered(operator, attributes), context)
    for state in states.values():
        if state is not None:
            _mark_changed(state)
    return from_dlpack(result)


# So that a backward pass that has saved the tensor notices.
_mark_changed = getattr(torch.autograd.graph, "increment_version", lambda x: x[:0].zero_())
# What registers a gradient came with PyTorch 2.4.
_CAN_REGISTER = hasattr(torch.library, "register_autograd")
_PLAIN = {type(None), torch.Tensor, torch.nn.Parameter}
# Not of the public interface: where they are gone, only tensors tell.
_count_modes = getattr(torch._C, "_len_torch_dispatch_stack", int)
_any_transform = getattr(torch._C, "_are_functorch_transforms_active", bool)


def _is_traced(tensors):
    """Whether PyTorch must see the call: for a mode, a transform, or a tensor of another kind."""
    return (
        _count_modes() > 0
        or _any_transform()
        or any([type(x) not in _PLAIN and isinstance(x, torch.Tensor) for x in tensors])
    )


def _functions():
    """All functions, by names and aliases."""
    made = {}
    for index, law in enumerate(_operators.laws().values()):
        if not any(tensor.gradient for tensor in law.inputs):
            continue
        operator = Operator(index, law)
        if _CAN_REGISTER:
            from . import _library

            operator.registered = _library.Registered(operator)
        space = {"_call": call, "_step": step, "_operator": operator, "__name__": "ouzel.torch"}

        def defined(kind):
            return _operators.define(
                law, kind, f"_{kind}(_operator, {_operators.arguments(law, kind)})", space
            )

        function = defined(_operators.CALL)
        if _operators.keeps_state(law):
            function.step = defined(_operators.STEP)
        for name in (law.name, *law.aliases):
            made[name] = function
    return made


FUNCTIONS = _functions()
