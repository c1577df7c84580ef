"""Quantised sources of other tools: gpt-oss' experts in MXFP4 and DeepSeek's matrices in FP8."""

import shutil
from pathlib import Path

import pytest
import torch
from breaking import edit_json, remove, replace, rewrite

from nvfp4cli.cli.app import main

OSS = "model.layers.0.mlp.experts.down_proj"
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture
def oss(tmp_path, tiny_model) -> Path:
    """A tiny gpt-oss whose experts are MXFP4, with codes of no meaning."""
    folder = Path(shutil.copytree(tiny_model("gpt_oss"), tmp_path / "oss"))

    def pack(tensors):
        for name in [n for n in tensors if n.endswith(("experts.down_proj", "gate_up_proj"))]:
            experts, inner, outer = tensors.pop(name).shape
            assert inner % 32 == 0
            scales = torch.full((experts, outer, inner // 32), 127, dtype=torch.uint8)
            tensors[f"{name}_scales"] = scales
            tensors[f"{name}_blocks"] = torch.ones(*scales.shape, 16, dtype=torch.uint8)

    rewrite(folder, pack)
    declare(
        folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    )
    return folder


@pytest.fixture
def deepseek(tmp_path, tiny_model) -> Path:
    """A tiny DeepSeek in block FP8, whose config.json lists nothing that is not."""
    folder = Path(shutil.copytree(tiny_model("deepseek_v3"), tmp_path / "deepseek"))

    def cast(tensors):
        for name in [n for n in tensors if "_proj" in n]:
            n, k = tensors[name].shape
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(-(-n // 128), -(-k // 128))

    rewrite(folder, cast)
    declare(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder


def declare(folder: Path, quantization: dict) -> None:
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=quantization))


def test_mxfp4_experts_have_the_names_of_the_model(oss, tiny_model, inspect):
    found, plain = inspect(oss), inspect(tiny_model("gpt_oss"))
    assert (found["layout"], found["scheme"], found["violations"]) == ("none", "mxfp4", [])
    assert {t["name"]: t["shape"] for t in found["tensors"]} == {
        t["name"]: t["shape"] for t in plain["tensors"]
    }
    formats = {t["name"]: t["format"] for t in found["tensors"]}
    assert {name for name, kind in formats.items() if kind == "mxfp4"} == {
        name for name in formats if name.endswith(("experts.down_proj", "gate_up_proj"))
    }
    assert main(["inspect", str(oss), "--strict"]) == 0


def test_a_tensor_that_mxfp4_experts_lack_is_missed(oss, inspect):
    remove(oss, f"{OSS}_bias")
    (violation,) = inspect(oss)["violations"]
    assert violation["rule"] == "architecture"
    assert f"lacks {OSS}_bias" in violation["message"]


def test_nan_among_mxfp4_scales(oss, rules):
    replace(oss, f"{OSS}_scales", lambda t: t.fill_(255))
    assert rules(oss) == {(f"{OSS}_scales", "scale-nan")}


def test_routers_and_heads_in_fp8_need_no_listing(deepseek, inspect):
    found = inspect(deepseek)
    assert (found["layout"], found["scheme"], found["violations"]) == ("none", "fp8", [])
    formats = {t["name"]: t["format"] for t in found["tensors"]}
    assert formats["model.layers.1.mlp.gate.weight"] == formats["lm_head.weight"] == "plain"
    assert main(["inspect", str(deepseek), "--strict"]) == 0


def test_other_plain_matrices_beside_fp8_must_be_listed(deepseek, inspect, rules):
    remove(deepseek, f"{O_PROJ}.weight_scale_inv")
    replace(deepseek, f"{O_PROJ}.weight", lambda t: t.bfloat16())
    (violation,) = inspect(deepseek)["violations"]
    assert (violation["tensor"], violation["rule"]) == (f"{O_PROJ}.weight", "config-set")
    assert violation["message"].endswith("list it in `modules_to_not_convert`.")
    declare(deepseek, {"quant_method": "fp8", "modules_to_not_convert": [O_PROJ]})
    assert rules(deepseek) == set()


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_scales_of_fp8_are_positive(value, deepseek, rules):
    replace(deepseek, f"{O_PROJ}.weight_scale_inv", lambda t: t.fill_(value))
    assert rules(deepseek) == {(f"{O_PROJ}.weight_scale_inv", "scale-value")}


def test_what_cannot_be_read_as_float_is_said_once(oss, deepseek, inspect):
    for folder, name in ((oss, f"{OSS}_scales"), (deepseek, f"{O_PROJ}.weight_scale_inv")):
        remove(folder, name)
        (violation,) = inspect(folder)["violations"]
        assert (violation["tensor"], violation["rule"]) == (None, "unreadable")
        assert name in violation["message"]


def test_experts_in_fp8_share_a_tensor(tmp_path, tiny_model, inspect, capsys):
    source = tiny_model("gpt_oss")
    folder = Path(shutil.copytree(source, tmp_path / "experts"))

    def cast(tensors):
        tensors[OSS] = tensors[OSS].to(torch.float8_e4m3fn)
        tensors[f"{OSS}_scale"] = torch.ones(len(tensors[OSS]), 1, 1)

    rewrite(folder, cast)
    found = inspect(folder)
    assert found["violations"] == []
    assert {t["format"] for t in found["tensors"] if t["name"] == OSS} == {"fp8"}
    assert main(["inspect", str(folder), "--against", str(source)]) == 1
    assert f"{OSS} is in FP8 with an axis of experts" in capsys.readouterr().err


def test_mxfp4_is_not_measured(oss, tiny_model, capsys):
    assert main(["inspect", str(oss), "--against", str(tiny_model("gpt_oss"))]) == 1
    assert f"{OSS} is in MXFP4, which cannot be measured yet" in capsys.readouterr().err
