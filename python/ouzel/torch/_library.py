"""The operators in torch.library, so that torch.compile and torch.export see each as one node.

ouzel::NAME takes the tensors, the attributes and whether states are wanted, and returns the outputs
that there are; ouzel::NAME_vjp takes the gradients from above too, and returns those that are wanted.
"""

import torch

from .. import _core, _operators
from . import _functions

# Optional everywhere: None is the default of the library's table.
_TYPES = {"bool": "bool?", "int": "int?", "float": "float?", "str": "str?"}

_library = torch.library.Library("ouzel", "DEF")
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def _fake(operator, tensors, attributes, states):
    """What the call returns, without values: from the library, whose extents are numbers, with those
    that torch has as symbols put back in their places."""
    law, symbols = operator.law, {}

    def number(extent):
        return extent if isinstance(extent, int) else extent.node.hint or 2

    given = []
    for info, tensor in zip(law.inputs, tensors):
        if tensor is None:
            given.append(None)
            continue
        given.append((str(tensor.dtype).removeprefix("torch."), [*map(number, tensor.shape)]))
        for letters in info.shape.split("|"):
            if len(letters.split()) == tensor.dim():
                for letter, extent in zip(letters.split(), tensor.shape):
                    symbols.setdefault(letter, extent)
                break
    symbols.setdefault("N", symbols.get("B"))
    i = operator.packing
    if i is not None and attributes[i] is not None:
        symbols["N"] = attributes[i].shape[0] - 1
        bounds = [0] * number(symbols["N"]) + [number(symbols["T" if "T" in symbols else "TQ"])]
        attributes = (*attributes[:i], bounds, *attributes[i + 1 :])

    shapes = {output.name: output.shape.split("|")[0].split() for output in law.outputs}
    kept = {output.name for output in law.outputs if states or not output.is_state}
    return [
        tensors[0].new_empty(
            [
                symbols[letter] if not isinstance(symbols.get(letter, 0), int) else extent
                for letter, extent in zip(shapes[name], shape)
            ],
            dtype=getattr(torch, dtype),
        )
        for name, dtype, shape in _core.infer(operator.index, tuple(given), tuple(attributes))
        if name in kept
    ]


class Registered:
    """Both operators of a row of the table."""

    def __init__(self, operator):
        law = operator.law
        tensors = [
            f"Tensor{'' if _operators.needed(tensor) else '?'} {tensor.name}" for tensor in law.inputs
        ]
        attributes = [
            f"{'Tensor?' if a.name == 'cu_seqlens' else _TYPES[a.kind]} {a.name}" for a in law.attributes
        ]
        above = [f"Tensor? {name}" for name in operator.upstream]
        forward = ", ".join([*tensors, *attributes, "bool output_final_state"])
        backward = ", ".join([*tensors, *above, *attributes, "bool[] wanted"])
        self.operator = operator
        self.inputs = len(tensors)
        self.above = self.inputs + len(above)
        for name, arguments, body, fake in (
            (law.name, forward, self.forward, self.fake),
            (f"{law.name}_vjp", backward, self.vjp, self.fake_vjp),
        ):
            _library.define(f"{name}({arguments}) -> Tensor[]")
            _library.impl(name, body, "CPU")
            torch.library.register_fake(f"ouzel::{name}", fake, lib=_library)
        # What torch.func meets first.
        _library.impl(law.name, self.transform, "FuncTorchDynamicLayerFrontMode")
        torch.library.register_autograd(
            f"ouzel::{law.name}", self.backward, setup_context=self.setup_context, lib=_library
        )
        self.call = getattr(torch.ops.ouzel, law.name).default
        self.call_vjp = getattr(torch.ops.ouzel, f"{law.name}_vjp").default

    def forward(self, *arguments):
        tensors, (*attributes, states) = arguments[: self.inputs], arguments[self.inputs :]
        # Under a tracer this key is excluded, and tensors cannot be asked.
        asks = not _is_excluded(torch._C.DispatchKey.ADInplaceOrView)
        if asks and _functions.any_tangent(tensors):
            _functions.refuse_forward_mode(self.operator)
        results = _functions.compute(self.operator, tensors, tuple(attributes), states, None)
        return [result for result in results.values() if result is not None]

    def transform(self, *arguments):
        """The call under torch.func, whose levels take it apart."""
        tensors, (*attributes, states) = arguments[: self.inputs], arguments[self.inputs :]
        results = _functions.Differentiable.of(
            self.operator, tuple(attributes), states, None, None, *tensors
        )
        return [result for result in results if result is not None]

    def fake(self, *arguments):
        *attributes, states = arguments[self.inputs :]
        return _fake(self.operator, arguments[: self.inputs], attributes, states)

    def setup_context(self, ctx, inputs, output):
        tensors, (*attributes, states) = inputs[: self.inputs], inputs[self.inputs :]
        ctx.save_for_backward(*tensors)
        ctx.rest = attributes, states
        ctx.set_materialize_grads(False)

    def backward(self, ctx, results):
        attributes, states = ctx.rest
        names = _functions.given(self.operator, attributes, states)
        above = dict(zip((self.operator.above[name] for name in names), results))
        wanted = ctx.needs_input_grad[: self.inputs]
        upstream = [above.get(name) for name in self.operator.upstream]
        gradients = iter(self.call_vjp(*ctx.saved_tensors, *upstream, *attributes, list(wanted)))
        return *(next(gradients) if w else None for w in wanted), *(None for _ in attributes), None

    def vjp(self, *arguments):
        tensors, above = arguments[: self.inputs], arguments[self.inputs : self.above]
        *attributes, wanted = arguments[self.above :]
        gradients = _functions.pull_back(
            self.operator, tensors, above, tuple(attributes), None, wanted
        )
        return [gradient for gradient in gradients if gradient is not None]

    def fake_vjp(self, *arguments):
        wanted = zip(arguments[: self.inputs], arguments[-1])
        return [tensor.new_empty(tensor.shape) for tensor, is_wanted in wanted if is_wanted]
