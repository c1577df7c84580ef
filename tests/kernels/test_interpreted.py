import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("test_*_triton.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_triton_kernels_in_the_interpreter(path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
