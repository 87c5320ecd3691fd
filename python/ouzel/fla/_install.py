"""Makes `import fla.ops` and `import fla.modules` find Ouzel, and undoes it.

Each published module is imported from where it is installed, if it is and can be, and gets Ouzel's
functions over its own; otherwise it holds Ouzel's alone. So whatever else an installed
flash-linear-attention has, its layers and models above all, stays and calls Ouzel.
"""

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import torch

from .. import torch as ops
from ._table import PUBLISHED

# Where the modules of ouzel.torch are published; the third name is that of older versions.
_CLASSES = {
    "FusedRMSNormGated": ("norm", "norm.fused_norm_gate", "fused_norm_gate"),
    "RMSNorm": ("norm", "norm.layernorm", "layernorm"),
    "ShortConvolution": ("causal_conv1d", "causal_conv1d.ops", "convolution"),
}


def _contents():
    """Published modules by name, and what each gets of Ouzel's."""
    from . import _functions, _modules

    tree = {}

    def publish(module, name, thing):
        """In the module and in the packages around it."""
        while "." in module:
            tree.setdefault(module, {})[name] = thing
            module = module.rpartition(".")[0]

    for name, module in _modules.items():
        publish(f"fla.ops.{module}", name, _functions[name])
    for name, modules in _CLASSES.items():
        if not hasattr(ops, name):
            continue
        for module in modules:
            publish(f"fla.modules.{module}", name, getattr(ops, name))
    tree["fla"] = {}
    return tree


class _Loader(Loader):
    def __init__(self, installed, contents):
        self.installed = installed
        self.contents = contents

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        if self.installed:
            try:
                self.installed.exec_module(module)
            except ImportError as error:
                warnings.warn(f"{module.__name__} holds Ouzel's functions alone: the one that is installed "
                              f"cannot be imported here ({error})")
        if module.__name__ == "fla":
            vars(module).setdefault("__version__", PUBLISHED)
        vars(module).update(self.contents)


class _Finder(MetaPathFinder):
    def __init__(self):
        self.contents = _contents()

    def find_spec(self, name, path=None, target=None):
        if name not in self.contents:
            return None
        spec = _installed(name, path, target)
        loader = _Loader(spec and spec.loader, self.contents[name])
        if spec is None:
            return ModuleSpec(name, loader, is_package=True)
        spec.loader = loader
        return spec


def _installed(name, path=None, target=None):
    """What is found without Ouzel."""
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _has_gpu():
    backends = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu"))
    return any(backend is not None and backend.is_available() for backend in backends)


def _loaded():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "fla"}


class Installation:
    """What `install` did. `uninstall`, or the end of a `with` block, undoes it."""

    def __init__(self, finder=None):
        self._finder = finder
        if finder:
            self._before = _loaded()
            for name in self._before:
                del sys.modules[name]
            sys.meta_path.insert(0, finder)

    @property
    def active(self):
        """Whether `import fla` finds Ouzel through this installation."""
        return self._finder in sys.meta_path

    def uninstall(self):
        """Restores what `import fla` found before; modules imported meanwhile keep what they have."""
        if not self.active:
            return
        sys.meta_path.remove(self._finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(self._before)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.uninstall()


_installation = Installation()


def install(*, force=False):
    """Makes `import fla.ops`, `from fla.ops.NAME import ...` and `from fla.modules import ...` find
    Ouzel's functions and modules, and returns an `Installation` that undoes it.

    Import it before what imports fla: modules that already did keep what they have. Where
    flash-linear-attention can be imported and there is a GPU, it is left alone, with a warning; `force`
    installs even then. A second call does nothing.
    """
    global _installation
    if _installation.active:
        return Installation()
    if not force and _has_gpu() and _installed("fla") is not None:
        try:
            importlib.import_module("fla.ops")
        except ImportError:
            pass
        else:
            warnings.warn("flash-linear-attention is installed and there is a GPU: `import fla` is left "
                          "alone. ouzel.fla.install(force=True) replaces it all the same", stacklevel=2)
            return Installation()
    _installation = Installation(_Finder())
    return _installation


def uninstall():
    """Undoes `install`."""
    _installation.uninstall()
