#!/bin/sh
# usage: golden_is_reproducible.sh PYTHON FOLDER
# Writes the golden files anew into FOLDER: they must be the committed ones, byte for byte.
set -e
tests=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$2"
"$1" "$tests/../scripts/make_golden.py" "$2"
diff -r "$2" "$tests/golden"
