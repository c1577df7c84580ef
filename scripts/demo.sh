#!/usr/bin/env bash
# Quantise a real model and measure what that costs, from nothing.
#
#   ./scripts/demo.sh          SmolLM2-135M, which a package index carries
#   ./scripts/demo.sh MODEL    any checkpoint folder or hub id
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[[ $# -le 1 ]] || die "takes one model: a checkpoint folder or a hub id."

environment demo --constraint "$PINS" --editable "$ROOT"
nvfp4=${PYTHON%/*}/nvfp4
if [[ $# -eq 1 ]]; then MODEL=$1; else smollm2; fi
out=$ENVS/demo/$(basename "$MODEL")-NVFP4
rm -rf "$out"
mkdir -p "$(dirname "$out")"

show() {
    say "nvfp4 $*"
    "$nvfp4" "$@"
}

show quantize "$MODEL" "$out" --recipe vllm
show inspect "$out"
# Few tokens, so that two cores need two minutes; leave out --max-tokens for figures to quote.
show eval "$out" --ppl --baseline "$MODEL" --context 512 --max-tokens 2048
