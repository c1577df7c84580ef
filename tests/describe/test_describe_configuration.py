"""What a quantization_config says of a module."""

import pytest

from nvfp4cli.describe.configuration import Claim, parse
from nvfp4cli.errors import CheckpointError

VALUES = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
W4A16, W4A4 = Claim("nvfp4"), Claim("nvfp4", activations=True, input_scale=True)


def compressed(*groups, ignore=()):
    numbered = {f"group_{i}": group for i, group in enumerate(groups)}
    return parse(
        {"quant_method": "compressed-tensors", "config_groups": numbered, "ignore": list(ignore)}
    )


def group(targets, inputs=None, **values):
    return {"targets": targets, "weights": {**VALUES, **values}, "input_activations": inputs}


def test_names_go_before_class_names():
    eight = {"num_bits": 8, "type": "float", "dynamic": True}
    found = compressed(
        group(["Linear"]), group(["a.down_proj", "re:.*o_proj$"], eight, num_bits=8)
    )  # fmt: skip
    assert found.claim("a.up_proj") == W4A16
    assert found.claim("a.down_proj") == Claim("fp8", activations=True)
    assert found.claim("layers.3.o_proj") == Claim("fp8", activations=True)
    assert found.claim("b.a.down_proj") == W4A16  # a whole name


def test_modules_that_no_group_names_are_left_alone():
    assert compressed(group(["re:.*mlp.*"])).claim("a.self_attn.q_proj") is None
    assert compressed(group(["Linear"]), ignore=["a.q_proj"]).claim("a.q_proj") is None
    assert compressed(group(["Linear"]), ignore=["q_proj"]).claim("a.q_proj") == W4A16


@pytest.mark.parametrize(
    ("values", "name"),
    [({"group_size": 32}, "mxfp4"), ({"group_size": 64}, "other"), ({"type": "int"}, "other")],
)
def test_only_blocks_of_16_floats_are_nvfp4(values, name):
    assert compressed(group(["Linear"], **values)).claim("m") == Claim(name)


@pytest.mark.parametrize(
    ("quantization", "claim"),
    [
        ({"quant_algo": "NVFP4"}, W4A4),
        ({"quant_algo": "W4A16_NVFP4"}, W4A16),
        ({"quant_algo": "NVFP4", "config_groups": {"group_0": group(["Linear"])}}, W4A16),
        ({"quant_algo": "NVFP4", "group_size": 32}, Claim("other")),
        ({"quant_algo": "FP8"}, Claim("fp8", activations=True, input_scale=True)),
        ({"quant_algo": "INT4_AWQ"}, Claim("other")),
    ],
)
def test_modelopt_algorithms(quantization, claim):
    assert parse({"quant_method": "modelopt", **quantization}).claim("m") == claim


@pytest.mark.parametrize(
    ("pattern", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "layers.0.mlp.gate", True),
        ("mlp.gate", "layers.0.mlp.gate_proj", False),
        ("layers.0.self_attn*", "layers.0.self_attn.q_proj", True),
        ("layers.1.*", "layers.11.q_proj", False),
    ],
)
def test_modelopt_exclusions(pattern, module, ignored):
    found = parse({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [pattern]})
    assert (found.claim(module) is None) == ignored


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        ("NVFP4WeightOnlyConfig", W4A16),
        ("NVFP4DynamicActivationNVFP4WeightConfig", Claim("nvfp4", activations=True)),
    ],
)
def test_torchao_configurations(kind, claim):
    found = parse(
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": kind, "_data": {}}},
            "modules_to_not_convert": ["skipped"],
        }
    )
    assert found.claim("a.q_proj") == claim
    assert found.claim("a.skipped") is None
    assert found.claim("lm_head") is None  # unless input and output embeddings are included


def test_other_methods_are_not_judged():
    assert not parse({"quant_method": "gptq", "bits": 4}).understood
    config = {"_type": "Int4WeightOnlyConfig"}
    assert not parse({"quant_method": "torchao", "quant_type": {"default": config}}).understood


def test_regular_expression_that_is_none():
    with pytest.raises(CheckpointError, match=r"no regular expression .*: mend it"):
        compressed(group(["Linear"]), ignore=["re:*bad"]).claim("m")
