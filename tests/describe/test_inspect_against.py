"""`inspect --against`: errors from the source, with the checkpoint's own rotation repeated."""

import json
import math
import shutil

import pytest
import torch
from breaking import remove, replace, rewrite
from safetensors.torch import load_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import LAYOUTS, open_weights

DOWN = "model.layers.1.mlp.down_proj.weight"


def against(inspect, out, source):
    found = inspect(out, "--against", str(source))
    return found, {t["name"]: t for t in found["against"]["tensors"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors_are_those_of_the_dequantised_weights(layout, tiny_model, quantized, inspect):
    source = tiny_model("llama")
    out = quantized(source, layout)
    found, rows = against(inspect, out, source)
    assert found["violations"] == []
    assert found["against"]["source"] == str(source)
    weights = load_file(source / "model.safetensors")
    assert rows.keys() == weights.keys()
    w = weights[DOWN].double()
    error = open_weights(open_checkpoint(out)).tensor(DOWN).double() - w
    ratio = (error.square().sum() / w.square().sum()).item()
    assert rows[DOWN]["kind"] == "quantized"
    # fp32 subtraction rounds each error by at most 2^-24 of the weight, a tenth of which it is.
    assert rows[DOWN]["snr_db"] == pytest.approx(-10 * math.log10(ratio), abs=1e-4)
    assert rows[DOWN]["relative_error"] == pytest.approx(math.sqrt(ratio), rel=1e-5)
    assert rows[DOWN]["max_abs_error"] == pytest.approx(error.abs().max().item(), rel=1e-5)
    assert rows[DOWN]["changed_bits_share"] is None


def test_copied_tensors_are_equal_and_worst_is_sorted(tiny_model, quantized, inspect):
    source = tiny_model("llama")
    found, rows = against(inspect, quantized(source, "torchao"), source)
    copied = {name: row for name, row in rows.items() if row["kind"] == "copied"}
    assert copied.keys() == {name for name in rows if "_proj" not in name}
    for row in copied.values():
        assert row["changed_bits_share"] == row["relative_error"] == row["max_abs_error"] == 0
        assert row["snr_db"] is None  # infinite
    worst = [t["snr_db"] for t in found["against"]["worst"]]
    snrs = sorted(row["snr_db"] for row in rows.values() if row["kind"] == "quantized")
    assert worst == snrs[:10]
    assert found["against"]["mean_snr_db"] == pytest.approx(sum(snrs) / len(snrs))
    # 20.4 dB is what Gaussian weights have; 128 x 64 of them stray from it by far less than 1 dB.
    assert worst[0] > 19.5


@pytest.mark.parametrize(
    ("model_type", "shape", "options"),
    [
        ("llama", {}, ("r1r2", "hadamard")),
        ("llama", {"tie": True}, ("r1", "hadamard")),
        ("qwen2", {}, ("r1r2", "block-16")),
        ("qwen2", {"tie": True}, ("r2", "qr")),
    ],
)
def test_rotation_is_repeated(model_type, shape, options, tiny_model, quantized, inspect):
    source = tiny_model(model_type, **shape)
    names, kind = options
    rotate = ("--rotate", names, "--rotation-kind", kind, "--seed", "5")
    found, rows = against(inspect, quantized(source, "modelopt", *rotate), source)
    assert found["violations"] == []
    assert ("lm_head.weight" in rows) == (not shape.get("tie") or "r1" in names)
    for name, row in rows.items():
        if row["kind"] == "quantized":
            assert row["snr_db"] > 19, name
        elif row["kind"] == "edited" and row["snr_db"] is not None:
            # One rounding to bf16, a relative error of 2^-9 at most: 54 dB.
            assert row["snr_db"] > 54, name
    if "r1" in names:
        assert rows["model.embed_tokens.weight"]["kind"] == "edited"


def test_another_seed_is_noticed(tiny_model, quantized, inspect, tmp_path):
    """The test above would pass for a rotation that is not repeated only if this one failed."""
    source = tiny_model("llama")
    out = quantized(source, "modelopt", "--rotate", "r1r2", "--seed", "5")
    copy = shutil.copytree(out, tmp_path / "copy")
    record = (copy / "nvfp4.yaml").read_text(encoding="utf-8")
    (copy / "nvfp4.yaml").write_text(record.replace("seed: 5", "seed: 6"), encoding="utf-8")
    _, rows = against(inspect, copy, source)
    assert rows[DOWN]["snr_db"] < 0


def test_another_dtype_is_an_edit(tiny_model, quantized, inspect):
    source = tiny_model("llama", dtype=torch.float32)
    _, rows = against(inspect, quantized(source, "torchao", "--dtype", "bfloat16"), source)
    row = rows["model.embed_tokens.weight"]
    assert row["kind"] == "edited"
    assert row["snr_db"] > 54
    assert row["changed_bits_share"] is None


def test_changed_copy(tiny_model, broken, rules, inspect):
    folder, source = broken("torchao"), tiny_model("llama")

    def flip(gain):
        gain.view(torch.int16)[7] ^= 0b101
        return gain

    replace(folder, "model.norm.weight", flip)
    assert rules(folder) == set()
    found, rows = against(inspect, folder, source)
    (violation,) = found["violations"]
    assert (violation["tensor"], violation["rule"]) == ("model.norm.weight", "copy-changed")
    row = rows["model.norm.weight"]
    assert row["changed_bits_share"] == 2 / (64 * 16)
    assert row["max_abs_error"] > 0


def test_missing_and_extra_tensors(tiny_model, broken, rules):
    folder, source = broken("torchao"), tiny_model("llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    remove(folder, "model.norm.weight")
    extra = torch.ones(3)
    rewrite(folder, lambda tensors: tensors.update({"model.extra": extra}))
    assert rules(folder, "--against", str(source)) == {
        ("model.norm.weight", "source-missing"),
        ("model.extra", "source-extra"),
    }


def test_another_shape(tiny_model, quantized, rules):
    out = quantized(tiny_model("llama"), "torchao")
    other = tiny_model("llama", intermediate=192)
    assert rules(out, "--against", str(other)) >= {(DOWN, "source-shape")}


def test_damaged_weights_are_reported_and_left_out(tiny_model, broken, inspect):
    folder, source = broken("modelopt"), tiny_model("llama")
    module = DOWN.removesuffix(".weight")
    replace(folder, f"{module}.weight_scale_2", torch.zeros_like)
    remove(folder, "model.layers.0.mlp.down_proj.weight_scale")
    found, rows = against(inspect, folder, source)
    assert {v["rule"] for v in found["violations"]} == {"scale-value", "part-missing"}
    assert DOWN not in rows
    assert "model.layers.0.mlp.down_proj.weight" not in rows


def test_quantised_source_is_refused(tiny_model, quantized, capsys):
    out = quantized(tiny_model("llama"), "torchao")
    assert main(["inspect", str(out), "--against", str(out)]) == 1
    assert "is quantised itself" in capsys.readouterr().err


def test_people_see_the_worst(tiny_model, quantized, capsys):
    source = tiny_model("llama")
    out = quantized(source, "torchao")
    assert main(["inspect", str(out), "--against", str(source), "--strict"]) == 0
    shown = capsys.readouterr().out
    assert "mean SNR 20." in shown
    assert "7 copied" in shown and "14 quantized" in shown
    assert "The 10 lowest signal-to-noise ratios" in shown
