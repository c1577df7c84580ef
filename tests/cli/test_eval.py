"""The command eval: what it refuses before a model is loaded, and what it prints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4cli.cli import evaluating

TEXT = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


@pytest.fixture
def quantized(run, llama: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert run("quantize", llama, out, "--layout", "modelopt")[0] == 0
    return out


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: what is tested comes before."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluating, "load", load)


def refused(run, *argv: object) -> str:
    """The one line of an eval that ends with 1 before it measures anything."""
    code, stdout, stderr = run("eval", *argv, "--ppl")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    return stderr


def test_json_of_a_measurement(run, quantized, llama, text):
    argv = ("eval", quantized, "--baseline", llama, "--ppl", "--text", text, "--context", "32")
    code, stdout, stderr = run(*argv, "--stride", "16", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert (found["context"], found["stride"], found["batch_size"]) == (32, 16, 1)
    assert found["kl_divergence"] > 0
    assert found["activations"] == "none"
    assert f"Measuring on {text}" in stderr


def test_a_quantised_baseline_is_refused(run, quantized, llama, text, unloaded):
    sentence = f"The baseline {quantized} is itself quantised: name the checkpoint"
    assert sentence in refused(run, llama, "--baseline", quantized, "--text", text)
    assert sentence in refused(run, quantized, "--baseline", quantized, "--text", text)


def test_comfy_says_nothing_in_its_config(run, llama, tmp_path, text, unloaded):
    out = tmp_path / "comfy"
    assert run("quantize", llama, out, "--layout", "comfy")[0] == 0
    assert "is itself quantised" in refused(run, llama, "--baseline", out, "--text", text)


def test_a_baseline_of_another_vocabulary_is_refused(
    run, llama, text, tiny_model: Callable[..., Path], unloaded
):
    other = tiny_model("llama", vocab=300)
    stderr = refused(run, llama, "--baseline", other, "--text", text)
    assert "The baseline's vocabulary has 300 entries and the model's 264" in stderr


def test_a_baseline_of_another_model_type_is_refused(
    run, llama, text, tiny_model: Callable[..., Path], unloaded
):
    other = tiny_model("qwen2", vocab=264)
    stderr = refused(run, llama, "--baseline", other, "--text", text)
    assert "The baseline is a qwen2 model and the checkpoint a llama model: name the" in stderr


def with_tokenizer(source: Path, folder: Path, change: Callable[[dict], object]) -> Path:
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_baseline_that_reads_other_tokens_is_refused(run, llama, tmp_path, text, unloaded):
    def swap(tokenizer: dict) -> None:
        ids = tokenizer["model"]["vocab"]
        ids["q"], ids["z"] = ids["z"], ids["q"]

    other = with_tokenizer(llama, tmp_path / "other", swap)
    stderr = refused(run, llama, "--baseline", other, "--text", text)
    assert f"The tokenizer of the baseline {other} reads the text as other tokens" in stderr


def test_tokens_that_the_model_lacks_are_refused(run, llama, tmp_path, text, unloaded):
    word = {"id": 4000, "content": "fox", "special": False, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    model = with_tokenizer(llama, tmp_path / "more", lambda t: t["added_tokens"].append(word))
    stderr = refused(run, model, "--text", text)
    assert "and the model's vocabulary has 264 entries" in stderr


def test_windows_that_cannot_work_are_refused_first(run, llama, tmp_path, text, unloaded):
    shutil.copytree(llama, tmp_path / "short")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 64})
    )
    model = tmp_path / "short"
    stderr = refused(run, model, "--text", text, "--context", "65")
    assert "context of 65 tokens is longer than the model's 64" in stderr
    stderr = refused(run, model, "--text", text, "--stride", "65")  # the context is 64 then
    assert "stride of 65 in a context of 64 tokens" in stderr


def test_a_text_that_cannot_be_read_is_said_before_a_download(run, monkeypatch):
    def resolve(*_: object) -> None:
        raise AssertionError("the model was looked for")

    monkeypatch.setattr(evaluating.hub, "resolve", resolve)
    assert "gone cannot be read (No such file or directory)" in refused(
        run, "org/model", "--text", "gone"
    )
