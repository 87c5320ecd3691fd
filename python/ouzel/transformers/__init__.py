"""Ouzel under the models of Hugging Face transformers, on CPUs.

    import ouzel.transformers

    ouzel.transformers.accelerate(model)          # once, after loading; .undo() of the result restores it
    with ouzel.transformers.accelerate(model):    # or for a while
        model.generate(**inputs)

Layers with linear attention, convolutions and gated norms compute through Ouzel then: forward,
backward, prefill and decoding, with caches, left padding and packed rows as the model has them. Weights,
configurations, `save_pretrained` and pickles are as before.
"""

import functools
import inspect
import types
import warnings

from .. import Context
from .._extras import require

require(__name__, "torch", "transformers>=5")

import torch  # noqa: E402
import transformers  # noqa: E402

from ._layers import LAYERS  # noqa: E402

__all__ = ["Acceleration", "accelerate"]


class Acceleration:
    """What `accelerate` replaced in a model. As a context manager it is undone at the end."""

    def __init__(self, replaced):
        self._replaced = replaced

    @property
    def layers(self):
        """How many modules of which class compute through Ouzel."""
        names = [type(module).__name__ for module, _, _ in self._replaced]
        return {name: names.count(name) for name in names}

    def undo(self):
        """Restores what was replaced. What others have wrapped since is theirs: left as it is."""
        for module, name, method in self._replaced:
            if module.__dict__.get(name) is method:
                delattr(module, name)
            else:
                warnings.warn(
                    f"{type(module).__name__}.{name} was replaced again since ouzel.transformers did: "
                    "undo that first, then this",
                    stacklevel=2,
                )
        self._replaced = [r for r in self._replaced if r[0].__dict__.get(r[1]) is r[2]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __repr__(self):
        layers = ", ".join(f"{count} {name}" for name, count in self.layers.items())
        return f"Acceleration({layers})"


def accelerate(model, *, context=None):
    """Lets the layers of a loaded model that Ouzel knows compute through it, on the CPU.

    Arguments:
        model: a torch.nn.Module, of transformers or around one
        context: the ouzel.Context that computes (default: one that all calls share)

    Returns the Acceleration whose `undo()` restores the model exactly.

    Only calls with float32, bfloat16 or float16 tensors on the CPU go through Ouzel; others take the
    layer's own path. A layer that Ouzel does not know is left alone; a warning names all of them, and
    says so if there is nothing to do at all. One that is accelerated already stays so, with the context
    that it has, and a warning says that.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate: model is of type {type(model).__name__}; a torch.nn.Module was expected")
    if not isinstance(context, Context | None):
        raise TypeError(f"accelerate: context is of type {type(context).__name__}, not ouzel.Context")
    methods, replaced, left, done = {}, [], {}, set()
    for module in model.modules():
        kind = type(module)
        if kind not in methods:
            methods[kind] = _methods(kind, context, left)
        for name, function in methods[kind].items():
            if name not in module.__dict__:
                method = types.MethodType(function, module)
                setattr(module, name, method)
                replaced.append((module, name, method))
            elif _is_ours(module.__dict__[name]):
                done.add(kind.__name__)
            else:
                left[kind.__name__] = f"its {name} was replaced by something else"
    if left:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in left.items())
        warnings.warn(f"ouzel.transformers leaves these layers as they are: {reasons}", stacklevel=2)
    elif not replaced and not done:
        warnings.warn(
            f"{type(model).__name__} has no layer that ouzel.transformers knows, so nothing is accelerated; "
            "docs/transformers.md of Ouzel lists what it knows",
            stacklevel=2,
        )
    if done:
        warnings.warn(
            f"{type(model).__name__} has layers that are accelerated already: {', '.join(sorted(done))} stay "
            "so, with the context given then; to change it, undo() that acceleration first",
            stacklevel=2,
        )
    return Acceleration(replaced)


def _is_ours(method):
    return getattr(getattr(method, "__func__", None), "__ouzel__", False)


def _methods(kind, context, left):
    """The methods to give to modules of a class, by name; why there are none goes into `left`."""
    row = LAYERS.get(kind.__name__)
    if row is None:
        if _looks_up(kind) & _NAMES:
            left[kind.__name__] = "a class that Ouzel does not know"
        return {}
    methods, names = {}, {}
    for name, ours in row.items():
        # A method of the class, or a function that its forward looks up.
        original = getattr(kind, name, None) or inspect.unwrap(kind.forward).__globals__.get(name)
        if original is None or not _parameters(ours) <= _parameters(original):
            left[kind.__name__] = f"transformers {transformers.__version__} has it in another form"
            return {}
        target = methods if hasattr(kind, name) else names
        target[name] = _guarded(ours, original, context)
    if names:
        methods["forward"] = _rebound(kind.forward, names)
    for function in methods.values():
        function.__ouzel__ = True
    return methods


def _looks_up(kind):
    """The names of globals and attributes in its forward."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return set(code.co_names) if code else set()


def _parameters(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD}


def _rebound(function, names):
    """A copy of a function, and of those that it wraps, that finds `names` among its globals."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__
    if inner is not None:
        copy = types.CellType(_rebound(inner, names))
        cells = tuple(copy if cell.cell_contents is inner else cell for cell in cells)
    space = {**function.__globals__, **names}
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _fits(value):
    """Whether Ouzel takes an argument."""
    if isinstance(value, torch.Tensor):
        number = value.dtype.is_floating_point or value.dtype.is_complex
        return value.is_cpu and value.layout == torch.strided and (value.dtype in _TYPES or not number)
    if isinstance(value, (list, tuple)):
        return all(map(_fits, value))
    return not isinstance(value, torch.nn.Module) or all(map(_fits, value.parameters(recurse=False)))


def _guarded(ours, original, context):
    """`ours` where it takes the arguments, else `original`."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        if all(map(_fits, args)) and all(map(_fits, kwargs.values())):
            result = ours(*args, context=context, **kwargs)
            if result is not NotImplemented:
                return result
        return original(*args, **kwargs)

    return call


_NAMES = {name for row in LAYERS.values() for name in row} - {"forward"}
