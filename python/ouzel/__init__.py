"""Ouzel: linear attention for CPUs.

Every operator of the library is a function of this module, with a `.vjp` that returns the gradients:
`laws()` lists them with formulas and sources, `help(ouzel.retention)` shows one. Arrays are NumPy's,
or of any framework with DLPack on the CPU; results are of the kind that the first array is.
"""

import sys as _sys

from . import _operators
from ._core import (
    Context,
    Generation,
    Model,
    State,
    __version__,
    draw_orthogonal_projection,
    isas,
)
from ._errors import (
    BadFileError,
    CancelledError,
    Error,
    FileAccessError,
    InvalidArgumentError,
    OutOfMemoryError,
)
from ._operators import AttributeInfo, Costs, Law, TensorInfo, explain, laws

__all__ = [
    "AttributeInfo",
    "BadFileError",
    "CancelledError",
    "Context",
    "Costs",
    "Error",
    "FileAccessError",
    "Generation",
    "InvalidArgumentError",
    "Law",
    "Model",
    "OutOfMemoryError",
    "State",
    "TensorInfo",
    "__version__",
    "draw_orthogonal_projection",
    "explain",
    "isas",
    "laws",
    *_operators.NAMES,
]


def __getattr__(name):
    """An operator's function is written where it is first asked for: the import takes a third of the time."""
    if name not in _operators.NAMES:
        sentence = f"module 'ouzel' has no attribute '{name}'"
        raise AttributeError(sentence, name=name, obj=_sys.modules[__name__])
    made = globals()[name] = _operators.function_of(name)
    return made


def __dir__():
    return sorted({*globals(), *__all__})
