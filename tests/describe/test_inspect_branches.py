"""What inspect says of low-rank branches, whole and damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from breaking import edit_json, remove, replace

UP = "model.layers.1.mlp.up_proj"
SVD = ("--method", "svd", "--rank", "8", "--text", "random", "--sequences", "4",
       "--sequence-length", "32")  # fmt: skip


@pytest.fixture
def branched(tmp_path, tiny_model, quantized) -> Path:
    """A tiny Llama with branches, to be damaged."""
    source = quantized(tiny_model("llama"), "modelopt", *SVD)
    return Path(shutil.copytree(source, tmp_path / "out"))


def test_they_belong_to_their_weights(branched, inspect, tiny_model):
    found = inspect(branched, "--against", str(tiny_model("llama")))
    assert found["violations"] == []
    assert (found["layout"], found["scheme"]) == ("modelopt", "w4a16")
    assert not any("svdquant" in tensor["name"] for tensor in found["tensors"])
    n, k = 128, 64
    (up,) = (tensor for tensor in found["tensors"] if tensor["name"] == f"{UP}.weight")
    assert up["rank"] == 8
    assert up["bytes"] == n * k // 2 + n * k // 16 + 4 + 2 * 8 * (n + k)
    assert all(t["rank"] is None for t in found["tensors"] if t["format"] == "plain")


def test_errors_are_those_of_the_sums(branched, inspect, tiny_model):
    """Each weight loses a part to its branch, so that its codes alone are far from the source."""

    def worst() -> float:
        found = inspect(branched, "--against", str(tiny_model("llama")))["against"]
        return next(t["snr_db"] for t in found["tensors"] if t["name"] == f"{UP}.weight")

    whole = worst()
    replace(branched, f"{UP}.svdquant_lora_b", torch.zeros_like)
    assert worst() < whole - 6


def _nan(half: torch.Tensor) -> torch.Tensor:
    half[0, 0] = float("nan")
    return half


@pytest.mark.parametrize("half", ["svdquant_lora_a", "svdquant_lora_b"])
@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (remove, "part-missing"),
        (lambda folder, name: replace(folder, name, torch.Tensor.float), "part-dtype"),
        (lambda folder, name: replace(folder, name, lambda t: t[:-1, :-1]), "part-shape"),
        (lambda folder, name: replace(folder, name, lambda t: t[0]), "part-shape"),
        (lambda folder, name: replace(folder, name, _nan), "not-finite"),
    ],
)
def test_a_damaged_half_is_named(branched, rules, half, damage: Callable, rule):
    damage(branched, f"{UP}.{half}")
    found = rules(branched)
    # Of two halves that do not fit each other the second is the one said to be wrong.
    assert {rule for _, rule in found} == {rule}
    assert all(tensor.startswith(f"{UP}.svdquant_lora_") for tensor, _ in found)


def test_a_configuration_without_them_lets_engines_leave_them_out(branched, rules):
    for name in ("config.json", "hf_quant_config.json"):
        edit_json(branched / name, lambda value: _algorithm(value, "W4A16_NVFP4"))
    assert rules(branched) == {(None, "config-scheme")}


def test_a_configuration_that_promises_more_than_there_is(branched, rules):
    for half in ("svdquant_lora_a", "svdquant_lora_b"):
        remove(branched, f"{UP}.{half}")
    assert rules(branched) == {(None, "config-scheme")}


def _algorithm(value: dict, name: str) -> None:
    value.get("quantization_config", value.get("quantization"))["quant_algo"] = name
