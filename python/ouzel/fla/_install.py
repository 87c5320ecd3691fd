"""Makes `import fla.ops` and `import fla.modules` find Ouzel, and undoes it.

Where flash-linear-attention cannot be imported, a finder makes modules of the published names that hold
Ouzel's functions. Where it can, Ouzel's are put in the place of its own in all of its modules: its
layers and models then call Ouzel.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import torch

from . import modules
from ._table import PUBLISHED

# Where fla.modules publishes what it has, in this version and, last, in older ones.
_MODULES = {
    "FusedRMSNormGated": ("norm.fused_norm_gate", "fused_norm_gate"),
    "RMSNorm": ("norm.layernorm", "layernorm"),
    "ShortConvolution": ("causal_conv1d.ops", "convolution"),
    "causal_conv1d": ("causal_conv1d.ops", "convolution"),
    "swiglu": ("activations.ops", "activations"),
    "swiglu_linear": ("activations.ops", "activations"),
    "swish": ("activations.ops", "activations"),
}


def _contents():
    """Published modules by name, and what each has of Ouzel's, those of packages first."""
    from . import _functions, _modules

    published = [(f"fla.ops.{module}", name, _functions[name]) for name, module in _modules.items()]
    for name, paths in _MODULES.items():
        published += [(f"fla.modules.{path}", name, getattr(modules, name)) for path in paths]
    contents = {}
    for module, name, thing in published:
        while "." in module:  # also in the packages around it
            contents.setdefault(module, {})[name] = thing
            module = module.rpartition(".")[0]
    for path in contents:  # where a function has the name of its module, the package has the module
        package, _, name = path.rpartition(".")
        contents.get(package, {}).pop(name, None)
    return dict(sorted(contents.items()))


def _loaded():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "fla"}


def _restore(modules):
    """Makes these the only modules of fla that are loaded."""
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(modules)


class _StandIn(MetaPathFinder, Loader):
    """Finds modules that hold Ouzel's functions."""

    def __init__(self, contents):
        self.contents = {"fla": {"__version__": PUBLISHED}, **contents}

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name in self.contents else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(self.contents[module.__name__])

    def apply(self):
        self.before = _loaded()
        _restore({})
        sys.meta_path.insert(0, self)

    def undo(self):
        sys.meta_path.remove(self)
        _restore(self.before)


class _Overlay:
    """Puts Ouzel's functions in the place of those of the modules."""

    def __init__(self, contents, modules):
        self.pairs = [
            (vars(module)[name], ours)
            for path, module in modules.items()
            for name, ours in contents[path].items()
            if name in vars(module)
        ]

    def apply(self):
        self._replace({id(theirs): ours for theirs, ours in self.pairs})

    def undo(self):
        self._replace({id(ours): theirs for theirs, ours in self.pairs})

    def _replace(self, by_id):
        for module in _loaded().values():
            for name, thing in list(vars(module).items()):
                if id(thing) in by_id:
                    setattr(module, name, by_id[id(thing)])


def _imported(names):
    """The modules of these names that the installed flash-linear-attention has; none if it is not
    installed or cannot be imported here."""
    before, modules = _loaded(), {}
    for name in names:
        try:
            modules[name] = importlib.import_module(name)
        except Exception as error:
            absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            if not absent:  # but something that it needs
                _restore(before)
                return {}
    return modules


def _has_gpu():
    backends = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu"))
    return any(backend is not None and backend.is_available() for backend in backends)


class Installation:
    """What `install` did. `uninstall`, or the end of a `with` block, undoes it."""

    def __init__(self, change=None):
        self._change = change
        if change:
            change.apply()

    @property
    def active(self):
        """Whether `import fla` finds Ouzel through this installation."""
        return self._change is not None

    def uninstall(self):
        """Restores what `import fla` found before. Modules other than fla's keep what they imported."""
        if self.active:
            self._change.undo()
            self._change = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.uninstall()


_installation = Installation()


def install(*, force=False):
    """Makes `import fla.ops`, `from fla.ops.NAME import ...` and `from fla.modules import ...` find
    Ouzel's functions and modules, and returns an `Installation` that undoes it.

    Call it before importing what imports fla: modules other than fla's keep what they have. Where
    flash-linear-attention can be imported and there is a GPU, it is left alone, with a warning; `force`
    installs even then. A second call does nothing.
    """
    global _installation
    if _installation.active:
        return Installation()
    contents = _contents()
    installed = _imported(contents)
    if installed and _has_gpu() and not force:
        warnings.warn("flash-linear-attention is installed and there is a GPU: `import fla` is left alone. "
                      "ouzel.fla.install(force=True) replaces it all the same", stacklevel=2)
        return Installation()
    _installation = Installation(_Overlay(contents, installed) if installed else _StandIn(contents))
    return _installation


def uninstall():
    """Undoes `install`."""
    _installation.uninstall()
