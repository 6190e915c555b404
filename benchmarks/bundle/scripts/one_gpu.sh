#!/usr/bin/env bash
# What one H200 is needed for: tests, the sanitizer, both models in the engine, and how long they take to load.
#   bash BUNDLE/one_gpu.sh      ONLY="tests-* choices-20b" picks; steps.sh says what else may be set
source "$(dirname "$0")/steps.sh"

tests() { # NAME TEST...: files of tests/gpu, by what their names have after test_
  local name=$1
  shift
  step "tests-$name" 240 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider "${@/#/tests/gpu/test_}"
}

choices() { # NAME MODEL DECODE: points as one_gpu.py takes them
  step "choices-$1" 120 "$PYTHON" -m antiphon.benchmarks.model_choices --model "$2" --decode "$3" --seconds 115 \
    --out "$OUT"
}

load() { # NAME MODEL SECONDS
  local folder=/dev/shm/antiphon-load-$1
  step "load-$1" "$3" "$PYTHON" -m antiphon.benchmarks.load "$folder" --like "$2" --kinds converted --repeats 2 \
    --out "$OUT/load.json"
  [ -n "$DRY" ] || rm -rf "$folder"
}

decode=(decode_attention.py decode_kernels.py moe_decode.py router_cuda.py)
chunks=(prefill_attention.py moe_chunks.py chunk_graphs.py fp8_projection.py)
model=(cuda_transformer.py engine_cuda.py)
start=(weight_cache_cuda.py built_ahead.py)
others=()
for file in tests/gpu/test_*.py; do
  file=${file#tests/gpu/test_}
  [[ " ${decode[*]} ${chunks[*]} ${model[*]} ${start[*]} " == *" $file "* ]] || others+=("$file")
done

# Beside one another: what is tested is not timed.
tests decode "${decode[@]}" &
tests chunks "${chunks[@]}" &
tests model "${model[@]}" &
tests start "${start[@]}" &
tests others "${others[@]}" &
wait
choices 20b gpt-oss-20b '8192:1,8,32,128;32768:1,32'
choices 120b gpt-oss-120b '8192:1,8,32,64'
step sanitizer-memcheck 200 "$PYTHON" tests/gpu/sanitizer/run_sanitizer.py --tools memcheck
step sanitizer-racecheck 400 "$PYTHON" tests/gpu/sanitizer/run_sanitizer.py --tools racecheck
load 20b gpt-oss-20b 120
load 120b gpt-oss-120b 300
