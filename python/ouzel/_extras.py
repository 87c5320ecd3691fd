"""Packages that only some modules of Ouzel need."""

from importlib import import_module as _import_module


def require(module, *packages):
    """Imports packages, each a requirement of pip; raises ModuleNotFoundError that says how to get them."""
    for package in packages:
        name = package.split(">")[0]
        try:
            _import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # it is there, and something that it needs is not
                raise
            quoted = (f"'{one}'" if ">" in one else one for one in packages)
            sentence = f"{module} needs the package {name}, which is not installed: pip install {' '.join(quoted)}"
            raise ModuleNotFoundError(sentence, name=name) from None
