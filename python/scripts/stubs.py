"""Writes the type stubs of the package: those of the extension by nanobind, those of the operators
from the library's table.

usage: stubs.py FOLDER     (with the built package on PYTHONPATH)
"""

import importlib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

import ouzel
from ouzel import _operators

HEAD = '''"""Ouzel: linear attention for CPUs."""

from typing import Any, NamedTuple, Protocol, Sequence

from ._core import (
    Context as Context,
    Generation as Generation,
    Model as Model,
    State as State,
    __version__ as __version__,
    explain as explain,
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

class Error(Exception): ...
class InvalidArgumentError(Error, ValueError): ...
class BadFileError(Error, ValueError): ...
class FileAccessError(Error, OSError): ...
class OutOfMemoryError(Error, MemoryError): ...
class CancelledError(Error): ...
'''


def typed(law, parameters):
    """Parameters with types, as `signature` wants them."""
    kinds = {a.name: a.kind for a in law.attributes}
    kinds |= {"output_final_state": "bool", "context": "Context"}
    optional = {True: " | None", False: ""}
    return [
        (name + ": " + kinds.get(name, "Array") + optional[default is None], default)
        for name, default in parameters
    ]


def method(law, name, backward, returned):
    positional, keywords = _operators.parameters(law, backward)
    text = _operators.signature(typed(law, positional), typed(law, keywords))
    doc = _operators.documentation(law, backward).replace("\n", "\n        ").replace("        \n", "\n")
    return f'    def {name}(self, {text}) -> {returned}:\n        """{doc}"""\n        ...\n'


def operators():
    for law in ouzel.laws().values():
        protocol = "_" + "".join(word.capitalize() for word in law.name.split("_"))
        states = _operators.keeps_state(law)
        yield f"\nclass {protocol}(Protocol):\n"
        yield method(law, "__call__", False, "tuple[Array | None, ...]" if states else "Array")
        yield method(law, "vjp", True, "dict[str, Array]")
        yield "".join(f"{name}: {protocol}\n" for name in (law.name, *law.aliases))


def main():
    folder = Path(sys.argv[1])
    (folder / "__init__.pyi").write_text(HEAD + "".join(operators()))
    core = importlib.import_module("ouzel._core")
    generator = StubGen(core)
    generator.put(core)
    (folder / "_core.pyi").write_text(generator.get())


if __name__ == "__main__":
    main()
