#!/usr/bin/env bash
# Run the tests of the kernels and of the GPU path on a CUDA device, compiled. Arguments go to pytest; PYTHON names another
# interpreter than the environment's.
set -euo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
exec "${PYTHON:-python}" -m pytest -m gpu tests/kernels tests/test_pipeline_gpu.py \
  tests/test_pipeline_experts.py tests/test_calibrated.py "$@"
