"""Files as ModelOpt and llm-compressor write them, made by hand from their documentation."""

import json
from pathlib import Path

import pytest
import torch
from breaking import edit_json, remove, replace, rewrite
from safetensors.torch import save_file

from nvfp4cli.cli.app import main
from nvfp4cli.formats.nvfp4 import GlobalScale, amax, quantize

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
SHAPES = {
    f"{ATTENTION}.q_proj": (64, 32), f"{ATTENTION}.k_proj": (32, 32),
    f"{ATTENTION}.v_proj": (32, 32), f"{ATTENTION}.o_proj": (32, 64),
    f"{MLP}.gate_proj": (48, 32), f"{MLP}.up_proj": (48, 32), f"{MLP}.down_proj": (32, 48),
}  # fmt: skip
GROUPS = ([f"{ATTENTION}.{x}_proj" for x in "qkv"], [f"{MLP}.gate_proj", f"{MLP}.up_proj"])
VALUES = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
          "symmetric": True, "dynamic": False}  # fmt: skip
KV_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def weights():
    generator = torch.Generator().manual_seed(0)
    return {m: torch.randn(shape, generator=generator) for m, shape in SHAPES.items()}


def multipliers(found):
    scales = {m: GlobalScale.from_amax(amax(w)) for m, w in found.items()}
    for group in GROUPS:
        scale = GlobalScale.from_amax(max(amax(found[m]) for m in group))
        scales.update(dict.fromkeys(group, scale))
    return scales


def plain():
    generator = torch.Generator().manual_seed(1)
    return {
        "model.embed_tokens.weight": torch.randn(64, 32, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(32, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(64, 32, generator=generator).bfloat16(),
    }


def fp8(module, weight):
    """One bf16 scale for each row, as compressed-tensors' FP8_DYNAMIC."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale}


def modelopt(module, weight, scale):
    matrix = quantize(weight, scale)
    return {
        f"{module}.weight": matrix.packed,
        f"{module}.weight_scale": matrix.block_scale,
        f"{module}.weight_scale_2": torch.tensor(scale.multiplier),
        f"{module}.input_scale": torch.tensor(4.0 / 2688),
    }


def compressed(module, weight, scale):
    matrix = quantize(weight, scale)
    return {
        f"{module}.weight_packed": matrix.packed,
        f"{module}.weight_scale": matrix.block_scale,
        f"{module}.weight_global_scale": torch.tensor([scale.divisor]),
        f"{module}.input_global_scale": torch.tensor([2688 / 4.0]),
    }


def write(folder: Path, tensors, quantization, **files) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "made_up", "architectures": ["MadeUpForCausalLM"],
              "num_hidden_layers": 1, "tie_word_embeddings": False}  # fmt: skip
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def modelopt_w4a4(tmp_path):
    """With an FP8 KV cache, whose scales ModelOpt stores inside the projections."""
    found = weights()
    scales = multipliers(found)
    tensors = plain()
    for module, weight in found.items():
        tensors |= modelopt(module, weight, scales[module])
    tensors[f"{ATTENTION}.k_proj.k_scale"] = torch.tensor(0.01)
    tensors[f"{ATTENTION}.v_proj.v_scale"] = torch.tensor(0.02)
    values = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}
    group = {"targets": ["Linear"], "weights": values, "input_activations": values}
    inline = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
              "kv_cache_scheme": KV_SCHEME, "config_groups": {"group_0": group}}  # fmt: skip
    beside = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
              "exclude_modules": ["lm_head", "model.embed_tokens"]}  # fmt: skip
    return write(tmp_path / "modelopt", tensors, inline, hf_quant_config={"quantization": beside})


@pytest.fixture
def compressed_w4a4(tmp_path):
    """As llm-compressor's NVFP4 scheme with a KV cache scheme."""
    found = weights()
    scales = multipliers(found)
    tensors = plain()
    for module, weight in found.items():
        tensors |= compressed(module, weight, scales[module])
    tensors[f"{ATTENTION}.k_scale"] = torch.tensor([0.01], dtype=torch.bfloat16)
    tensors[f"{ATTENTION}.v_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
    group = {"targets": ["Linear"], "weights": VALUES, "format": "nvfp4-pack-quantized",
             "input_activations": {**VALUES, "dynamic": "local"}}  # fmt: skip
    quantization = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                    "ignore": ["lm_head"], "kv_cache_scheme": KV_SCHEME,
                    "config_groups": {"group_0": group}}  # fmt: skip
    return write(tmp_path / "compressed", tensors, quantization)


@pytest.fixture
def compressed_mixed(tmp_path):
    """Attention in FP8, the rest in NVFP4."""
    found = weights()
    scales = multipliers(found)
    tensors = plain()
    for module, weight in found.items():
        in_fp8 = "self_attn" in module
        tensors |= fp8(module, weight) if in_fp8 else compressed(module, weight, scales[module])
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*_proj$"], "format": "float-quantized",
                    "weights": {**eight, "strategy": "channel", "dynamic": False},
                    "input_activations": {**eight, "strategy": "token", "dynamic": True}},
        "group_1": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": VALUES,
                    "input_activations": {**VALUES, "dynamic": "local"}},
    }  # fmt: skip
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision",
                    "ignore": ["re:.*lm_head"], "config_groups": groups}  # fmt: skip
    return write(tmp_path / "mixed", tensors, quantization)


