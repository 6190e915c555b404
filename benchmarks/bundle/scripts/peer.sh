#!/usr/bin/env bash
# This project and another system at the same points on the same GPUs; RESUME=FILE goes on.
#   LAYOUTS=TP2 bash BUNDLE/peer.sh [options of antiphon bench beside]      steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"

resume beside.json
SHOW=40 step peer 565 "$PYTHON" -m antiphon.cluster.cli bench beside --python "$BUNDLE_TARGET/peer-python" \
  --layouts "${LAYOUTS:-TP1}" --limit "$(remaining 45)s" --logs "${logs:-/tmp}/peer" --output "$OUT/beside.json" "$@"
