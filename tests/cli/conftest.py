"""Command lines in this process, and as processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4cli.cli.app import main

Run = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of a command line."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def start() -> Start:
    """A process of the console script, stdout and stderr piped unless given."""

    def call(*argv: object, env: dict[str, str] | None = None, **streams: object):
        code = "from nvfp4cli.cli.app import entry; entry()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (env or {}),
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    return call


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=264)
