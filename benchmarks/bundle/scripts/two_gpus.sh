#!/usr/bin/env bash
# What two H200s of one host are needed for: the parts of benchmarks/two_gpus.py, each a step, and workers of the
# larger model. Not all have time in one run; parts that start a deployment need a bundle of kind "served".
#   bash BUNDLE/two_gpus.sh     ONLY="sums hand-off" picks; steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"

parts=$(PYTHONPATH=${PYTHONPATH:-src} "$PYTHON" -m antiphon.benchmarks.two_gpus --out "$OUT" --list) || exit 1
while IFS= read -r line; do
  if [[ ! $line =~ ^\ *([0-9]+)\ s\ \ ([^:]+): ]]; then
    echo "two_gpus: cannot read '$line'" >&2
    exit 1
  fi
  limit=$((BASH_REMATCH[1] + 20)) part=${BASH_REMATCH[2]} name=${BASH_REMATCH[2]//,/}
  if [ -z "$DRY" ] && [ ! -d "$BUNDLE_TARGET/site/ray" ] && [[ $line =~ served_pair|test_rank_end ]]; then
    echo "$part needs a bundle of kind served"
    continue
  fi
  KEEPS_LOG=1 step "${name// /-}" "$limit" "$PYTHON" -m antiphon.benchmarks.two_gpus --out "$OUT" --only "$part"
done <<<"$parts"
step workers-120b 170 "$PYTHON" -m antiphon.benchmarks.worker_pair --model gpt-oss-120b --tokens 1024,8192,32768 \
  --seconds 8 --repeats 3 --out "$OUT/records.json"
