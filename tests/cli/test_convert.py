"""The command convert: other names and another packing, the same codes and scales."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import LAYOUTS, StoredWeights, open_weights

CHAIN = ("compressed-tensors", "comfy", "torchao", "modelopt")
# Rows of 80, 40 and 208, which are padded to multiples of 16 and 128.
AWKWARD = {"hidden": 80, "head_dim": 20, "intermediate": 208, "vocab": 264}


def run(*argv: object) -> int:
    return main([str(word) for word in argv])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights_of(folder: Path) -> StoredWeights:
    return open_weights(open_checkpoint(folder))


@pytest.fixture
def quantized(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A quantised tiny model in a layout."""

    def make(layout: str, *options: str, model_type: str = "llama", **shape: object) -> Path:
        model = tiny_model(model_type, **{"vocab": 264, **shape})
        out = tmp_path / f"quantized-{layout}"
        assert run("quantize", model, out, "--layout", layout, *options) == 0
        return out

    return make


@pytest.mark.parametrize(
    "shape", [{}, {"tie": True}, AWKWARD, {"model_type": "qwen3", "layers": 11}]
)
def test_a_chain_returns_identical_files(shape, quantized, tmp_path):
    first = quantized("modelopt", **shape)
    folder, before = first, weights_of(first)
    for number, layout in enumerate(CHAIN):
        following = tmp_path / f"{number}-{layout}"
        assert run("convert", folder, following, "--layout", layout) == 0
        weights = weights_of(following)
        assert weights.layout is LAYOUTS[layout]
        assert weights.names == before.names
        assert all(torch.equal(weights.tensor(n), before.tensor(n)) for n in before.names)
        folder = following
    assert files(folder) == files(first)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tie", [False, True])
def test_converted_is_what_quantize_writes(layout, tie, quantized, tmp_path):
    """The same files whichever way, so that nothing about an engine is forgotten on one of them."""
    start = quantized("modelopt", "--ignore", "*.0.mlp.*", tie=tie)
    direct = quantized(layout, "--ignore", "*.0.mlp.*", tie=tie) if layout != "modelopt" else start
    assert run("convert", start, tmp_path / "out", "--layout", layout) == 0
    expected, converted = files(direct), files(tmp_path / "out")
    assert converted.keys() == expected.keys()
    assert {n for n in expected if converted[n] != expected[n]} <= {"config.json"}
    a, b = (json.loads(f["config.json"]) for f in (expected, converted))
    assert a == b


def test_a_rotation_is_remembered(quantized, tmp_path):
    start = quantized("modelopt", "--rotate", "r1r2", "--seed", "9")
    assert run("convert", start, tmp_path / "out", "--layout", "compressed-tensors") == 0
    record = (tmp_path / "out" / "nvfp4.yaml").read_text()
    assert record == (start / "nvfp4.yaml").read_text().replace(
        "layout: modelopt", "layout: compressed-tensors"
    )


def test_sharding(quantized, tmp_path):
    start = quantized("modelopt")
    argv = ("convert", start, tmp_path / "many", "--layout", "torchao")
    assert run(*argv, "--max-shard-size", "20KB") == 0
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert run("convert", tmp_path / "many", tmp_path / "one", "--layout", "comfy") == 0
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    before, after = weights_of(start), weights_of(tmp_path / "one")
    assert all(torch.equal(before.tensor(n), after.tensor(n)) for n in before.names)


def test_torchao_warns_of_fused_rows(quantized, tmp_path, capsys):
    start = quantized("modelopt", intermediate=192, head_dim=64, hidden=192)
    capsys.readouterr()
    argv = ("convert", start, tmp_path / "out", "--layout", "torchao", "--json")
    assert run(*argv) == 0
    document = json.loads(capsys.readouterr().out)
    (warning,) = document["warnings"]
    assert "mlp.gate_proj.weight and 3 more" in warning
    assert document["next_step"].startswith("Load: transformers")


