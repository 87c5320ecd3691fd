"""Modules of Ouzel that need packages which only some have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ouzel


@pytest.mark.parametrize(("module", "package", "remedy"), [
    ("ouzel.torch", "torch", "pip install torch"),
    ("ouzel.fla", "torch", "pip install torch"),
    ("ouzel.transformers", "torch", "pip install torch 'transformers>=5'"),
    ("ouzel.transformers", "transformers", "pip install torch 'transformers>=5'"),
    ("ouzel.onnx", "onnx", "pip install 'onnx>=1.23'"),
])
def test_an_import_without_its_package_says_what_to_install(module, package, remedy):
    if package == "transformers":
        pytest.importorskip("torch")
    hidden = f"""
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
import {module}
"""
    path = os.pathsep.join([str(Path(ouzel.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60,
                             env={**os.environ, "PYTHONPATH": path})
    last = process.stderr.splitlines()[-1]
    assert process.returncode == 1
    assert last == (f"ModuleNotFoundError: {module} needs the package {package}, which is not installed: "
                    f"{remedy}")