@pytest.mark.parametrize("made", ["modelopt_w4a4", "compressed_w4a4"])
def test_w4a4_with_input_and_cache_scales(made, request, inspect):
    found = inspect(request.getfixturevalue(made))
    assert found["violations"] == []
    assert found["layout"] == {"m": "modelopt", "c": "compressed-tensors"}[made[0]]
    assert found["scheme"] == "w4a4"
    assert found["rotation"] == {"kind": "unknown", "seed": None, "sizes": {}}
    rows = {t["name"]: t for t in found["tensors"]}
    assert rows.keys() == {f"{m}.weight" for m in SHAPES} | plain().keys()
    scales = multipliers(weights())
    for module, shape in SHAPES.items():
        row = rows[f"{module}.weight"]
        assert row["shape"] == list(shape)
        # Both directions are rounded to fp32 from amax, so they agree to its last place.
        assert row["global_scale"] == pytest.approx(scales[module].multiplier, rel=2**-23)
        assert row["input_scale"] == pytest.approx(4 / 2688, rel=2**-23)


def test_mixed_fp8_and_nvfp4(compressed_mixed, inspect):
    found = inspect(compressed_mixed)
    assert found["violations"] == []
    assert (found["layout"], found["scheme"]) == ("compressed-tensors", "mixed")
    formats = {t["name"]: t["format"] for t in found["tensors"]}
    assert formats[f"{ATTENTION}.q_proj.weight"] == "fp8"
    assert formats[f"{MLP}.up_proj.weight"] == "nvfp4"
    assert formats["lm_head.weight"] == "plain"
    assert not any(name.endswith("weight_scale") for name in formats)


def test_modelopt_mixed_precision_lists_its_layers(tmp_path, inspect, rules):
    found = weights()
    scales = multipliers(found)
    tensors, layers = plain(), {}
    for module, weight in found.items():
        if "self_attn" in module:
            tensors |= fp8(module, weight)
            tensors[f"{module}.input_scale"] = torch.tensor(0.01)
            layers[module] = {"quant_algo": "FP8"}
        else:
            tensors |= modelopt(module, weight, scales[module])
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                    "ignore": ["lm_head"], "quantized_layers": layers}  # fmt: skip
    folder = write(tmp_path / "layers", tensors, quantization)
    found = inspect(folder)
    assert (found["layout"], found["scheme"], found["violations"]) == ("modelopt", "mixed", [])

    def swap(config):
        config["quantization_config"]["quantized_layers"][f"{MLP}.down_proj"]["quant_algo"] = "FP8"

    edit_json(folder / "config.json", swap)
    assert (f"{MLP}.down_proj.weight", "config-set") in rules(folder)


