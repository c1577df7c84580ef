"""The option --kv-cache: which scales are written for which model, and what is refused."""

import json
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


NVFP4 = ("--kv-cache", "nvfp4", "--layout", "modelopt", *SHORT)


def kl(out: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> float:
    text = out.parent / "text.txt"
    text.write_text(Path(__file__).read_text())
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--context", "32", "--json"]
    capsys.readouterr()
    assert main([*argv, "--text", str(text), "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)["kl_divergence"]


def test_nvfp4_caches_have_global_scales(tiny_model, tmp_path):
    """amax / 2688, where FP8 has amax / 448 of the same keys and values."""
    source = tiny_model("llama")
    for name, options in (("fp8", (*FP8, "--layout", "modelopt")), ("nvfp4", NVFP4)):
        assert quantize(source, tmp_path / name, *options) == 0
        assert main(["inspect", str(tmp_path / name), "--strict"]) == 0
    eight, four = (load_file(tmp_path / n / "model.safetensors") for n in ("fp8", "nvfp4"))
    for name in scales(tmp_path / "nvfp4"):
        assert four[name].item() == pytest.approx(eight[name].item() / 6, rel=1e-6)
    config = json.loads((tmp_path / "nvfp4" / "config.json").read_text())["quantization_config"]
    beside = json.loads((tmp_path / "nvfp4" / "hf_quant_config.json").read_text())["quantization"]
    assert config["kv_cache_scheme"] == beside["kv_cache_quant_algo"] == "NVFP4"


def test_nvfp4_caches_are_emulated(tiny_model, tmp_path, capsys):
    source = tiny_model("llama")
    found = []
    for name, options in (("none", ()), ("fp8", FP8), ("nvfp4", NVFP4[:2] + NVFP4[4:])):
        assert quantize(source, tmp_path / name, "--layout", "modelopt", *options) == 0
        found.append(kl(tmp_path / name, source, capsys))
    assert found[0] < found[2] and abs(found[1] - found[0]) < 0.5 * (found[2] - found[0])


def test_nvfp4_caches_are_converted_where_there_is_a_place(tiny_model, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize(tiny_model("llama"), out, *NVFP4) == 0
    assert main(["convert", str(out), str(tmp_path / "again"), "--layout", "modelopt"]) == 0
    files = [folder / "config.json" for folder in (out, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    argv = ["convert", str(out), str(tmp_path / "x"), "--layout", "compressed-tensors"]
    assert main(argv) == 1
    assert "The KV cache is declared as NVFP4" in capsys.readouterr().err


def test_nvfp4_caches_in_a_layout_without_are_refused(tiny_model, tmp_path, capsys):
    options = ("--kv-cache", "nvfp4", "--layout", "compressed-tensors", *SHORT)
    assert quantize(tiny_model("llama"), tmp_path / "out", *options) == 1
    assert "use --layout modelopt, or --kv-cache fp8" in capsys.readouterr().err
