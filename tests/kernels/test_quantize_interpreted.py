import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("test_quantize_triton.py")


def test_the_triton_encoder_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
