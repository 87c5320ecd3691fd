#!/usr/bin/env python3
"""Every symbol that the shared library exports is declared in a public header, and those of the C ABI
are the ones that are listed: a change of it is a decision, not an accident.

usage: check_exports.py LIBRARY INCLUDE_FOLDER C_SYMBOLS
"""

import re
import subprocess
import sys
from pathlib import Path


def main():
    library, include = sys.argv[1], Path(sys.argv[2])
    headers = "\n".join(h.read_text() for h in sorted(include.glob("*.h")))
    words = set(re.findall(r"\w+", re.sub(r"//.*", "", headers)))
    nm = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--demangle", "--format=posix", library],
        capture_output=True, text=True, check=True,
    )
    names, strangers, c_symbols = 0, [], set()
    for line in nm.stdout.splitlines():
        symbol = re.sub(r" [A-Za-z] [0-9a-f]+( [0-9a-f]+)?$", "", line).strip()
        # The name alone: no arguments, template arguments, or what the symbol is for.
        name = re.sub(r"^(typeinfo name|typeinfo|vtable) for ", "", symbol)
        name = re.sub(r"\[abi:\w+\]", "", name).split("(")[0].split("<")[0]
        parts = [p.lstrip("~") for p in name.split("::")]
        public = parts[0] == "ouzel" and all(p in words or "operator" in p for p in parts[1:])
        names += 1
        is_c = re.match(r"ouzel_\w+$", name) is not None
        if is_c:
            c_symbols.add(name)
        if not (public or is_c and name in words):
            strangers.append(symbol)
    if names == 0 or strangers:
        print("\n".join(strangers))
        print(f"{library} exports {names} symbols, {len(strangers)} that no public header declares")
        return 1
    listed = set(Path(sys.argv[3]).read_text().split())
    if c_symbols != listed:
        print(f"the C ABI changed: new {sorted(c_symbols - listed)}, gone {sorted(listed - c_symbols)}. "
              f"If that is meant, change {sys.argv[3]}; what is gone breaks programs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
