#!/usr/bin/env bash
# The examples run and hold what they say: each checks itself and exits 0.
# usage: examples_test.sh FOLDER_OF_EXAMPLES FILE
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1/attend"
"$1/retention"
"$1/train" "$2" "$scratch/model"
"$1/generate" "$scratch/model" 'The '
"$1/stream" "$scratch/model" 'The ' "$scratch/state"
