#!/usr/bin/env python3
"""Checks the house: a room includes only the rooms below it (docs/design.md), public headers stand
alone, and no tracked file knows where on some machine it was written.

usage: check_layers.py [ROOT]     prints each violation as FILE:LINE: sentence; exit 1 if there is one
"""

import re
import subprocess
import sys
from pathlib import Path

# What each room may include besides itself and the public headers.
BELOW = {
    "src/base": [],
    "src/formats": ["src/base"],
    "src/kernels": ["src/base"],
    "src/ops": ["src/base", "src/kernels"],
    "src/ops/reference": ["src/base"],
    "src/layers": ["src/base", "src/kernels", "src/ops"],
    "src/models": ["src/base", "src/formats", "src/kernels", "src/ops", "src/layers"],
    "src/train": ["src/base", "src/formats", "src/kernels", "src/ops", "src/layers", "src/models"],
    "src/infer": ["src/base", "src/formats", "src/kernels", "src/ops", "src/layers", "src/models"],
    "src/capi": ["src/base", "src/formats", "src/kernels", "src/ops", "src/layers", "src/models",
                 "src/train", "src/infer"],
    "examples": [],
}
# Rooms at the top, which may include every room of src/, and themselves.
TOP = ["apps/ouzel", "bench", "fuzz", "python/src", "tests"]

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Headers of C++ have no dot and no folder; these are all that C and the C ABI need besides.
STANDARD_C = {"stdint.h", "stddef.h"}
ABSOLUTE_PATH = re.compile(r"(?<![\w./$}{*~-])/(work|tmp|root|home)(?![\w-])")
TEXT_SUFFIXES = {".cc", ".h", ".c", ".cpp", ".py", ".sh", ".md", ".txt", ".cmake", ".json", ".in",
                 ".yml", ".toml", ""}


def room_of(path):
    """The innermost room that a path of the tree lies in, or None."""
    rooms = [r for r in [*BELOW, *TOP, "include/ouzel"] if path.startswith(r + "/")]
    return max(rooms, key=len, default=None)


def check_include(path, room, bracket, header):
    """The sentence that says what is wrong with one include, or None."""
    if room == "include/ouzel":
        if header.startswith("ouzel/"):
            return None
        if bracket == "<" and ("." not in header and "/" not in header or header in STANDARD_C):
            return None
        return f"public headers include only ouzel/ and the standard library, not {header}"
    if header.startswith("ouzel/") or bracket == "<" and not header.startswith("src/"):
        return None
    if room in ("src/kernels", "tests") and header.startswith("hwy/"):
        return None  # Highway's own idiom writes them with quotes
    target = room_of(header)
    if target == "include/ouzel":
        return f"public headers are included as ouzel/..., not {header}"
    if room in TOP:
        if target is not None and (target.startswith("src/") or target in (room, "bench")):
            return None
        if target is None and "/" not in header:
            return None  # beside the file itself
        return f"{room} includes only src/, bench/ and itself, not {header}"
    if target is None:
        return f"{header} is in no room: third-party headers are written <...>"
    if target == room or target in BELOW[room]:
        return None
    return f"{room} must not include {header}: {target} is not below it"


def check_file(root, path):
    """Yields (line number, sentence) for one file of the tree."""
    try:
        text = (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    room = room_of(path) if path.endswith((".cc", ".h", ".c", ".cpp")) else None
    if path.startswith("src/") and room is None and path.endswith((".cc", ".h")):
        yield 1, "this file of src/ is in no room"
    for number, line in enumerate(text.splitlines(), 1):
        if match := ABSOLUTE_PATH.search(line):
            yield number, f"the absolute path {match.group(0)} has no place in the project"
        if room and (match := INCLUDE.match(line)):
            if sentence := check_include(path, room, *match.groups()):
                yield number, sentence


def tracked_files(root):
    """Files that git tracks; all files where there is no git (a source archive)."""
    git = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True)
    if git.returncode == 0:
        return [f for f in git.stdout.split("\0") if f]
    skip = {".git", "build"}
    return [
        str(p.relative_to(root))
        for p in root.rglob("*")
        if p.is_file() and p.relative_to(root).parts[0] not in skip
    ]


def violations(root):
    found = []
    for path in sorted(tracked_files(root)):
        if Path(path).suffix in TEXT_SUFFIXES and (root / path).is_file():
            found += [f"{path}:{n}: {sentence}" for n, sentence in check_file(root, path)]
    return found


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    found = violations(root)
    print("\n".join(found + [f"layers: {len(found)} violations"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
