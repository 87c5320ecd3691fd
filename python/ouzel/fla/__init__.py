"""flash-linear-attention's functions on CPUs: `import ouzel.fla as ops` for `import fla.ops as ops`.

Names, arguments, defaults, layouts and what is returned are those that are published; every function
has gradients. What differs is in docs/fla.md. `install()` makes `import fla.ops` itself, and
`from fla.ops.gated_delta_rule import chunk_gated_delta_rule` and the like, find these functions where
flash-linear-attention is not installed or has no GPU; `uninstall()` undoes it.
"""

import sys as _sys
from difflib import get_close_matches as _get_close_matches
from dis import opmap as _opmap
from typing import Any as _Any

from .._extras import require as _require

_require(__name__, "torch")

from ._functions import functions as _made  # noqa: E402
from ._install import Installation, install, uninstall  # noqa: E402
from ._table import ABSENT as _ABSENT  # noqa: E402
from ._table import PUBLISHED as _PUBLISHED  # noqa: E402

_modules, _functions = {}, {}
for _name, (_module, _function) in _made().items():
    _modules[_name], _functions[_name] = _module, _function
globals().update(_functions)

__all__ = ["Installation", "install", "uninstall", *sorted(_functions)]


def __getattr__(name: str) -> _Any:  # so that checkers of types know of all names
    if name in _ABSENT:
        sentence = (
            f"ouzel.fla has no {name}: Ouzel has no such law. flash-linear-attention publishes it in plain "
            f"PyTorch too, beside its kernels: see naive.py there, version {_PUBLISHED}"
        )
    else:
        near = _get_close_matches(name, __all__, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "; dir(ouzel.fla) lists what it has"
        sentence = f"module 'ouzel.fla' has no attribute '{name}'{hint}"
    # `from ouzel.fla import name` would put a bare sentence in the place of an AttributeError's.
    frame = _sys._getframe(1)
    imports = frame.f_code.co_code[frame.f_lasti] == _opmap["IMPORT_FROM"]
    raise (ImportError if imports else AttributeError)(sentence)