def test_dry_run_writes_nothing(quantized, tmp_path, capsys):
    start = quantized("modelopt")
    capsys.readouterr()
    argv = ("convert", start, tmp_path / "out", "--layout", "comfy", "--dry-run", "--json")
    assert run(*argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["action"] for row in document["tensors"]} == {"repack", "copy"}
    assert not (tmp_path / "out").exists()


def refused(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 1) -> str:
    capsys.readouterr()
    assert run("convert", *argv) == code
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    *talk, error = stderr.splitlines()
    assert all(line.startswith("warning: ") for line in talk)
    assert error.startswith("error: ")
    assert error.endswith(".")
    return error


def test_an_unquantised_checkpoint_is_refused(tiny_model, tmp_path, capsys):
    model = tiny_model("llama", vocab=264)
    message = refused(capsys, model, tmp_path / "out", "--layout", "comfy")
    assert "quantise it first with `nvfp4 quantize`" in message
    assert not (tmp_path / "out").exists()


def test_an_unknown_layout_is_refused(quantized, tmp_path, capsys):
    message = refused(capsys, quantized("modelopt"), tmp_path / "out", "--layout", "gguf", code=2)
    assert "'gguf'" in message


def test_in_place_is_refused(quantized, capsys):
    start = quantized("modelopt")
    before = files(start)
    assert "source folder" in refused(capsys, start, start, "--layout", "comfy")
    assert files(start) == before


@pytest.mark.parametrize("record", ["- a\n", "nvfp4_version: 1\n", "nvfp4_version: [\n"])
def test_a_damaged_record_is_named(record, quantized, tmp_path, capsys):
    start = quantized("modelopt")
    (start / "nvfp4.yaml").write_text(record)
    assert "nvfp4.yaml" in refused(capsys, start, tmp_path / "out", "--layout", "comfy")


