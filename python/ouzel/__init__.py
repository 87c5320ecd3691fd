"""Ouzel: linear attention for CPUs.

Every operator of the library is a function of this module, with a `.vjp` that returns the gradients:
`laws()` lists them with formulas and sources, `help(ouzel.retention)` shows one. Arrays are NumPy's,
or of any framework with DLPack on the CPU; results are of the kind that the first array is.
"""

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

_functions = _operators.functions()
globals().update(_functions)

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
    *_functions,
]
