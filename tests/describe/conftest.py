"""Tiny quantised checkpoints, and `inspect` as a user runs it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvfp4cli.cli.app import main


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized(source, layout, *options) -> folder`, not to be written to."""
    made: dict[tuple, Path] = {}

    def make(source: Path, layout: str, *options: str) -> Path:
        key = (source, layout, *options)
        if key not in made:
            out = tmp_path_factory.mktemp(layout) / "out"
            assert main(["quantize", str(source), str(out), "--layout", layout, *options]) == 0
            made[key] = out
        return made[key]

    return make


@pytest.fixture
def broken(tmp_path: Path, tiny_model, quantized) -> Callable[[str], Path]:
    """`broken(layout) -> folder`: a quantised tiny Llama of one's own, to be damaged."""

    def copy(layout: str) -> Path:
        return Path(shutil.copytree(quantized(tiny_model("llama"), layout), tmp_path / layout))

    return copy


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`inspect(folder, *options)`: the JSON document of the command."""

    def run(folder: Path, *options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["inspect", str(folder), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    return run


@pytest.fixture
def rules(inspect) -> Callable[..., set[tuple[str | None, str]]]:
    """`rules(folder, *options)`: the violations as (tensor, rule)."""

    def run(folder: Path, *options: str) -> set[tuple[str | None, str]]:
        return {(v["tensor"], v["rule"]) for v in inspect(folder, *options)["violations"]}

    return run
