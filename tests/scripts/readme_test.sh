#!/usr/bin/env bash
# Every `ouzel` command of the README works as pasted, in their order.
# usage: readme_test.sh README FOLDER_OF_OUZEL
set -euo pipefail
readme=$(realpath "$1")
export PATH=$(realpath "$2"):$PATH
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp "$readme" "$scratch/README.md"
ln -s "$(dirname "$readme")/tests" "$scratch/tests"
mkdir "$scratch/build"
cd "$scratch"
mapfile -t commands < <(grep -E '^    ouzel [a-z]' README.md | sed -E 's/^    //; s/ +# .*//')
[ ${#commands[@]} -ge 5 ]
for command in "${commands[@]}"; do
  echo "\$ $command"
  bash -c "$command" </dev/null >output 2>errors || { cat output errors; exit 1; }
  [ -s output ] || [[ $command == *train* ]] || { echo "it printed nothing"; exit 1; }
done