@pytest.mark.parametrize("pattern", ["lm_head", "lm_*", "re:.*head$"])
def test_patterns_of_exclusion(pattern, modelopt_w4a4, rules):
    def exclude(config):
        config["quantization_config"]["ignore"] = [pattern]

    edit_json(modelopt_w4a4 / "config.json", exclude)
    assert rules(modelopt_w4a4) == set()


def test_nan_in_fp8(compressed_mixed, rules):
    name = f"{ATTENTION}.o_proj.weight"

    def spoil(codes):
        codes.view(torch.uint8)[0, 0] = 0x7F
        return codes

    replace(compressed_mixed, name, spoil)
    assert rules(compressed_mixed) == {(name, "not-finite")}


def test_module_stored_in_another_format_than_said(compressed_mixed, rules):
    def retarget(config):
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*_proj$"]

    edit_json(compressed_mixed / "config.json", retarget)
    assert rules(compressed_mixed) == {
        (f"{MLP}.{leaf}_proj.weight", "config-set") for leaf in ("gate", "up", "down")
    }


def test_unequal_input_scales_in_a_fused_layer(modelopt_w4a4, compressed_w4a4, rules):
    for folder, ending in ((modelopt_w4a4, "input_scale"), (compressed_w4a4, "input_global_scale")):
        replace(folder, f"{MLP}.up_proj.{ending}", lambda t: t * 2)
        ((tensor, rule),) = rules(folder)
        assert (tensor, rule) == (f"{MLP}.gate_proj.{ending}", "fused-input-scale")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_bad_input_and_cache_scales(value, modelopt_w4a4, rules):
    for name in (f"{MLP}.down_proj.input_scale", f"{ATTENTION}.k_proj.k_scale"):
        replace(modelopt_w4a4, name, lambda t: torch.full_like(t, value))
    assert rules(modelopt_w4a4) == {
        (f"{MLP}.down_proj.input_scale", "scale-value"),
        (f"{ATTENTION}.k_proj.k_scale", "scale-value"),
    }


def test_input_scale_of_another_type(modelopt_w4a4, rules):
    name = f"{MLP}.down_proj.input_scale"
    replace(modelopt_w4a4, name, lambda t: t.bfloat16())
    assert rules(modelopt_w4a4) == {(name, "part-dtype")}


def test_one_missing_input_scale(compressed_w4a4, rules):
    remove(compressed_w4a4, f"{MLP}.down_proj.input_global_scale")
    assert rules(compressed_w4a4) == {(f"{MLP}.down_proj.weight", "part-missing")}


def test_w4a4_without_any_input_scale(modelopt_w4a4, rules):
    def drop(tensors):
        for module in SHAPES:
            del tensors[f"{module}.input_scale"]

    rewrite(modelopt_w4a4, drop)
    assert rules(modelopt_w4a4) == {(None, "config-scheme")}


