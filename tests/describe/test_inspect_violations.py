"""Each rule: a checkpoint broken in one way violates it, and it alone."""

import json
import shutil

import pytest
import torch
from breaking import edit_json, remove, replace, rewrite
from safetensors.torch import load_file

from nvfp4cli.cli.app import main
from nvfp4cli.formats import swizzle

MODULE = "model.layers.1.mlp.down_proj"  # a part of no fused layer
WEIGHT = f"{MODULE}.weight"
PARTS = {  # codes, block scales, global scale
    "torchao": ("._weight_qdata", "._weight_scale", "._weight_per_tensor_scale"),
    "comfy": (".weight", ".weight_scale", ".weight_scale_2"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2"),
}
LAYOUTS = list(PARTS)
LINEAR = ["compressed-tensors", "modelopt"]
SWIZZLED = ["torchao", "comfy"]


def part(layout, number, module=MODULE):
    return module + PARTS[layout][number]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_missing_part(layout, number, broken, rules):
    folder = broken(layout)
    remove(folder, part(layout, number))
    assert rules(folder) == {(part(layout, number), "part-missing")}


def test_missing_marker(broken, rules):
    folder = broken("comfy")
    remove(folder, f"{MODULE}.comfy_quant")
    assert rules(folder) == {(f"{MODULE}.comfy_quant", "part-missing")}


def test_marker_of_another_format(broken, rules):
    folder = broken("comfy")
    text = bytearray(b'{"format": "float8_e4m3fn"}')
    other = torch.frombuffer(text, dtype=torch.uint8)
    replace(folder, f"{MODULE}.comfy_quant", lambda _: other)
    assert rules(folder) == {(f"{MODULE}.comfy_quant", "comfy-marker")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("number", "dtype"), [(0, torch.int8), (1, torch.float32), (2, torch.bfloat16)]
)
def test_wrong_dtype(layout, number, dtype, broken, rules):
    folder = broken(layout)
    replace(folder, part(layout, number), lambda t: t.to(dtype))
    assert rules(folder) == {(part(layout, number), "part-dtype")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_shapes(layout, broken, rules):
    folder = broken(layout)
    replace(folder, part(layout, 1), lambda t: t.flatten())
    replace(folder, part(layout, 2), lambda t: t.expand(2).clone())
    assert rules(folder) == {
        (part(layout, 1), "part-shape"), (part(layout, 2), "part-shape")
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_another_rank(layout, broken, rules):
    folder = broken(layout)
    replace(folder, part(layout, 0), torch.flatten)
    assert rules(folder) == {(part(layout, 0), "part-shape")}


def test_scalars_may_have_one_dimension_or_none(broken, rules):
    folder = broken("modelopt")
    replace(folder, part("modelopt", 2), lambda t: t.reshape(1))
    assert rules(folder) == set()


def test_columns_that_no_block_fits(broken, rules):
    folder = broken("modelopt")
    replace(folder, part("modelopt", 0), lambda t: t[:, :-4].contiguous())
    found = rules(folder)
    assert (WEIGHT, "part-shape") in found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("byte", "rule"), [(0x7F, "scale-nan"), (0xFF, "scale-nan"), (0xB0, "scale-negative")]
)
def test_bad_block_scale(layout, byte, rule, broken, rules):
    folder = broken(layout)

    def set_first(scales):
        scales.view(torch.uint8).view(-1)[0] = byte
        return scales

    replace(folder, part(layout, 1), set_first)
    assert rules(folder) == {(part(layout, 1), rule)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_bad_global_scale(layout, value, broken, inspect, rules):
    folder = broken(layout)
    replace(folder, part(layout, 2), lambda t: torch.full_like(t, value))
    assert rules(folder) == {(part(layout, 2), "scale-value")}
    row = next(t for t in inspect(folder)["tensors"] if t["name"] == WEIGHT)
    assert row["global_scale"] is None
    assert row["max_block_scale"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_under_a_zero_scale(layout, broken, rules):
    folder = broken(layout)

    def zero_first(scales):
        scales.view(torch.uint8).view(-1)[0] = 0
        return scales

    replace(folder, part(layout, 1), zero_first)
    assert rules(folder) == {(part(layout, 0), "zero-scale")}


@pytest.mark.parametrize("layout", LINEAR)
def test_signed_zeros_under_a_zero_scale_are_harmless(layout, broken, rules):
    folder = broken(layout)

    def zero_block(tensors):
        tensors[part(layout, 1)].view(torch.uint8)[0, 0] = 0
        tensors[part(layout, 0)][0, :8] = 0x80

    rewrite(folder, zero_block)
    assert rules(folder) == set()


@pytest.mark.parametrize("layout", SWIZZLED)
def test_bytes_in_the_padding_of_scales(layout, broken, rules):
    folder = broken(layout)
    n, kb = 64, 128 // 16
    padding = torch.ones(swizzle.padded_shape(n, kb), dtype=torch.uint8)
    padding[:n] = 0
    where = swizzle.swizzle(padding).view(-1).nonzero()

    def soil(scales):
        scales.view(torch.uint8).view(-1)[where[0]] = 0x38
        return scales

    replace(folder, part(layout, 1), soil)
    assert rules(folder) == {(part(layout, 1), "padding")}


def test_bytes_in_the_padding_of_codes(tiny_model, quantized, rules, tmp_path):
    source = tiny_model("llama", head_dim=8, kv_heads=1)
    folder = shutil.copytree(quantized(source, "comfy"), tmp_path / "out")
    name = "model.layers.0.self_attn.k_proj.weight"  # 8 rows of 16

    def soil(codes):
        assert codes.shape[0] == 16
        codes[-1, 0] = 0x10
        return codes

    replace(folder, name, soil)
    assert rules(folder) == {(name, "padding")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [("self_attn", "q", "k", "v"), ("mlp", "gate", "up")])
def test_unequal_global_scales_in_a_fused_layer(layout, fused, broken, inspect):
    folder = broken(layout)
    block, *leaves = fused
    modules = [f"model.layers.0.{block}.{leaf}_proj" for leaf in leaves]
    replace(folder, part(layout, 2, modules[-1]), lambda t: t * 2)
    (violation,) = inspect(folder)["violations"]
    assert violation["rule"] == "fused-global-scale"
    assert violation["tensor"] in [part(layout, 2, module) for module in modules]
    assert all(f"{leaf}_proj" in violation["message"] for leaf in leaves)


@pytest.mark.parametrize(
    "names", [("to_q", "to_k", "to_v"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa")]
)
def test_unequal_global_scales_under_other_names(names, broken, rules):
    folder = broken("modelopt")
    edit_json(folder / "config.json", lambda config: config.update(model_type="unheard_of"))

    def rename(tensors):
        for old, new in zip("qkv", names, strict=False):
            for ending in PARTS["modelopt"]:
                prefix = "model.layers.0.self_attn"
                tensors[f"{prefix}.{new}{ending}"] = tensors.pop(f"{prefix}.{old}_proj{ending}")

    rewrite(folder, rename)
    assert rules(folder) == set()
    replace(folder, f"model.layers.0.self_attn.{names[1]}.weight_scale_2", lambda t: t * 2)
    assert {rule for _, rule in rules(folder)} == {"fused-global-scale"}


def test_fused_layer_quantised_in_part(broken, rules):
    folder = broken("modelopt")
    module = "model.layers.0.mlp.up_proj"

    def restore(tensors):
        for ending in PARTS["modelopt"]:
            del tensors[module + ending]
        tensors[f"{module}.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)

    rewrite(folder, restore)
    for path, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):

        def ignore(value, key=key):
            value.get("quantization_config", value.get("quantization"))[key].append(module)

        edit_json(folder / path, ignore)
    assert rules(folder) == {("model.layers.0.mlp.gate_proj.weight", "fused-format")}


@pytest.mark.parametrize("layout", LINEAR)
def test_quantised_against_the_configuration(layout, broken, rules):
    folder = broken(layout)
    for path, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):
        if (folder / path).exists():

            def ignore(value, key=key):
                value.get("quantization_config", value.get("quantization"))[key].append(MODULE)

            edit_json(folder / path, ignore)
    assert rules(folder) == {(WEIGHT, "config-set")}


@pytest.mark.parametrize("layout", LINEAR)
def test_head_that_the_configuration_does_not_leave_out(layout, broken, rules):
    folder = broken(layout)
    for path, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):
        if (folder / path).exists():

            def forget(value, key=key):
                value.get("quantization_config", value.get("quantization"))[key].remove("lm_head")

            edit_json(folder / path, forget)
    assert rules(folder) == {("lm_head.weight", "config-set")}


def test_torchao_list_of_unquantised_modules(broken, rules):
    folder = broken("torchao")

    def ignore(config):
        config["quantization_config"]["modules_to_not_convert"].append(MODULE)

    edit_json(folder / "config.json", ignore)
    assert rules(folder) == {(WEIGHT, "config-set")}


@pytest.mark.parametrize("layout", ["torchao", "compressed-tensors"])
def test_no_quantization_config(layout, broken, rules):
    folder = broken(layout)
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    assert rules(folder) == {(None, "config-missing")}


def test_hf_quant_config_is_enough_for_modelopt(broken, rules):
    folder = broken("modelopt")
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    assert rules(folder) == set()
    (folder / "hf_quant_config.json").unlink()
    assert rules(folder) == {(None, "config-missing")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_method_of_another_layout(layout, broken, rules):
    folder = broken(layout)
    edit_json(
        folder / "config.json",
        lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}),
    )
    assert rules(folder) == {(None, "config-method")}


def test_malformed_quantization_config_is_an_error(broken, capsys):
    folder = broken("compressed-tensors")
    edit_json(
        folder / "config.json",
        lambda config: config["quantization_config"].update(config_groups=[1]),
    )
    assert main(["inspect", str(folder)]) == 1
    assert "quantization_config of the checkpoint is malformed" in capsys.readouterr().err


def test_hf_quant_config_that_disagrees(broken, rules):
    folder = broken("modelopt")
    edit_json(
        folder / "hf_quant_config.json",
        lambda value: value["quantization"].update(quant_algo="NVFP4"),
    )
    assert rules(folder) == {(None, "config-files")}


def test_weight_only_labelled_as_w4a4(broken, rules):
    folder = broken("compressed-tensors")

    def label(config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = {**group["weights"], "dynamic": "local"}

    edit_json(folder / "config.json", label)
    assert rules(folder) == {(None, "config-scheme")}


def test_torchao_header_without_a_module(broken, rules):
    folder = broken("torchao")
    rewrite(folder, lambda tensors: None, **{WEIGHT: json.dumps({"_type": "Tensor"})})
    assert rules(folder) == {(WEIGHT, "header-metadata")}


def test_weight_stored_twice(broken, rules):
    folder = broken("compressed-tensors")
    plain = torch.zeros(64, 128, dtype=torch.bfloat16)
    rewrite(folder, lambda tensors: tensors.update({WEIGHT: plain}))
    assert (WEIGHT, "stored-twice") in rules(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_plain_tensor_that_is_not_finite(value, broken, inspect):
    folder = broken("modelopt")

    def spoil(gain):
        gain[3] = value
        return gain

    replace(folder, "model.norm.weight", spoil)
    (violation,) = inspect(folder)["violations"]
    assert (violation["tensor"], violation["rule"]) == ("model.norm.weight", "not-finite")
    assert "1 value that is" in violation["message"]


def test_index_with_another_size(tiny_model, rules, tmp_path):
    folder = shutil.copytree(tiny_model("llama", shards=2), tmp_path / "source")
    assert rules(folder) == set()
    edit_json(
        folder / "model.safetensors.index.json",
        lambda index: index["metadata"].update(total_size=1),
    )
    assert rules(folder) == {(None, "index-total-size")}


@pytest.mark.parametrize("name", [".nvfp4-run.json", "model.safetensors.partial"])
def test_leftovers_of_an_unfinished_run(name, broken, rules):
    folder = broken("torchao")
    (folder / name).write_bytes(b"")
    assert rules(folder) == {(None, "unfinished-run")}


def test_tied_head_with_a_tensor_of_its_own(broken, rules):
    folder = broken("modelopt")
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert rules(folder) == {("lm_head.weight", "head")}
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    replace(folder, "lm_head.weight", lambda _: embedding)
    assert rules(folder) == set()  # a copy does no harm


def test_untied_head_that_is_missing(broken, rules):
    folder = broken("modelopt")
    remove(folder, "lm_head.weight")
    assert rules(folder) == {(None, "architecture")}
    edit_json(folder / "config.json", lambda config: config.update(model_type="unheard_of"))
    assert rules(folder) == {(None, "head")}


def test_tensor_that_the_architecture_does_not_have(broken, rules):
    folder = broken("modelopt")
    extra = torch.ones(4)
    rewrite(folder, lambda tensors: tensors.update({"model.extra.weight": extra}))
    assert rules(folder) == {(None, "architecture")}


def test_strict_turns_a_violation_into_a_failure(broken, capsys):
    folder = broken("modelopt")
    assert main(["inspect", str(folder), "--strict"]) == 0
    replace(folder, "model.norm.weight", lambda t: t * float("nan"))
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(folder), "--strict"]) == 1
    shown = capsys.readouterr().out
    assert "1 violation:" in shown
    assert "not-finite: model.norm.weight holds 64 values that are NaN or Inf" in shown
