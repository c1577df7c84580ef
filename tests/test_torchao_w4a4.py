"""W4A4 in the torchao layout: activations under dynamic scales, from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from command import contents, quantize

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import open_weights
from nvfp4cli.runtime.served import Served, serve, served

WORDS = "The harbour lay still under a thin grey mist when the first boats came home. "
SHORT = ("--sequences", "8", "--sequence-length", "32")


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40, encoding="utf-8")
    return str(path)


@pytest.fixture
def dynamic(llama: Path, tmp_path: Path) -> Path:
    out = tmp_path / "dynamic"
    assert quantize(llama, out, "--scheme", "w4a4", "--layout", "torchao") == 0
    return out


def test_it_needs_no_text_and_holds_no_scale_of_an_input(llama, dynamic, tmp_path):
    assert quantize(llama, tmp_path / "w4a16", "--layout", "torchao") == 0
    ours, plain = (open_weights(open_checkpoint(f)) for f in (dynamic, tmp_path / "w4a16"))
    assert (ours.dynamic, ours.activations, plain.dynamic) == (True, False, False)
    assert "calibration" not in yaml.safe_load((dynamic / "nvfp4.yaml").read_text())
    assert ours.checkpoint.tensors.keys() == plain.checkpoint.tensors.keys()
    for name in plain.names:
        assert torch.equal(ours.tensor(name), plain.tensor(name))


def test_inspect_reads_it_back(dynamic, capsys):
    capsys.readouterr()
    assert main(["inspect", str(dynamic), "--strict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "w4a4"


def test_the_engine_is_named_that_cannot_multiply_it(llama, tmp_path, capsys):
    argv = ("--scheme", "w4a4", "--layout", "torchao", "--dry-run")
    assert quantize(llama, tmp_path / "out", *argv) == 0
    assert "torchao multiplies 4-bit activations on Blackwell GPUs only" in capsys.readouterr().err
    assert (
        quantize(llama, tmp_path / "out", "--scheme", "w4a4", "--dry-run", "--layout", "modelopt")
        == 0
    )
    assert "Blackwell" not in capsys.readouterr().err


def test_activations_are_rounded_as_it_is_served(dynamic, tmp_path):
    ids = torch.arange(16)[None]
    with torch.no_grad():
        logits = {
            mode: serve(dynamic, mode, dtype=torch.float32, device="cpu")(input_ids=ids).logits
            for mode in ("declared", "four-over-six", "none")
        }
    assert isinstance(serve(dynamic, "declared", dtype=torch.float32, device="cpu"), Served)
    assert "dynamic scales" in served(dynamic, "declared")
    assert not torch.equal(logits["declared"], logits["none"])
    assert not torch.equal(logits["declared"], logits["four-over-six"])


def kl(out: Path, source: Path, text: str, capsys: pytest.CaptureFixture[str]) -> float:
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--text", text, "--context", "32"]
    capsys.readouterr()
    assert main([*argv, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["kl_divergence"]


def test_gptq_meets_the_activations_that_are_served(llama, dynamic, tmp_path, text, capsys):
    out = tmp_path / "gptq"
    options = ("--layout", "torchao", "--method", "gptq", "--text", text, *SHORT)
    assert quantize(llama, out, "--scheme", "w4a4", *options) == 0
    assert quantize(llama, tmp_path / "w4a16", *options) == 0
    ours, plain = (open_weights(open_checkpoint(f)) for f in (out, tmp_path / "w4a16"))
    assert ours.dynamic
    assert any(not torch.equal(ours.tensor(n), plain.tensor(n)) for n in plain.names)
    assert kl(out, llama, text, capsys) < 0.8 * kl(dynamic, llama, text, capsys)


def test_only_torchao_takes_it_over(dynamic, tmp_path, capsys):
    for layout in ("compressed-tensors", "modelopt", "comfy"):
        out = tmp_path / layout
        assert main(["convert", str(dynamic), str(out), "--layout", layout]) == 1
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"under dynamic scales, which the {layout} layout cannot express" in message
        assert not out.exists()
    assert main(["convert", str(dynamic), str(tmp_path / "same"), "--layout", "torchao"]) == 0
    assert contents(tmp_path / "same") == contents(dynamic)
