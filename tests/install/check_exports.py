#!/usr/bin/env python3
"""Every symbol that the shared library exports is declared in a public header, and the C ABI is the one
that is listed, with its types, members and numbers: a change of it is a decision, not an accident.

usage: check_exports.py LIBRARY INCLUDE_FOLDER C_ABI
       check_exports.py --list INCLUDE_FOLDER     prints what C_ABI should hold
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path


def c_abi(include):
    """The declarations of ouzel/c.h, one a line: functions, types, members, enumerators."""
    text = re.sub(r"/\*.*?\*/", "", (include / "c.h").read_text(), flags=re.DOTALL)
    text = re.sub(r"^#.*$|^extern .*$|\bOUZEL_EXPORT\b", "", text, flags=re.MULTILINE)
    lines, line, depth = [], "", 0
    for token in re.findall(r"\w+|\s+|[^\w\s]", text):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "}":
            lines.append(line)
            line = ""
        line += token
        if token in "{;" or token == "," and depth == 0:
            lines.append(line)
            line = ""
    squeezed = (re.sub(r"\s+", " ", line).strip() for line in lines)
    return [line for line in squeezed if line]


def exported(library):
    """Symbols, demangled."""
    nm = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--demangle", "--format=posix", library],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [re.sub(r" [A-Za-z] [0-9a-f]+( [0-9a-f]+)?$", "", line).strip() for line in nm.stdout.splitlines()]


def strangers(symbols, include):
    """Those that no public header declares."""
    headers = "\n".join(h.read_text() for h in sorted(include.glob("*.h")))
    words = set(re.findall(r"\w+", re.sub(r"//.*", "", headers)))
    for symbol in symbols:
        # The name alone: no arguments, template arguments, or what the symbol is for.
        name = re.sub(r"^(typeinfo name|typeinfo|vtable) for ", "", symbol)
        name = re.sub(r"\[abi:\w+\]", "", name).split("(")[0].split("<")[0]
        parts = [p.lstrip("~") for p in name.split("::")]
        public = parts[0] == "ouzel" and all(p in words or "operator" in p for p in parts[1:])
        if not (public or name.startswith("ouzel_") and name in words):
            yield symbol


def main():
    if sys.argv[1] == "--list":
        print("\n".join(c_abi(Path(sys.argv[2]))))
        return 0
    library, include, listed = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    symbols, declared = exported(library), c_abi(include)
    unknown = list(strangers(symbols, include))
    if not symbols or unknown:
        print("\n".join(unknown))
        print(f"{library} exports {len(symbols)} symbols, {len(unknown)} that no public header declares")
        return 1
    functions = {m[1] for m in (re.search(r"\b(ouzel_\w+)\(", line) for line in declared) if m}
    c_symbols = {symbol for symbol in symbols if re.fullmatch(r"ouzel_\w+", symbol)}
    if c_symbols != functions:
        print(f"ouzel/c.h and {library} differ in {sorted(c_symbols ^ functions)}")
        return 1
    changes = [*difflib.unified_diff(listed.read_text().splitlines(), declared, lineterm="", n=0)][2:]
    if changes:
        print("\n".join(changes))
        print(f"The C ABI changed. If that is meant, say so in {listed} (--list prints it): members and numbers "
              "are only ever added, behind; what is changed or gone breaks programs")  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
