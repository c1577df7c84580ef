"""Mixed precision within a budget of bits, from the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import quantize
from safetensors.torch import load_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import open_weights

SHORT = ("--text", "random", "--sequences", "8", "--sequence-length", "32")
LINEAR = ("compressed-tensors", "modelopt")


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def config(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())["quantization_config"]


def record(out: Path) -> dict[str, Any]:
    return yaml.safe_load((out / "nvfp4.yaml").read_text())["budget"]


def stored(out: Path) -> dict[str, str]:
    """Module -> nvfp4, fp8 or source, of decoder layers."""
    weights = open_weights(open_checkpoint(out))
    found = dict.fromkeys(weights.quantized, "nvfp4") | dict.fromkeys(weights.fp8, "fp8")
    for name in weights.names:
        if name.endswith("proj.weight"):
            found.setdefault(name.removesuffix(".weight"), "source")
    return found


def decided(out: Path) -> dict[str, str]:
    """Module -> format, as the record says."""
    found = {}
    for group in record(out)["groups"]:
        parent, _, parts = group["modules"].rpartition(".")
        found |= {f"{parent}.{part}": group["format"] for part in parts.split("+")}
    return found


def kl(out: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> float:
    text = Path(__file__).read_text()
    (out.parent / "text.txt").write_text(text)
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--context", "32", "--json"]
    capsys.readouterr()
    assert main([*argv, "--text", str(out.parent / "text.txt"), "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)["kl_divergence"]


@pytest.mark.parametrize("layout", LINEAR)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_what_costs_most_gets_more_bits(llama, tmp_path, capsys, layout, method):
    found = {}
    for bits in (4.5, 5.5, 8):
        out = tmp_path / str(bits)
        options = ("--scheme", "w4a4", "--layout", layout, "--method", method, "--bits", str(bits))
        assert quantize(llama, out, *options, *SHORT) == 0
        assert main(["inspect", str(out), "--strict", "--against", str(llama)]) == 0
        assert stored(out) == decided(out)
        assert 4.5 <= record(out)["bits"] <= bits
        found[bits] = kl(out, llama, capsys)
    assert set(stored(tmp_path / "4.5").values()) == {"nvfp4"}
    assert set(stored(tmp_path / "5.5").values()) == {"nvfp4", "fp8"}
    assert set(stored(tmp_path / "8").values()) == {"fp8"}
    assert found[8] < 0.5 * found[5.5] < 0.5 * found[4.5]


def test_the_record_holds_what_was_measured(llama, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["quantize", str(llama), str(out), "--layout", "compressed-tensors", "--device", "cpu"]
    assert main([*argv, "--bits", "6", *SHORT, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["budget"]
    assert said == record(out)
    for group in said["groups"]:
        costs = group["divergences"]
        assert costs["source"] == 0 < costs["fp8"] < costs["nvfp4"]
    chosen = sum(group["divergences"][group["format"]] for group in said["groups"])
    assert said["divergence"] == pytest.approx(chosen)


def test_a_budget_gives_the_same_bytes_again(llama, tmp_path):
    options = ("--scheme", "w4a4", "--layout", "modelopt", "--bits", "5.5", *SHORT)
    for name in ("a", "b"):
        assert quantize(llama, tmp_path / name, *options) == 0
    files = {f.name for f in (tmp_path / "a").iterdir()}
    assert "nvfp4.yaml" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("layout", LINEAR)
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_engines_are_told_of_every_module(llama, tmp_path, layout, scheme):
    if (layout, scheme) == ("modelopt", "w4a16"):
        pytest.skip("refused")
    out = tmp_path / "out"
    options = ("--scheme", scheme, "--layout", layout, "--bits", "5.5", *SHORT)
    assert quantize(llama, out, *options) == 0
    formats, said = stored(out), config(out)
    four, eight = ([m for m in formats if formats[m] == form] for form in ("nvfp4", "fp8"))
    groups = said["config_groups"]
    assert groups["group_0"]["targets"] == sorted(four)
    assert groups["group_1"]["targets"] == sorted(eight)
    assert said["ignore"] == ["lm_head"]
    bits = {name: group["weights"]["num_bits"] for name, group in groups.items()}
    assert bits == {"group_0": 4, "group_1": 8}
    if layout == "modelopt":
        nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
        fp8 = {"quant_algo": "FP8"}
        layers = dict.fromkeys(four, nvfp4) | dict.fromkeys(eight, fp8)
        assert said["quantized_layers"] == layers
        beside = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert beside["quantized_layers"] == layers
        assert said["quant_algo"] == beside["quant_algo"] == "MIXED_PRECISION"
    else:
        formats_said = [said["format"], *(group["format"] for group in groups.values())]
        assert formats_said == ["mixed-precision", "nvfp4-pack-quantized", "float-quantized"]
        assert (groups["group_1"]["input_activations"] is None) == (scheme == "w4a16")
    tensors = load_file(out / "model.safetensors")
    for module in eight:
        assert (f"{module}.input_scale" in tensors) == (scheme == "w4a4")
        scale = tensors[f"{module}.weight_scale"]
        assert scale.shape == ((1,) if layout == "compressed-tensors" else ())
        assert tensors[f"{module}.weight"].to(torch.float32).abs().max() <= 448


def test_parts_of_a_fused_layer_share_the_scales(llama, tmp_path):
    out = tmp_path / "out"
    options = ("--scheme", "w4a4", "--layout", "modelopt", "--bits", "8", *SHORT)
    assert quantize(llama, out, *options) == 0
    tensors = load_file(out / "model.safetensors")
    for part in ("weight_scale", "input_scale"):
        names = (f"model.layers.0.self_attn.{name}_proj.{part}" for name in "qkv")
        assert len({tensors[name].item() for name in names}) == 1


@pytest.mark.parametrize("layout", LINEAR)
def test_it_is_converted(llama, tmp_path, layout):
    other = next(name for name in LINEAR if name != layout)
    for name in LINEAR:
        options = ("--scheme", "w4a4", "--layout", name, "--bits", "5.5", *SHORT)
        assert quantize(llama, tmp_path / name, *options) == 0
    converted = tmp_path / "converted"
    assert main(["convert", str(tmp_path / layout), str(converted), "--layout", other]) == 0
    assert main(["inspect", str(converted), "--strict"]) == 0
    assert config(converted) == config(tmp_path / other)
    assert record(converted) == record(tmp_path / other)
    ours, theirs = (load_file(f / "model.safetensors") for f in (converted, tmp_path / other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        if tensor.numel() == 1:  # a divisor is not always the reciprocal of its reciprocal
            torch.testing.assert_close(tensor, theirs[name], rtol=2e-7, atol=0)
        else:
            assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))


@pytest.mark.parametrize("layout", LINEAR)
def test_the_experts_of_a_layer_have_one_format(tiny_model, tmp_path, capsys, layout):
    source, out = tiny_model("qwen3_moe"), tmp_path / "out"
    options = ("--scheme", "w4a4", "--layout", layout, "--bits", "6.5", *SHORT)
    assert quantize(source, out, *options) == 0
    assert main(["inspect", str(out), "--strict"]) == 0
    formats = stored(out)
    by_layer: dict[str, set[str]] = {}
    for module, form in formats.items():
        if ".experts." in module:
            by_layer.setdefault(module.partition(".experts.")[0], set()).add(form)
    assert by_layer and all(len(forms) == 1 for forms in by_layer.values())
    assert len(set(formats.values())) > 1
    assert 0 < kl(out, source, capsys) < 0.1


def test_conv1d_and_tied_experts_are_stored_upright(tiny_model, tmp_path, capsys):
    source, out = tiny_model("gpt2"), tmp_path / "out"
    assert quantize(source, out, "--layout", "compressed-tensors", "--bits", "8", *SHORT) == 0
    assert main(["inspect", str(out), "--strict", "--against", str(source)]) == 0
    assert 0 < kl(out, source, capsys) < 0.01


def test_the_worst_groups_are_kept(llama, tmp_path):
    out = tmp_path / "out"
    assert quantize(llama, out, "--layout", "modelopt", "--keep-worst", "2", *SHORT) == 0
    assert main(["inspect", str(out), "--strict"]) == 0
    groups = record(out)["groups"]
    ranked = sorted(groups, key=lambda group: -group["divergences"]["nvfp4"])
    assert [group["format"] for group in ranked] == ["source"] * 2 + ["nvfp4"] * (len(groups) - 2)
    assert stored(out) == decided(out)
    kept = {module for module, form in decided(out).items() if form == "source"}
    assert set(config(out)["ignore"]) == kept | {"lm_head"}


def test_bits_and_the_worst_together(llama, tmp_path):
    out = tmp_path / "out"
    options = ("--layout", "compressed-tensors", "--bits", "6", "--keep-worst", "1", *SHORT)
    assert quantize(llama, out, *options) == 0
    formats = [group["format"] for group in record(out)["groups"]]
    assert formats.count("source") == 1 and {"fp8", "nvfp4"} < set(formats)


REFUSED = {
    "too few": (("--bits", "4"), "bits is 4.0: give a number from 4.5 to 16"),
    "torchao": (("--bits", "5", "--layout", "torchao"), "use --layout compressed-tensors"),
    "weights alone": (
        ("--bits", "5", "--layout", "modelopt"),
        "The modelopt layout holds no FP8 modules with --scheme w4a16, which --bits chooses: use "
        "--layout compressed-tensors.",
    ),
    "branches": (
        ("--bits", "5", "--layout", "modelopt", "--scheme", "w4a4", "--method", "svd"),
        "use another --method, or leave out --bits",
    ),
    "all": (("--keep-worst", "99"), "--keep-worst 99 leaves nothing to quantise"),
    "statistics": (("--bits", "5", "--stats", "x"), "leave out one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(llama, tmp_path, capsys, case):
    options, sentence = REFUSED[case]
    text = () if "--stats" in options else SHORT
    assert quantize(llama, tmp_path / "out", *options, *text) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_it_is_decided_later(llama, tmp_path, capsys):
    options = ("--layout", "modelopt", "--scheme", "w4a4", "--bits", "5", "--dry-run")
    assert quantize(llama, tmp_path / "out", *options) == 0
    assert "Formats are decided by running the model" in capsys.readouterr().err


def test_fp8_of_other_kinds_is_not_converted(llama, tmp_path, capsys):
    """Weight-only FP8, which ModelOpt has not."""
    out = tmp_path / "out"
    assert quantize(llama, out, "--layout", "compressed-tensors", "--bits", "5.5", *SHORT) == 0
    assert main(["convert", str(out), str(tmp_path / "x"), "--layout", "modelopt"]) != 0
    assert "is in FP8 in a way that the modelopt layout" in capsys.readouterr().err
