#!/usr/bin/env bash
# The main job on a real text: trains a small retention model on the King James Bible, compares it with
# gzip on books that it has not seen, and streams from it with a state that never grows.
# usage: demo.sh [SECONDS]    to train for, 120 by default, and then at least 300 iterations: on a busy
#                             machine fewer would not be below gzip
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-120} least=$([ $# -eq 0 ] && echo 300 || echo 20)
if [ $# -gt 1 ] || ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
  echo "demo: SECONDS is one whole number from 1 on, not '$*'" >&2
  exit 2
fi
ouzel=build/release/ouzel
out=build/demo
heldout_books='Ruth|Est|Jonah|Rom|Heb'
layers=4 dim=128 heads=4
train=("$ouzel" train --data "$out/train.txt" --model retnet --layers "$layers" --dim "$dim"
       --heads "$heads" --context 256 --batch 8 --lr 6e-3 --warmup 50 --validation 0.01 --seed 1)

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
calculate() { python3 -c "print($1)"; }

rm -rf "$out"
mkdir -p "$out"

say 'The text'
bible -f 'gen1:1-rev22:21' </dev/null >"$out/bible.txt"
verses=$(wc -l <"$out/bible.txt")
[ "$verses" -eq 31102 ] || { echo "demo: bible-kjv gave $verses verses, expected 31102" >&2; exit 1; }
# A line is "1Sm3:16 Then Eli called Samuel, ...": the reference goes, it chose the book.
reference='^[0-9]?[A-Za-z]+[0-9]+:[0-9]+ '
grep -vE "^($heldout_books)[0-9]" "$out/bible.txt" | sed -E "s/$reference//" >"$out/train.txt"
grep -E "^($heldout_books)[0-9]" "$out/bible.txt" | sed -E "s/$reference//" >"$out/heldout.txt"
echo "$verses verses: $(wc -c <"$out/train.txt") bytes to learn from," \
     "$(wc -c <"$out/heldout.txt") held out (Ruth, Esther, Jonah, Romans, Hebrews)"

say 'Training'
start=$(date +%s.%N)
"${train[@]}" --iterations 20 --out "$out/timing" --quiet
pace=$(calculate "($(date +%s.%N) - $start) / 20")
iterations=$(calculate "max($least, round($seconds / $pace))")
rm -rf "$out/timing"
train+=(--iterations "$iterations" --out "$out/model")
fewer=$([ "$iterations" -gt "$least" ] || echo ', as fewer would teach too little')
echo "$iterations iterations$fewer: about $(calculate "round($iterations * $pace)") seconds by the twenty that were timed;"
echo "to train the same model again:"
echo "  ${train[*]} --overwrite"
"${train[@]}"

say 'Bits per byte of the books that it has not seen'
"$ouzel" eval -m "$out/model" --data "$out/heldout.txt" --json --quiet >"$out/eval.json"
gzip -9 <"$out/heldout.txt" >"$out/heldout.txt.gz"
below=true
python3 - "$out" <<'PYTHON' || below=false
import json, os, sys
out = sys.argv[1]
result = json.load(open(f"{out}/eval.json"))
size = os.path.getsize(f"{out}/heldout.txt")
packed = 8 * os.path.getsize(f"{out}/heldout.txt.gz") / size
print(f"  gzip -9                              {packed:.3f}")
print(f"  the model, windows from zero         {result['bits_per_byte']:.3f}")
print(f"  the model, one state carried through {result['bits_per_byte_carried']:.3f}")
sys.exit(result["bits_per_byte_carried"] >= packed)
PYTHON

say 'It goes on from "And the LORD said unto"'
generate=("$ouzel" generate -m "$out/model" --quiet)
"${generate[@]}" -p 'And the LORD said unto' -n 300 --temperature 0.7 --seed 7 \
  --state-out "$out/after300.state" | tee "$out/first.txt"
echo

say 'Its state was saved; resumed, it goes on:'
"${generate[@]}" --state-in "$out/after300.state" -n 100 | tee "$out/second.txt"
echo
"${generate[@]}" -p 'And the LORD said unto' -n 400 --temperature 0.7 --seed 7 >"$out/unbroken.txt"
cat "$out/first.txt" "$out/second.txt" | cmp - "$out/unbroken.txt"
echo '(the same bytes as 400 generated without a stop)'

say 'Size of the saved state after reading so many bytes'
printf '%12s %16s %34s\n' bytes 'state file' 'KV cache of softmax, same shape'
for fed in 1 1000 100000; do
  head -c "$fed" "$out/train.txt" | "${generate[@]}" -p - -n 0 --state-out "$out/fed$fed.state"
  printf '%12s %16s %34s\n' "$fed" "$(wc -c <"$out/fed$fed.state")" \
    "$(calculate "$fed * $layers * 2 * $dim * 4")"
done
if ! $below; then
  printf '\n%s\n' "demo: everything ran, but the model is not below gzip -9, which is what the demo is to show:
$seconds seconds were too few for it on this machine. Give it more: ./run demo $((seconds < 30 ? 120 : 4 * seconds))" >&2
  exit 1
fi
