#!/usr/bin/env bash
# Everything that must hold, from a clean clone: environment, lint, types, tests.
#
#   ./scripts/test.sh                     all of it
#   ./scripts/test.sh -k swizzle -x       arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

environment dev --constraint "$PINS" --editable "$ROOT[dev,plots]"

say lint
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .

say types
"$PYTHON" -m mypy

say tests
# One process per core, and one thread per process.
OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n auto --maxprocesses 8 "$@"
