"""`nvfp4 quantize` of a hub id, against a local server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, Repo, serve

from nvfp4cli.cli.app import main

MODEL = "org/tiny"


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    # Large beside the 100 kB that huggingface_hub asks for in the hope that the header fits in.
    return tiny_model("llama", vocab=264, hidden=256, intermediate=1024, shards=2)


@pytest.fixture
def server(llama: Path) -> Iterator[HubServer]:
    with serve() as running:
        files = {path.name: path.read_bytes() for path in llama.iterdir()}
        running.repos[MODEL] = Repo({"main": files})
        yield running


@pytest.fixture
def nvfp4(server: HubServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*argv: object, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        kept |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), **env}
        command = [sys.executable, "-c", "from nvfp4cli.cli.app import entry; entry()"]
        return subprocess.run(
            [*command, *map(str, argv)], env=kept, capture_output=True, text=True, check=False
        )

    return run


def test_a_dry_run_fetches_headers_only(nvfp4, server, llama, tmp_path, capsys):
    result = nvfp4("quantize", MODEL, tmp_path / "out", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    assert main(["quantize", str(llama), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    assert json.loads(result.stdout) == json.loads(capsys.readouterr().out)
    shards = [r for r in server.take_log() if r.path.endswith(".safetensors")]
    assert shards
    size = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    assert sum(request.sent for request in shards) < size / 2
    assert not (tmp_path / "out").exists()


def test_the_output_is_that_of_the_folder(nvfp4, llama, tmp_path):
    result = nvfp4("quantize", MODEL, tmp_path / "hub", "--layout", "modelopt")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "folder"
    assert main(["quantize", str(llama), str(folder), "--layout", "modelopt"]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "hub").iterdir()}
    for name in names - {"nvfp4.yaml"}:  # which names the model as the user did
        assert (tmp_path / "hub" / name).read_bytes() == (folder / name).read_bytes()


def test_offline_without_a_copy_is_one_sentence(nvfp4, tmp_path):
    for flag in ("--dry-run", "--resume"):
        result = nvfp4("quantize", MODEL, tmp_path / "out", flag, HF_HUB_OFFLINE="1")
        assert result.returncode == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert "HF_HUB_OFFLINE" in result.stderr
