#!/usr/bin/env bash
# The split against colocated engines on two GPUs, by HTTP; RESUME=FILE goes on.
#   MODEL=gpt-oss-120b bash BUNDLE/split.sh [options of antiphon bench split]      steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"
MODEL=${MODEL:-gpt-oss-20b}
weights=${WEIGHTS:-/dev/shm/antiphon-$MODEL}

resume split.json
if [ -n "$DRY" ] || [ ! -e "$weights/config.json" ]; then
  step synthesize 180 "$PYTHON" -m antiphon.cluster.cli checkpoint synthesize "$weights" --like "$MODEL" --device cuda ||
    rm -rf "$weights"
fi
SHOW=40 step split 560 "$PYTHON" -m antiphon.cluster.cli bench split --config "configs/two-gpus-${MODEL#gpt-oss-}.yaml" \
  --model "$weights" --mixes long-in,chat,long-out --chunks 4096,1024 --rate expected --step 1.2 --refine 0 \
  --duration 9s,chat=10s,long-out=14s --warmup 2s,chat=3s,long-out=4s --drain 20s --limit "$(remaining 30)s" \
  --output "$OUT/split.json" "$@"
