"""Writes the type stubs of the package: those of the extension by nanobind, those of the operators
from the library's table.

usage: stubs.py FOLDER     (the built package's, "ouzel")
"""

import importlib
import re
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

sys.path.insert(0, str(Path(sys.argv[1]).parent))

import ouzel  # noqa: E402
from ouzel import _operators  # noqa: E402

HEAD = '''"""Ouzel: linear attention for CPUs."""

from typing import Any, NamedTuple, Protocol, Sequence

from ._core import (
    Context as Context,
    Generation as Generation,
    Model as Model,
    State as State,
    __version__ as __version__,
    draw_orthogonal_projection as draw_orthogonal_projection,
    isas as isas,
)

# NumPy's, or any with __dlpack__ on the CPU.
Array = Any

class TensorInfo(NamedTuple):
    name: str
    shape: str
    gradient: str
    optional: bool
    when: str
    dtype: str
    is_state: bool
    gradient_when: str

class AttributeInfo(NamedTuple):
    name: str
    kind: str
    meaning: str
    default: str
    choices: tuple[str, ...]

class Law(NamedTuple):
    name: str
    aliases: tuple[str, ...]
    formula: str
    source: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    attributes: tuple[AttributeInfo, ...]

def laws() -> dict[str, Law]: ...

class Costs(dict[str, Any]): ...

def explain(law: str, T: int = 4096, K: int = 64, V: int = 64, H: int = 16) -> Costs: ...

class Error(Exception): ...
class InvalidArgumentError(Error, ValueError): ...
class BadFileError(Error, ValueError): ...
class FileAccessError(Error, OSError): ...
class OutOfMemoryError(Error, MemoryError): ...
class CancelledError(Error): ...
'''

TORCH_HEAD = '''"""Ouzel for PyTorch on CPUs."""

from typing import Protocol, Sequence

from torch import Tensor

from .. import Context
'''


def typed(law, parameters, array):
    """Parameters with types, as `signature` wants them."""
    kinds = {a.name: a.kind for a in law.attributes}
    kinds |= {"output_final_state": "bool", "context": "Context"}
    if "cu_seqlens" in kinds:
        kinds["cu_seqlens"] += f" | {array}"
    optional = {True: " | None", False: ""}
    return [
        (name + ": " + kinds.get(name, array) + optional[default is None], default)
        for name, default in parameters
    ]


def method(law, name, kind, returned, array):
    positional, keywords = _operators.parameters(law, kind)
    text = _operators.signature(typed(law, positional, array), typed(law, keywords, array))
    doc = _operators.documentation(law, kind).replace("\n", "\n        ").replace("        \n", "\n")
    return f'    def {name}(self, {text}) -> {returned}:\n        """{doc}"""\n        ...\n'


def operators(array, with_gradients):
    """Those of `ouzel`, with functions for gradients, or those that `ouzel.torch` differentiates."""
    for law in ouzel.laws().values():
        if not with_gradients and not any(tensor.gradient for tensor in law.inputs):
            continue
        protocol = "_" + "".join(word.capitalize() for word in law.name.split("_"))
        states = _operators.keeps_state(law)
        results = f"tuple[{array} | None, ...]" if states else array
        yield f"\nclass {protocol}(Protocol):\n"
        yield method(law, "__call__", _operators.CALL, results, array)
        if with_gradients:
            yield method(law, "vjp", _operators.VJP, f"dict[str, {array}]", array)
        if states:
            yield method(law, "step", _operators.STEP, array, array)
        yield "".join(f"{name}: {protocol}\n" for name in (law.name, *law.aliases))


def torch_modules(folder):
    names = re.findall(r"^class ([A-Z]\w+)", (folder / "modules.py").read_text(), re.MULTILINE)
    return "from .modules import (\n" + "".join(f"    {name} as {name},\n" for name in names) + ")\n"


def main():
    folder = Path(sys.argv[1])
    (folder / "__init__.pyi").write_text(HEAD + "".join(operators("Array", with_gradients=True)))
    torch = TORCH_HEAD + torch_modules(folder / "torch")
    torch += "".join(operators("Tensor", with_gradients=False))
    (folder / "torch" / "__init__.pyi").write_text(torch)
    core = importlib.import_module("ouzel._core")
    generator = StubGen(core)
    generator.put(core)
    (folder / "_core.pyi").write_text(generator.get())


if __name__ == "__main__":
    main()