def test_w4a4_labelled_as_weight_only(compressed_w4a4, rules):
    def label(config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = None

    edit_json(compressed_w4a4 / "config.json", label)
    assert rules(compressed_w4a4) == {(None, "config-scheme")}


@pytest.mark.parametrize("made", ["modelopt_w4a4", "compressed_w4a4"])
@pytest.mark.parametrize("endings", [(".k_scale", ".v_scale"), (".v_scale",)])
def test_claimed_cache_without_its_scales(made, endings, request, rules):
    folder = request.getfixturevalue(made)

    def drop(tensors):
        for name in [name for name in tensors if name.endswith(endings)]:
            del tensors[name]

    rewrite(folder, drop)
    assert rules(folder) == {(None, "kv-cache")}


def test_cache_scales_that_nothing_claims(compressed_w4a4, rules):
    edit_json(
        compressed_w4a4 / "config.json",
        lambda config: config["quantization_config"].update(kv_cache_scheme=None),
    )
    assert rules(compressed_w4a4) == {(None, "kv-cache")}


def test_configurations_that_disagree_about_the_cache(modelopt_w4a4, rules):
    edit_json(
        modelopt_w4a4 / "hf_quant_config.json",
        lambda value: value["quantization"].update(kv_cache_quant_algo=None),
    )
    assert rules(modelopt_w4a4) == {(None, "config-files")}


def test_fp8_and_mxfp4_alone(tmp_path, inspect):
    tensors = plain()
    for module, weight in weights().items():
        tensors |= fp8(module, weight)
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    found = inspect(write(tmp_path / "fp8", tensors, quantization))
    assert (found["layout"], found["scheme"], found["violations"]) == ("none", "fp8", [])

    tensors = plain()
    whole = {module: (n, k) for module, (n, k) in SHAPES.items() if k % 32 == 0}
    for module, (n, k) in whole.items():
        tensors[f"{module}.weight_packed"] = torch.zeros(n, k // 2, dtype=torch.uint8)
        tensors[f"{module}.weight_scale"] = torch.zeros(n, k // 32, dtype=torch.uint8)
    values = {**VALUES, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": values, "input_activations": None}
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                    "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip
    found = inspect(write(tmp_path / "mxfp4", tensors, quantization))
    assert (found["layout"], found["scheme"], found["violations"]) == ("none", "mxfp4", [])
    shapes = {t["name"]: tuple(t["shape"]) for t in found["tensors"]}
    assert all(shapes[f"{module}.weight"] == shape for module, shape in whole.items())


@pytest.mark.parametrize("made", ["modelopt_w4a4", "compressed_w4a4", "compressed_mixed"])
def test_errors_against_the_source(made, request, tmp_path, inspect):
    source = plain() | {f"{m}.weight": weight for m, weight in weights().items()}
    origin = write(tmp_path / "origin", source, None)
    found = inspect(request.getfixturevalue(made), "--against", str(origin))
    assert found["violations"] == []
    errors = {t["name"]: t["relative_error"] for t in found["against"]["tensors"]}
    for module in SHAPES:
        # E4M3's largest relative step, 2^-4, bounds FP8; Gaussian weights in NVFP4 have 0.095.
        in_fp8 = made == "compressed_mixed" and "self_attn" in module
        low, high = (0.01, 2**-4) if in_fp8 else (0.085, 0.105)
        assert low < errors[f"{module}.weight"] < high
    assert all(errors[name] == 0 for name in plain())


def test_fp8_with_a_scale_for_each_block(tmp_path, inspect):
    """DeepSeek's form: blocks of 128 x 128, the last ones cut off."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(160, 192, generator=generator)
    scale = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
    weight = weight.to(torch.float8_e4m3fn).float()
    codes = weight.to(torch.float8_e4m3fn)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = {"a.down_proj.weight": codes, "a.down_proj.weight_scale_inv": scale}
    out = write(tmp_path / "blocks", {**stored, "lm_head.weight": codes.clone()}, quantization)
    source = {"a.down_proj.weight": weight * whole, "lm_head.weight": weight}
    origin = write(tmp_path / "origin", source, None)
    found = inspect(out, "--against", str(origin))
    assert [t["relative_error"] for t in found["against"]["tensors"]] == [0.0, 0.0]


def test_what_cannot_be_decoded_is_refused(tmp_path, capsys):
    codes = torch.ones(32, 48).to(torch.float8_e4m3fn)
    odd = {"a.down_proj.weight": codes, "a.down_proj.weight_scale": torch.ones(2, 2)}
    packed = torch.zeros(32, 24, dtype=torch.uint8)
    mxfp4 = {"a.down_proj.weight_packed": packed,
             "a.down_proj.weight_scale": torch.zeros(32, 2, dtype=torch.uint8)}  # fmt: skip
    source = write(tmp_path / "origin", {"a.down_proj.weight": torch.ones(32, 48)}, None)
    for name, tensors, sentence in (
        ("odd", odd, "fits neither the rows"),
        ("mxfp4", mxfp4, "cannot be measured yet"),
    ):
        out = write(tmp_path / name, tensors, None)
        assert main(["inspect", str(out), "--against", str(source)]) == 1
        assert sentence in capsys.readouterr().err
