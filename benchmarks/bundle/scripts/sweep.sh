#!/usr/bin/env bash
# Prompts and decode steps of both models in every layout that fits the GPUs here; RESUME=FILE goes on.
#   bash BUNDLE/sweep.sh [options of antiphon bench sweep]      steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"

resume sweep.json
SHOW=40 step sweep 560 "$PYTHON" -m antiphon.cluster.cli bench sweep --at-once --enough 4s --steps 64 \
  --limit "$(remaining 40)s" --output "$OUT/sweep.json" "$@"
