"""What pip installed: all that the package needs, for any machine."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import ouzel

FOLDER = Path(ouzel.__file__).parent
# Of every Linux with a C++ compiler's libraries, which Python's own extensions need as well.
SYSTEM = ("libstdc++.so", "libm.so", "libgcc_s.so", "libc.so", "libpthread.so", "ld-linux")


@pytest.fixture(scope="module")
def files():
    """Of the installed package; that of a build folder is none."""
    try:
        found = importlib.metadata.files("ouzel") or []
    except importlib.metadata.PackageNotFoundError:
        found = []
    names = {Path(file.locate()).resolve() for file in found}
    if FOLDER.resolve() / "__init__.py" not in names:
        pytest.skip("ouzel was not installed by pip")
    return names


def test_the_package_holds_all_modules_and_stubs(files):
    source = Path(__file__).parents[1] / "ouzel"
    inside = {file.relative_to(FOLDER.resolve()) for file in files if FOLDER.resolve() in file.parents}
    wanted = {file.relative_to(source) for file in source.rglob("*.py")} | {Path("py.typed")}
    assert wanted <= inside
    assert {Path("__init__.pyi"), Path("_core.pyi"), Path("torch/__init__.pyi")} <= inside


def test_libraries_that_only_developers_have_are_in_the_package(files):
    libraries = [file for file in files if ".so" in file.name]
    assert any(file.name.startswith("_core.") for file in libraries)
    for library in libraries:
        text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
        assert needed
        for name in needed:
            assert name.startswith(SYSTEM) or FOLDER.resolve() / name in files, f"{library.name} needs {name}"
