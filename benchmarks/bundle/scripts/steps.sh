# Sourced by the scripts beside it, each of which is a list of steps: a command with a limit and a log of its own,
# within a limit of the whole. A step that fails or hangs leaves the others their time.
#
#   OUT=        folder of results, measured/SCRIPT by default: at most eight files, none of subfolders
#   ONLY=       names of steps with spaces between them; * stands for anything
#   LIMIT_S=    seconds of the whole, 590 by default; what has no time left is named at the end
#   LOG_BYTES=  of log.txt among the results, 4000000 by default: what is longer keeps its beginning and its end
#   RESUME=     a file of results of an earlier run, which this run goes on from
#   DRY=1       print each step's name, limit and command instead, and install nothing
#   TARGET=     where the bundle is, or is to be, installed; PYTHON= the interpreter that has torch

set -uo pipefail
script=$(basename "$0" .sh)
bundle=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
OUT=${OUT:-measured/$script}
ONLY=${ONLY:-*}
LIMIT_S=${LIMIT_S:-590}
DRY=${DRY:-}
TARGET=${TARGET:-/tmp/antiphon-bundle}
RESERVE_S=25 # for a step that must be killed, and for what is said at the end
LEAST_S=10   # a step that has less left is not begun
STEP_LOG_BYTES=300000
LOG_BYTES=${LOG_BYTES:-4000000}
export COLUMNS=120 # of tables
begun=$(date -u +%Y-%m-%dT%H:%M:%S)

# Seconds that are left for a step, less what is given.
remaining() { echo $((LIMIT_S - SECONDS - RESERVE_S - ${1:-0})); }

wanted() {
  local pattern
  set -f
  for pattern in $ONLY; do
    # shellcheck disable=SC2053  # a pattern is meant
    [[ $1 == $pattern ]] && { set +f; return 0; }
  done
  set +f
  return 1
}

# step NAME SECONDS COMMAND...: 1 when it failed. SHOW=N prints as many of its last lines though it went well;
# KEEPS_LOG=1 says that the command keeps its log among the results itself. Steps may run beside one another.
step() {
  local name=$1 limit=$2 start=$SECONDS verdict=ok log
  shift 2
  wanted "$name" || return 0
  if [ -n "$DRY" ]; then
    printf '%s\t%s\t%s\n' "$name" "$limit" "$(printf '%q ' "$@")"
    return 0
  fi
  if [ "$(remaining)" -lt "$LEAST_S" ]; then
    touch "$logs/$name.left"
    return 0
  fi
  [ "$limit" -le "$(remaining)" ] || limit=$(remaining)
  log=$logs/$name.log
  # An interrupt first: a deployment then stops what it started in other sessions, and two_gpus its part.
  timeout --signal INT --kill-after 20 "$limit" "$@" >"$log" 2>&1 </dev/null || verdict=FAILED
  printf '%-20s %-6s %4d s\n' "$name" "$verdict" $((SECONDS - start))
  [ -n "${KEEPS_LOG:-}" ] || keep "$name $verdict $((SECONDS - start)) s" "$log"
  if [ "$verdict" = FAILED ]; then
    touch "$logs/$name.failed"
    return 1
  fi
  [ -z "${SHOW:-}" ] || tail -n "$SHOW" "$log" | cut -b 1-600
}

# keep TITLE FILE: a log among the results, in one piece even where steps end together.
keep() {
  (
    flock 9
    {
      printf '=== %s\n' "$1"
      ends "$2" "$STEP_LOG_BYTES"
    } >>"$OUT/log.txt"
    bound
  ) 9>"$logs/lock"
}

# ends FILE BYTES: all of it, or its beginning and its end where it is longer.
ends() {
  local half=$(($2 / 2))
  if [ "$(stat -c %s "$1")" -le "$2" ]; then
    cat "$1"
  else
    head -c "$half" "$1"
    printf '\n=== the middle is left out\n'
    tail -c "$half" "$1"
  fi
}

# Hold log.txt to its bytes; in place, since two_gpus.py has it open to append to.
bound() {
  [ -f "$OUT/log.txt" ] && [ "$(stat -c %s "$OUT/log.txt")" -gt "$LOG_BYTES" ] || return 0
  ends "$OUT/log.txt" "$((LOG_BYTES - 100))" >"$logs/ends"
  cat "$logs/ends" >"$OUT/log.txt"
}

# resume NAME: what an earlier run wrote under that name.
resume() {
  [ -z "${RESUME:-}" ] || [ -n "$DRY" ] || [ "$RESUME" -ef "$OUT/$1" ] || cp "$RESUME" "$OUT/$1" || exit 1
}

names() { # ENDING: of steps that have such a file
  find "$logs" -maxdepth 1 -name "*.$1" -printf '%f\n' | sed "s/\.$1\$//" | sort
}

finish() {
  local ended=$? code name file
  code=$ended
  trap - EXIT
  jobs -p | xargs -r kill 2>/dev/null
  for file in "$logs"/*/*.log; do
    [ ! -f "$file" ] || keep "$(basename "$file")" "$file"
  done
  bound
  "$PYTHON" -m antiphon.benchmarks.bundle.figures --since "$begun" "$OUT" || code=1
  for name in $(names failed); do
    code=1
    echo "--- the end of what $name said"
    tail -n 15 "$logs/$name.log" | cut -b 1-600
  done
  if [ -n "$(names left)" ]; then
    code=1
    echo "no time was left: go on with ONLY=\"$(names left | paste -sd ' ')\""
  fi
  if [ "$ended" = 0 ] && [ "$(names log)" = kernels ] && [ -z "$(names left)" ]; then
    code=1
    echo "ONLY=\"$ONLY\" names no step; DRY=1 shows them"
  fi
  rm -rf "$logs"
  exit $code
}

[ -d src/antiphon ] || { echo "$script: run this in the root of the project's checkout, not in $PWD" >&2; exit 1; }
if [ -n "$DRY" ]; then
  BUNDLE_TARGET=$TARGET
else
  mkdir -p "$OUT"
  TARGET=$TARGET PYTHON=$PYTHON bash "$bundle/setup.sh" --whole || exit 1
  # shellcheck source=/dev/null
  source "$TARGET/env.sh"
  logs=$(mktemp -d)
  trap finish EXIT
fi
# Libraries of other sources than these are compiled anew, where there is a compiler.
ONLY='*' step kernels 200 "$PYTHON" -c 'from antiphon.benchmarks.parts import build_kernels; raise SystemExit(not build_kernels(190))'
