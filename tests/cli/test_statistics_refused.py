"""The option --stats: files that do not fit the run, before anything is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nvfp4cli.cli.app import main

SHORT = ("--text", "random", "--sequences", "4", "--sequence-length", "32")
RUN = ("--layout", "modelopt", "--scheme", "w4a4", "--kv-cache", "fp8")


@pytest.fixture
def stats(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "stats"
    argv = ("calibrate", str(tiny_model("llama")), str(path), *RUN[2:], *SHORT)
    assert main([*argv, "--device", "cpu"]) == 0
    return path


def edited(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    return path


def refused(
    capsys: pytest.CaptureFixture[str], folder: Path, path: Path, out: Path, *more: str
) -> str:
    capsys.readouterr()
    assert quantize(folder, out, *RUN, "--stats", str(path), *more) == 1
    assert not out.exists()
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert message.endswith(".")
    return message


def test_no_file_of_statistics(tiny_model, tmp_path, capsys):
    folder = tiny_model("llama")
    (tmp_path / "text").write_text("no statistics")
    for path in (tmp_path / "missing", tmp_path / "text", folder / "model.safetensors"):
        message = refused(capsys, folder, path, tmp_path / "out")
        assert f"{path} holds no statistics (" in message
        assert "name a file that `nvfp4 calibrate` wrote" in message


def test_another_model(stats, tiny_model, tmp_path, capsys):
    message = refused(capsys, tiny_model("qwen3"), stats, tmp_path / "out")
    assert "was made with the model type llama, and this run has qwen3: calibrate again" in message


def test_more_than_was_seen(stats, tiny_model, tmp_path, capsys):
    message = refused(capsys, tiny_model("llama"), stats, tmp_path / "out", "--include", "lm_head")
    assert "know nothing of the inputs of lm_head: calibrate again" in message


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1.0")]
)
@pytest.mark.parametrize("number", [0, 1])
def test_magnitudes_that_are_none(value, shown, number, stats, tiny_model, tmp_path, capsys):
    names = [n for n, t in load_file(stats).items() if t.numel() == 1 and t.is_floating_point()]
    name = (min(names), max(names))[number]
    edited(stats, lambda tensors: tensors.update({name: torch.tensor(value)}))
    message = refused(capsys, tiny_model("llama"), stats, tmp_path / "out")
    assert f"a largest magnitude of {shown}: calibrate again" in message


def test_a_layer_whose_cache_was_not_watched(stats, tiny_model, tmp_path, capsys):
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [
            n for n in tensors if n.startswith("model.layers.1.self_attn.") and "proj" not in n
        ]:
            del tensors[name]

    message = refused(capsys, tiny_model("llama"), edited(stats, drop), tmp_path / "out")
    assert "know nothing of the keys of model.layers.1.self_attn: calibrate again" in message


def test_a_file_that_is_not_whole(stats, tiny_model, tmp_path, capsys):
    stats.write_bytes(stats.read_bytes()[:-64])
    assert "holds no statistics" in refused(capsys, tiny_model("llama"), stats, tmp_path / "out")


def test_a_layout_with_dynamic_scales_needs_none(stats, tiny_model, tmp_path):
    options = ("--layout", "torchao", "--scheme", "w4a4", "--method", "mse", "--stats", str(stats))
    assert quantize(tiny_model("llama"), tmp_path / "out", *options) == 0
    assert main(["inspect", str(tmp_path / "out"), "--strict"]) == 0
