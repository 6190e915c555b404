#!/usr/bin/env bash
# Installs the parts of this bundle that are here, once: run it in the checkout's root, as often as parts come.
#
#   bash BUNDLE/setup.sh [--whole]      TARGET= the folder to install into, PYTHON= the interpreter with torch
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d src/antiphon ] || { echo "setup: run this in the root of the project's checkout, not in $PWD" >&2; exit 1; }
exec env PYTHONPATH=src "${PYTHON:-python3}" -m antiphon.benchmarks.bundle.install "$here" \
  --into "${TARGET:-/tmp/antiphon-bundle}" "$@"
