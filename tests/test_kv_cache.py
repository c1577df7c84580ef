"""The option --kv-cache: which scales are written for which model, and what is refused."""

from pathlib import Path

import pytest
import torch
from command import quantize
from safetensors.torch import load_file, save_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.describe.report import describe

SHORT = ("--text", "random", "--sequences", "4", "--sequence-length", "32")
FP8 = ("--kv-cache", "fp8", *SHORT)
ATTENTION = "model.layers.0.self_attn"


def scales(folder: Path) -> set[str]:
    names = open_checkpoint(folder).tensors
    return {name for name in names if name.endswith((".k_scale", ".v_scale"))}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("compressed-tensors", ("k_scale", "v_scale")),
        ("modelopt", ("k_proj.k_scale", "v_proj.v_scale")),
    ],
)
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("llama", "model.layers.{}.self_attn"),
        ("phi3", "model.layers.{}.self_attn"),  # whose projections are one tensor
        ("gpt2", "transformer.h.{}.attn"),
    ],
)
def test_every_attention_has_two_scales(layout, names, model_type, attention, tiny_model, tmp_path):
    out = tmp_path / "out"
    assert quantize(tiny_model(model_type), out, "--layout", layout, *FP8) == 0
    expected = {f"{attention.format(i)}.{name}" for i in range(2) for name in names}
    assert scales(out) == expected
    assert main(["inspect", str(out), "--strict"]) == 0


@pytest.mark.parametrize("layout", ["torchao", "comfy"])
def test_layouts_without_a_place_for_scales_refuse(layout, tiny_model, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize(tiny_model("llama"), out, "--layout", layout, *FP8) == 1
    assert f"The {layout} layout cannot hold the scales of a KV cache" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("deepseek_v3", "names no value projection"),
        ("falcon_h1", "keeps the state of a convolution beside keys and values"),
    ],
)
def test_caches_of_another_kind_are_refused(model_type, sentence, tiny_model, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize(tiny_model(model_type), out, "--layout", "modelopt", *FP8) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert sentence in message
    assert message.endswith("leave out --kv-cache.")
    assert not out.exists()


@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_inspect_names_a_bad_scale_beside_fused_projections(kind, value, tiny_model, tmp_path):
    out = tmp_path / "out"
    assert quantize(tiny_model("phi3"), out, "--layout", "modelopt", *FP8) == 0
    name = f"{ATTENTION}.{kind}_proj.{kind}_scale"
    tensors = load_file(out / "model.safetensors")
    if value is None:
        del tensors[name]
        expected = (None, "kv-cache")
    else:
        tensors[name] = torch.tensor(value)
        expected = (name, "scale-value")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    found = describe(open_checkpoint(out)).violations
    assert [(one.tensor, one.rule) for one in found] == [expected]


def test_inspect_misses_both_scales_of_a_layer(tiny_model, tmp_path):
    out = tmp_path / "out"
    assert quantize(tiny_model("phi3"), out, "--layout", "modelopt", *FP8) == 0
    lost = {f"{ATTENTION}.{kind}_proj.{kind}_scale" for kind in ("k", "v")}
    tensors = load_file(out / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (violation,) = describe(open_checkpoint(out)).violations
    assert violation.rule == "kv-cache"
    assert f"{ATTENTION} lacks a k_scale or a v_scale" in violation.message
