#!/usr/bin/env bash
# ./run refuses words that it, or ctest, would ignore, before anything is built; and no others.
# usage: run_test.sh RUN
set -euo pipefail
run=$1
for words in 'test --al' 'test softmax' 'test -R=softmax' 'test -Rsoftmax' 'test --labels-regex fast' \
  'demo long' 'demo 0' 'demo 1 2' 'build all' 'fuzz 1s' 'tset'; do
  code=0
  # shellcheck disable=SC2086
  said=$("$run" $words 2>&1 >/dev/null) || code=$?
  if [ $code -ne 2 ] || [[ $said != *./run* ]]; then
    echo "./run $words: $code: $said" >&2
    exit 1
  fi
done
eval "$(sed -n '/^check_ctest()/,/^}/p' "$run")"
for words in '' '-R softmax' '-j4 -VV' '-L fast -E x --output-on-failure' '--no-tests=error' '--repeat until-fail:3'; do
  # shellcheck disable=SC2086
  check_ctest $words
done
