#!/usr/bin/env bash
# What four or eight H200s of one host are needed for: agreement with one GPU, both models in the layouts that take
# four GPUs and eight, and the deployment of eight as people use it. RESUME=FILE goes on with the sweep.
#   bash BUNDLE/many_gpus.sh    GPUS=8 instead of how many there are; steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"

gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
ranks=4 layouts='TP4,TP4 EP4'
[ "$gpus" -lt 8 ] || ranks=8 layouts+=',TP8'

agreement() { # NAME MODEL RANKS: argmax of the demo model, or of four layers of a published shape
  step "agreement-$1" 120 "$PYTHON" -m antiphon.benchmarks.rank_steps --parts agreement --model "$2" --ranks "$3" \
    --out "$OUT/records.json"
}

step sums 60 "$PYTHON" -m antiphon.benchmarks.rank_steps --parts sums --ranks "$ranks" --out "$OUT/records.json"
agreement demo gpt-oss-tiny 4
agreement 20b gpt-oss-20b "$ranks"
agreement 120b gpt-oss-120b "$ranks"
resume sweep.json
SHOW=40 step sweep 560 "$PYTHON" -m antiphon.cluster.cli bench sweep --layouts "$layouts" --at-once --enough 4s \
  --steps 64 --limit "$(remaining 40)s" --output "$OUT/sweep.json"
if [ -n "$DRY" ] || [ "$gpus" -ge 8 ]; then
  weights=/dev/shm/gpt-oss-120b
  step synthesize-120b 150 "$PYTHON" -m antiphon.cluster.cli checkpoint synthesize "$weights" --like gpt-oss-120b \
    --device cuda
  for file in eight-gpus-120b eight-gpus-120b-many-prompts; do
    step "served-$file" 240 "$PYTHON" -m antiphon.benchmarks.served_pair --config "configs/$file.yaml" \
      --model "$weights" --split-only --out "$OUT/records.json"
  done
fi