@pytest.fixture
def w4a4(quantized: Callable[..., Path], tmp_path: Path) -> Path:
    """A compressed-tensors checkpoint with static input scales, as other tools write them."""
    folder = tmp_path / "w4a4"
    shutil.copytree(quantized("compressed-tensors"), folder)
    (folder / "nvfp4.yaml").unlink()
    tensors = load_file(folder / "model.safetensors")
    for i, name in enumerate([n for n in tensors if n.endswith(".weight_packed")]):
        scale = torch.tensor([2688.0]) / (1.5 + i)
        tensors[name.replace("weight_packed", "input_global_scale")] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_static_input_scales_go_both_ways(w4a4, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    assert run("convert", w4a4, there, "--layout", "modelopt") == 0
    assert run("convert", there, back, "--layout", "compressed-tensors") == 0
    before, middle, after = (load_file(f / "model.safetensors") for f in (w4a4, there, back))
    assert before.keys() == after.keys()
    for name in before:
        a, b = before[name], after[name]
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    scales = {n: t for n, t in middle.items() if n.endswith(".input_scale")}
    assert len(scales) == 14
    for name, scale in scales.items():
        divisor = before[name.replace("input_scale", "input_global_scale")].item()
        # One rounding to fp32 on each side.
        assert scale.item() * divisor == pytest.approx(1, rel=2**-22)
    config = json.loads((there / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    assert config["config_groups"]["group_0"]["input_activations"]
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


def test_torchao_cannot_hold_input_scales(w4a4, tmp_path, capsys):
    message = refused(capsys, w4a4, tmp_path / "out", "--layout", "torchao")
    assert "static input scales" in message
    assert "compressed-tensors" in message
    assert not (tmp_path / "out").exists()


def test_a_missing_input_scale_is_named(w4a4, tmp_path, capsys):
    tensors = load_file(w4a4 / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.input_global_scale"]
    save_file(tensors, w4a4 / "model.safetensors", metadata={"format": "pt"})
    message = refused(capsys, w4a4, tmp_path / "out", "--layout", "modelopt")
    assert "model.layers.1.mlp.up_proj" in message


# What is wrong with the source


UP = "model.layers.1.mlp.up_proj"
GLOBALS = {
    "torchao": "._weight_per_tensor_scale",
    "compressed-tensors": ".weight_global_scale",
    "modelopt": ".weight_scale_2",
    "comfy": ".weight_scale_2",
}
BLOCKS = {"torchao": "._weight_scale"}  # elsewhere .weight_scale


def damaged(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The checkpoint with tensors replaced, or removed (None), in place."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    found = load_file(file) | changes
    save_file({n: t for n, t in found.items() if t is not None}, file, metadata=metadata)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81])
def test_block_scales_that_are_no_numbers_are_refused(layout, byte, quantized, tmp_path, capsys):
    start, name = quantized(layout), UP + BLOCKS.get(layout, ".weight_scale")
    scale = load_file(start / "model.safetensors")[name]
    scale.view(torch.uint8)[0, 0] = byte
    other = "modelopt" if layout != "modelopt" else "comfy"
    message = refused(capsys, damaged(start, {name: scale}), tmp_path / "out", "--layout", other)
    assert f"{name} in model.safetensors holds 1 block scale that is NaN or negative: " in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_global_scales_that_are_no_numbers_are_refused(layout, value, quantized, tmp_path, capsys):
    start, name = quantized(layout), UP + GLOBALS[layout]
    scale = torch.full_like(load_file(start / "model.safetensors")[name], value)
    message = refused(capsys, damaged(start, {name: scale}), tmp_path / "o", "--layout", "modelopt")
    assert f"({name} in model.safetensors): quantise the source again." in message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_is_missing_is_named_before_anything_is_written(
    layout, quantized, tmp_path, capsys
):
    start = quantized(layout)
    complete = load_file(start / "model.safetensors")
    parts = [name for name in complete if name.startswith(f"{UP}.")]
    assert len(parts) == (4 if layout == "comfy" else 3)
    for part in parts:
        argv = (damaged(start, {part: None}), tmp_path / "out", "--layout", "torchao", "--dry-run")
        message = refused(capsys, *argv)
        assert UP in message
        assert part in message or "tensors of" in message
        damaged(start, {part: complete[part]})
    assert run("convert", start, tmp_path / "out", "--layout", "torchao") == 0


def test_weights_in_another_format_are_not_copied(quantized, tmp_path, capsys):
    """Their scales would be lost: the torchao layout knows NVFP4 only."""
    fp8 = {f"{UP}.weight": torch.zeros(128, 64).to(torch.float8_e4m3fn),
           f"{UP}.weight_scale": torch.ones(()), f"{UP}.weight_scale_2": None}  # fmt: skip
    start = damaged(quantized("modelopt"), fp8)
    message = refused(capsys, start, tmp_path / "out", "--layout", "torchao")
    assert f"{UP} is in FP8 in a way that the torchao layout of this tool does not hold" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_layer_is_refused(layout, quantized, tmp_path, capsys):
    start = quantized(layout)
    names = load_file(start / "model.safetensors")
    layer = {name: None for name in names if name.startswith("model.layers.1.")}
    message = refused(capsys, damaged(start, layer), tmp_path / "out", "--layout", "modelopt")
    assert "lacks model.layers.1." in message
    assert "and num_hidden_layers is 2 in config.json: complete" in message


def test_shapes_that_contradict_config_json_are_refused(quantized, tmp_path, capsys):
    start = quantized("modelopt")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    message = refused(capsys, start, tmp_path / "out", "--layout", "torchao")
    assert "intermediate_size is 64 in config.json, and model.layers.0.mlp." in message


def test_tensors_that_the_architecture_lacks_are_copied(quantized, tmp_path):
    start = damaged(quantized("modelopt"), {"extra.table": torch.ones(2, 3)})
    assert run("convert", start, tmp_path / "out", "--layout", "torchao") == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["extra.table"],
                       torch.ones(2, 3))  # fmt: skip


def test_a_model_that_no_spec_describes_is_converted(quantized, tmp_path):
    start = quantized("modelopt")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "model_type": "nova"}))
    assert run("convert", start, tmp_path / "out", "--layout", "torchao") == 0
