"""What `inspect` says of sound checkpoints."""

import json
import shutil

import pytest
import torch
from breaking import edit_json, rewrite
from safetensors.torch import load_file, save_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.describe.report import describe
from nvfp4cli.formats.nvfp4 import GlobalScale, amax, quantize
from nvfp4cli.layouts import LAYOUTS

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_named_and_sound(layout, tiny_model, quantized, inspect):
    source = tiny_model("llama")
    found = inspect(quantized(source, layout))
    assert found["layout"] == layout
    assert found["scheme"] == "w4a16"
    assert found["scales"] == ("swizzled" if layout in ("torchao", "comfy") else "linear")
    assert found["rotation"] == {"kind": "none", "seed": 0, "sizes": {}}
    assert found["model_type"] == "llama"
    assert found["violations"] == []
    weights = load_file(source / "model.safetensors")
    assert {t["name"]: t["shape"] for t in found["tensors"]} == {
        name: list(tensor.shape) for name, tensor in weights.items()
    }


def test_totals_count_every_byte(tiny_model, quantized, inspect):
    source = tiny_model("llama")
    out = quantized(source, "modelopt")
    totals = inspect(out)["totals"]
    weights = load_file(source / "model.safetensors")
    linear = [t for name, t in weights.items() if "_proj" in name]
    stored = load_file(out / "model.safetensors")
    nbytes = sum(t.numel() * t.element_size() for t in stored.values())
    parameters = sum(t.numel() for t in weights.values())
    assert totals == {
        "parameters": parameters,
        "quantized_parameters": sum(t.numel() for t in linear),
        "bits_per_parameter": 8 * nbytes / parameters,
        "bytes": nbytes,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_the_quantised_matrix(layout, tiny_model, quantized, inspect):
    source = tiny_model("llama")
    weights = load_file(source / "model.safetensors")
    group = [weights[Q.replace("q_proj", f"{leaf}_proj")] for leaf in "qkv"]
    scale = GlobalScale.from_amax(max(amax(w) for w in group))
    matrix = quantize(weights[Q], scale)
    codes = torch.stack((matrix.packed & 7, matrix.packed >> 4 & 7))
    row = next(t for t in inspect(quantized(source, layout))["tensors"] if t["name"] == Q)
    assert (row["format"], row["dtype"]) == ("nvfp4", "uint8")
    assert row["global_scale"] == scale.multiplier
    assert row["max_block_scale"] == matrix.block_scale.float().max().item()
    assert row["zero_code_share"] == pytest.approx((codes == 0).double().mean().item(), abs=1e-12)
    assert row["zero_scale_share"] == row["subnormal_scale_share"] == 0
    assert row["input_scale"] is None


def test_zero_and_subnormal_scales_are_counted(tiny_model, quantized, inspect, tmp_path):
    source = shutil.copytree(tiny_model("llama"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights[Q][0, :16] = 0
    weights[Q][1, :32] *= 1e-5  # block scale 2^-9, the smallest
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    found = inspect(quantized(source, "torchao"))
    row = next(t for t in found["tensors"] if t["name"] == Q)
    blocks = weights[Q].numel() // 16
    assert row["zero_scale_share"] == 1 / blocks
    assert row["subnormal_scale_share"] == 2 / blocks
    assert found["violations"] == []


def test_unquantised_checkpoints_are_described(tiny_model, inspect):
    found = inspect(tiny_model("qwen2", shards=2))
    assert (found["layout"], found["scheme"], found["scales"]) == ("none", "none", None)
    assert found["rotation"]["kind"] == "unknown"  # nothing in a file can prove that there is none
    assert found["violations"] == []
    assert [file["name"] for file in found["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {t["format"] for t in found["tensors"]} == {"plain"}


def test_unknown_architectures_need_no_spec(broken, inspect):
    folder = broken("compressed-tensors")
    edit_json(folder / "config.json", lambda config: config.update(model_type="unheard_of"))
    found = inspect(folder)
    assert found["model_type"] == "unheard_of"
    assert found["violations"] == []


def test_rotation_comes_from_the_record(tiny_model, quantized, inspect):
    found = inspect(
        quantized(tiny_model("llama"), "torchao", "--rotate", "r1r2", "--seed", "3")
    )  # fmt: skip
    assert found["rotation"] == {"kind": "hadamard", "seed": 3, "sizes": {"r1": 64, "r2": 16}}
    assert found["violations"] == []


def test_a_damaged_record_is_an_error(broken, capsys):
    folder = broken("torchao")
    (folder / "nvfp4.yaml").write_text("rotation: 3\n", encoding="utf-8")
    assert main(["inspect", str(folder)]) == 1
    assert "nvfp4.yaml is damaged" in capsys.readouterr().err


def test_a_tied_head_is_sound_in_every_layout(tiny_model, quantized, inspect):
    for layout in LAYOUTS:
        assert inspect(quantized(tiny_model("llama", tie=True), layout))["violations"] == []


def test_comfy_metadata_may_stand_for_the_markers(broken, inspect):
    folder = broken("comfy")

    def drop(tensors):
        for name in [name for name in tensors if name.endswith(".comfy_quant")]:
            del tensors[name]

    rewrite(folder, drop, _quantization_metadata=json.dumps({"format_version": "1.0"}))
    found = inspect(folder)
    assert found["layout"] == "comfy"
    assert found["violations"] == []


def test_comfy_fp8_is_not_nvfp4(broken, inspect):
    folder = broken("comfy")

    def make_fp8(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module = name.removesuffix(".weight")
            tensors[name] = torch.ones(tensors[name].shape).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.tensor(1.0)
            del tensors[f"{module}.weight_scale_2"]

    rewrite(folder, make_fp8, _quantization_metadata="{}")
    found = inspect(folder)
    assert (found["layout"], found["scheme"], found["violations"]) == ("none", "fp8", [])


def test_one_weight_is_in_memory_at_a_time(tiny_model, quantized, monkeypatch):
    """A weight is read part by part and once, plain tensors in pieces."""
    from nvfp4cli.checkpoint.reader import Checkpoint
    from nvfp4cli.describe import values

    checkpoint = open_checkpoint(quantized(tiny_model("llama"), "modelopt"))
    monkeypatch.setattr(values, "_PIECE_BYTES", 1024)
    sizes = []
    read_bytes = Checkpoint.read_bytes

    def spy(self, info, start, stop):
        sizes.append((info.name, stop - start))
        return read_bytes(self, info, start, stop)

    monkeypatch.setattr(Checkpoint, "read_bytes", spy)
    report = describe(checkpoint)
    plain = {w.name for w in report.inventory.weights if w.format == "plain"}
    assert max(size for name, size in sizes if name in plain) == 1024
    codes = [name for name, _ in sizes if name.endswith("_proj.weight")]
    assert sorted(codes) == sorted(w.name for w in report.inventory.nvfp4)


def test_people_see_kinds_and_programs_see_all(tiny_model, quantized, inspect, capsys):
    folder = quantized(tiny_model("llama", layers=3), "modelopt")
    assert main(["inspect", str(folder), "--strict"]) == 0
    shown = capsys.readouterr().out
    assert "layout modelopt, scheme w4a16, scales linear, rotation none" in shown
    assert "model.layers.*.mlp.gate_proj.weight" in shown
    assert "model.layers.0." not in shown
    assert "all with --json" in shown
    assert "No invariant is violated." in shown
    assert len(inspect(folder)["tensors"]) == 30


def test_small_models_are_shown_whole(tiny_model, quantized, capsys):
    assert main(["inspect", str(quantized(tiny_model("llama"), "modelopt"))]) == 0
    assert "model.layers.1.mlp.gate_proj.weight" in capsys.readouterr().out


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere" / "at" / "all")]) == 1
    assert "no such folder" in capsys.readouterr().err
