"""The command convert: scales of KV caches, in the forms that tools write them in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import open_weights
from nvfp4cli.layouts.record import CacheScales

# Not powers of two, and not what bfloat16 holds.
SCALES = {"model.layers.0.self_attn": CacheScales(0.0123456789, 0.7),
          "model.layers.1.self_attn": CacheScales(1.1, 0.0003)}  # fmt: skip
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ATTENTION = "model.layers.0.self_attn"


def bare(attention: str, kind: str) -> str:
    return f"{attention}.{kind}_scale"


def inside(attention: str, kind: str) -> str:
    return f"{attention}.{kind}_proj.{kind}_scale"


def fused(attention: str, kind: str) -> str:
    return f"{attention}.qkv_proj.{kind}_scale"


def scaled(
    folder: Path,
    name: Callable[[str, str], str],
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (),
) -> dict[str, CacheScales]:
    """Give a checkpoint cache scales and their declaration; returns them as they are stored."""
    added: dict[str, Tensor] = {}
    for attention, scales in SCALES.items():
        for kind, value in (("k", scales.key), ("v", scales.value)):
            added[name(attention, kind)] = torch.full(shape, value, dtype=dtype)
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    declare(folder, kv_cache_scheme=FP8)
    values = {n: tensor.float().flatten()[0].item() for n, tensor in added.items()}
    return {a: CacheScales(values[name(a, "k")], values[name(a, "v")]) for a in SCALES}


def declare(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= entries
    path.write_text(json.dumps(config))


def scales_of(folder: Path) -> dict[str, CacheScales]:
    weights = open_weights(open_checkpoint(folder))
    return {attention: weights.cache_scales(attention) for attention in weights.caches}


def convert(folder: Path, out: Path, layout: str) -> int:
    return main(["convert", str(folder), str(out), "--layout", layout])


@pytest.fixture
def quantized(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A quantised tiny model without cache scales."""

    def make(layout: str) -> Path:
        out = tmp_path / f"from-{layout}"
        assert quantize(tiny_model("llama", vocab=264), out, "--layout", layout) == 0
        return out

    return make


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "shape"),
    [
        ("compressed-tensors", bare, torch.bfloat16, (1,)),  # llm-compressor
        ("compressed-tensors", bare, torch.float32, (1,)),
        ("compressed-tensors", inside, torch.float32, ()),
        ("modelopt", inside, torch.float32, ()),
        ("modelopt", bare, torch.float16, (1,)),
        ("modelopt", fused, torch.float32, ()),
    ],
)
def test_scales_go_both_ways_without_a_loss(layout, name, dtype, shape, quantized, tmp_path):
    start = quantized(layout)
    expected = scaled(start, name, dtype, shape)
    other = "modelopt" if layout == "compressed-tensors" else "compressed-tensors"
    for folder, following in ((start, other), (tmp_path / other, layout)):
        assert convert(folder, tmp_path / following, following) == 0
        assert scales_of(tmp_path / following) == expected
        assert main(["inspect", str(tmp_path / following), "--strict"]) == 0


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_have_the_names_and_the_form_of_the_layout(layout, quantized, tmp_path):
    start = quantized("modelopt")
    scaled(start, inside)
    assert convert(start, tmp_path / "out", layout) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name, shape = (inside, ()) if layout == "modelopt" else (bare, (1,))
    for kind in ("k", "v"):
        found = stored[name(ATTENTION, kind)]
        assert (found.dtype, tuple(found.shape)) == (torch.float32, shape)
    assert sum(n.endswith(("k_scale", "v_scale")) for n in stored) == 4
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ours = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert declared["kv_cache_scheme"] == (ours if layout == "modelopt" else FP8)
    if layout == "modelopt":
        beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_a_chain_returns_identical_files(quantized, tmp_path):
    start = quantized("modelopt")
    scaled(start, inside)
    first = tmp_path / "first"
    assert convert(start, first, "modelopt") == 0
    assert convert(first, tmp_path / "middle", "compressed-tensors") == 0
    assert convert(tmp_path / "middle", tmp_path / "last", "modelopt") == 0
    assert contents(tmp_path / "last") == contents(first)


def test_a_declaration_without_scales_is_carried_over(quantized, tmp_path):
    """ModelOpt leaves scales of 1 out, and engines take 1 for those that are missing."""
    start = quantized("modelopt")
    declare(start, kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"})
    assert convert(start, tmp_path / "out", "compressed-tensors") == 0
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["kv_cache_scheme"] == FP8
    assert scales_of(tmp_path / "out") == {}


def refused(
    capsys: pytest.CaptureFixture[str], folder: Path, out: Path, layout: str = "compressed-tensors"
) -> str:
    capsys.readouterr()
    assert convert(folder, out, layout) == 1
    assert not out.exists()
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("layout", ["torchao", "comfy"])
@pytest.mark.parametrize("stored", [True, False])
def test_layouts_without_a_place_for_them_refuse(layout, stored, quantized, tmp_path, capsys):
    start = quantized("modelopt")
    if stored:
        scaled(start, inside)
    else:
        declare(start, kv_cache_scheme=FP8)
    message = refused(capsys, start, tmp_path / "out", layout)
    assert f"The {layout} layout cannot hold the scales of a KV cache: choose" in message


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 4, "type": "float"}}, "FP4"),
        ({"kv_cache_scheme": FP8 | {"type": "int"}}, "INT8"),
        ({"kv_cache_scheme": FP8 | {"dynamic": True}}, "DYNAMIC"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_other_caches_are_refused_by_name(entries, kind, quantized, tmp_path, capsys):
    start = quantized("modelopt")
    scaled(start, inside)
    declare(start, **entries)
    message = refused(capsys, start, tmp_path / "out")
    sentence = f"The KV cache is declared as {kind}, and `convert` carries over into this layout "
    assert f"{sentence}static FP8 only" in message


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({inside(ATTENTION, "v"): None}, f"{ATTENTION} lacks a k_scale or a v_scale: calibrate"),
        ({inside(ATTENTION, "k"): torch.zeros(())}, "k_scale is 0.0, and a scale must be positive"),
        ({inside(ATTENTION, "k"): torch.tensor(float("nan"))}, "k_scale is nan, and a scale must"),
        ({inside(ATTENTION, "k"): torch.ones(2, 1, 1)}, "is float32 [2, 1, 1], and the scale of"),
        ({inside(ATTENTION, "k"): torch.ones((), dtype=torch.float64)}, "is float64 [], and the"),
        ({f"{ATTENTION}.q_scale": torch.ones(())}, "q_scale scales the queries of attention"),
    ],
)
def test_scales_that_cannot_be_carried_are_named(change, sentence, quantized, tmp_path, capsys):
    start = quantized("modelopt")
    scaled(start, inside)
    file = start / "model.safetensors"
    stored = load_file(file) | change
    save_file({n: t for n, t in stored.items() if t is not None}, file, metadata={"format": "pt"})
    assert sentence in refused(capsys, start, tmp_path / "out")
