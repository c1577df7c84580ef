"""Architecture specs: every tensor of every model is claimed once, every mistake is named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import claim, fused_module, recognize
from nvfp4cli.models.modules import matcher

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")

BIASED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_tensor_is_claimed_once(model_type, tie, tiny_model):
    model = tiny_model(model_type, vocab=264, tie=tie, **BIASED.get(model_type, {}))
    checkpoint = open_checkpoint(model)
    spec = specs.load(model_type)
    claims = claim(spec, checkpoint.tensors, checkpoint.config)
    assert claims.keys() == checkpoint.tensors.keys()
    for name, one in claims.items():
        module = name.rpartition(".")[0]
        matching = [m for m in spec.modules if matcher(m.pattern).fullmatch(module)]
        kept = [k for k in spec.keep if matcher(k).fullmatch(name)]
        assert len(matching) + len(kept) == 1, name
        assert matching == ([one.spec] if one else [])
        if one:
            assert f"{one.module}.{one.part}" == name
            assert one.layer == next(map(int, re.findall(r"layers\.(\d+)\.", name)), None)
    kinds = {one.spec.role for one in claims.values() if one}
    assert kinds - {"inner"} == {"embed", "norm", "reader", "writer"}
    assert ("inner" in kinds) == (model_type == "qwen3")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tie_default_is_that_of_transformers(model_type):
    default = AutoConfig.for_model(model_type).tie_word_embeddings
    assert specs.load(model_type).tied({}) is default
    assert specs.load(model_type).tied({"tie_word_embeddings": not default}) is not default


def test_fused_modules():
    llama = specs.load("llama")
    assert fused_module(llama, "model.layers.3.self_attn.k_proj") == (
        "model.layers.3.self_attn.qkv_proj"
    )
    assert fused_module(llama, "model.layers.3.mlp.up_proj") == "model.layers.3.mlp.gate_up_proj"
    assert fused_module(llama, "model.layers.3.mlp.down_proj") is None
    assert fused_module(llama, "vision.q_proj") is None


def names_of(layers: int) -> list[str]:
    """Tensors of an untied Llama."""
    llama = specs.load("llama")
    return [
        m.pattern.replace("{layer}", str(n)) + ".weight"
        for m in llama.modules
        for n in (range(layers) if "{layer}" in m.pattern else [0])
    ]


LLAMA = {"model_type": "llama", "num_hidden_layers": 2}


def test_complete_checkpoint():
    assert len(claim(specs.load("llama"), names_of(2), LLAMA)) == 2 * 9 + 3


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_tensor(missing):
    names = [name for name in names_of(2) if name != missing]
    with pytest.raises(UnsupportedError, match=f"lacks {re.escape(missing)}, .*complete the"):
        claim(specs.load("llama"), names, LLAMA)


def test_only_an_untied_model_needs_a_head():
    names = [name for name in names_of(2) if name != "lm_head.weight"]
    with pytest.raises(UnsupportedError, match=r"lacks lm_head\.weight, .*tie_word_embeddings"):
        claim(specs.load("llama"), names, LLAMA)
    claims = claim(specs.load("llama"), names, {**LLAMA, "tie_word_embeddings": True})
    assert claims.keys() == set(names)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.lora_A",
        "xmodel.norm.weight",
        "weight",
    ],
)
def test_extra_tensor_is_named(extra):
    with pytest.raises(UnsupportedError, match=f"{re.escape(extra)} is: .*--arch-spec\\.$"):
        claim(specs.load("llama"), [*names_of(2), extra], LLAMA)


def test_layers_beyond_the_config_are_named():
    with pytest.raises(
        UnsupportedError, match=r"layers is 2 .*model\.layers\.2\.\S+, .*and 15 more"
    ):
        claim(specs.load("llama"), names_of(4), LLAMA)


def test_many_extra_tensors_are_counted():
    extra = [f"vision.{i}.weight" for i in range(6)]
    with pytest.raises(UnsupportedError, match=r"vision\.2\.weight and 3 more are: describe them"):
        claim(specs.load("llama"), [*names_of(2), *extra], LLAMA)


def test_old_rotary_buffers_are_kept():
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    for model_type in MODEL_TYPES:
        assert recognize(specs.load(model_type), [name]) == ({name: None}, [])


def test_biases_are_those_config_json_provides_for():
    bias = "model.layers.1.self_attn.q_proj.bias"
    with pytest.raises(
        UnsupportedError, match=f"holds {bias}, and config.json does not set attention_bias"
    ):
        claim(specs.load("llama"), [*names_of(2), bias], LLAMA)
    with pytest.raises(UnsupportedError, match=r"_proj\.bias, .*and attention_bias is true in"):
        claim(specs.load("llama"), [*names_of(2), bias], {**LLAMA, "attention_bias": True})
    with pytest.raises(UnsupportedError, match=f"holds {bias}, and a mistral model has no bias"):
        claim(specs.load("mistral"), [*names_of(2), bias], LLAMA)
    with pytest.raises(UnsupportedError, match=r"proj\.bias.* and a qwen2 model has a bias there"):
        claim(specs.load("qwen2"), [*names_of(2), bias], LLAMA)


def test_a_spec_without_shapes_and_biases_demands_neither(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text("model_type: a\nmodules: {x: {role: embed}}")
    spec = specs.load("a", path)
    claims = claim(spec, ["x.weight", "x.bias"], {"num_hidden_layers": 1})
    assert claims.keys() == {"x.weight", "x.bias"}


def test_unknown_model_type():
    with pytest.raises(UnsupportedError) as caught:
        specs.load("gemma9")
    message = str(caught.value)
    assert "'gemma9'" in message
    assert str(specs.SPECS / "llama.yaml") in message
    assert message.endswith("--arch-spec.")


WRONG = {
    "unknown key": ("model_type: a\nextends: llama\nnorm: x", "unknown key 'norm'"),
    "no model_type": ("extends: llama", "no architecture spec"),
    "not a mapping": ("- a\n- b", "no architecture spec"),
    "not YAML": ("model_type: a\nb: }", "not a readable YAML file (line 2: "),
    "key twice": (
        "model_type: a\nmodules:\n  x: {role: embed}\n  x: {role: norm}",
        "(line 4: the key 'x' stands twice): correct it.",
    ),
    "field twice": ("model_type: a\nmodules: {x: {role: a, role: b}}", "'role' stands twice"),
    "another model_type": (
        "model_type: nova\nextends: llama",
        "describes model_type 'nova', and the checkpoint's is 'llama': give the spec",
    ),
    "no modules": ("model_type: a", "describes no modules"),
    "modules a list": ("model_type: a\nmodules: [x]", "modules is ['x']: make it a mapping"),
    "keep a number": ("model_type: a\nextends: llama\nkeep: [1]", "keep holds 1: write a pattern"),
    "model_type a number": ("model_type: 1\nextends: llama", "model_type is 1: make it a text"),
    "keep a text": ("model_type: a\nextends: llama\nkeep: x", "keep is 'x': make it a list"),
    "bad base": ("model_type: a\nextends: nope", "extends 'nope'"),
    "bad role": ("model_type: a\nmodules: {x: {role: reeder}}", "role of x is 'reeder'"),
    "no role": ("model_type: a\nmodules: {x: {fused: y}}", "gives x no role: write one of"),
    "empty entry": ("model_type: a\nmodules: {x: }", "gives x no role: write one of"),
    "unknown field": (
        "model_type: a\nmodules: {x: {role: embed, gain: y}}",
        "gives x the unknown key 'gain': the keys are role, linear, norm,",
    ),
    "number as pattern": ("model_type: a\nmodules: {1: {role: embed}}", "1 is no pattern"),
    "two layers": (
        'model_type: a\nmodules: {"{layer}.{layer}": {role: embed}}',
        "at most one {layer}",
    ),
    "reader without norm": (
        "model_type: a\nmodules: {x: {role: reader}}",
        "must name the norm before it",
    ),
    "writer with norm": (
        "model_type: a\nmodules: {n: {role: norm}, x: {role: writer, norm: n}}",
        "x names a norm and is no reader",
    ),
    "norm that is not there": (
        "model_type: a\nmodules: {x: {role: reader, norm: y}}",
        "the norm of x is 'y'",
    ),
    "tied to a norm": (
        "model_type: a\nmodules: {n: {role: norm}, x: {role: reader, norm: n, tied_to: n}}",
        "the tied_to of x is 'n'",
    ),
    "shape a text": ("model_type: a\nmodules: {x: {role: embed, shape: y}}", "shape of x is 'y'"),
    "shape of numbers": (
        "model_type: a\nmodules: {x: {role: embed, shape: [4, y]}}",
        "shape of x is [4, 'y']: write",
    ),
    "shape with a power": (
        "model_type: a\nmodules: {x: {role: norm, shape: [y ** z]}}",
        "shape of x is ['y ** z']: write",
    ),
    "bias that is not there": (
        "model_type: a\nmodules: {x: {role: norm, bias: y}}",
        "the bias of x is 'y', which is not",
    ),
    "bad bias": ("model_type: a\nextends: llama\nbiases: {mlp: 1}", "biases holds 1: write true"),
    "bad default": ("model_type: a\nextends: llama\ndefaults: {v: 0}", "defaults holds 0: write a"),
    "bad multiple": (
        "model_type: a\nextends: llama\nmultiples: {v: 4}",
        "multiples holds 4: write",
    ),
    "multiple of a shape": (
        "model_type: a\nextends: llama\nmultiples: {v: at least w}",
        "multiples holds 'at least w': write a size",
    ),
    "bad heads": ("model_type: a\nmodules: {x: {role: writer, heads: rows}}", "heads of x"),
    "bad gain": ("model_type: a\nextends: llama\nnorm_gain: zero", "norm_gain is 'zero'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_spec_is_refused_by_name(case, tmp_path, tiny_model, capsys):
    text, expected = WRONG[case]
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    model = tiny_model("llama", vocab=264)
    argv = ["quantize", str(model), str(tmp_path / "out"), "--arch-spec", str(path), "--dry-run"]
    capsys.readouterr()  # the model's making
    assert main(argv) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(path) in message
    assert expected in message
    assert message.endswith(".\n")


def test_missing_spec_file(tmp_path, tiny_model, capsys):
    path = tmp_path / "spec.yaml"
    argv = ["quantize", str(tiny_model("llama", vocab=264)), str(tmp_path / "out")]
    assert main([*argv, "--arch-spec", str(path)]) == 1
    assert f"no architecture spec {path}" in capsys.readouterr().err


def renamed(model: Path, folder: Path, rename: Callable[[str], str], **config: object) -> Path:
    """A copy of a checkpoint with other tensor names and other entries in config.json."""
    shutil.copytree(model, folder)
    tensors = {rename(name): t for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **config}))
    return folder


def test_a_user_spec_serves_an_unknown_architecture(tmp_path, tiny_model, capsys):
    model = renamed(
        tiny_model("llama", vocab=264), tmp_path / "model",
        lambda name: name.replace("o_proj", "dense"), model_type="nova",
    )  # fmt: skip
    out = tmp_path / "out"
    assert main(["quantize", str(model), str(out)]) == 1
    assert "model_type 'nova'" in capsys.readouterr().err
    path = tmp_path / "nova.yaml"
    path.write_text(
        "model_type: nova\nextends: llama\nmodules:\n"
        "  model.layers.{layer}.self_attn.o_proj: {role: writer, optional: true}\n"
        "  model.layers.{layer}.self_attn.dense: {role: writer, heads: query_columns}\n"
    )
    argv = ["quantize", str(model), str(out), "--arch-spec", str(path), "--layout", "modelopt"]
    assert main([*argv, "--rotate", "r1r2"]) == 0
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.1.self_attn.dense.weight"].dtype == torch.uint8


def test_consolidated_weights_are_not_read(tmp_path, tiny_model):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model("mistral", vocab=264), model)
    save_file({"tok_embeddings.weight": torch.ones(2)}, model / "consolidated.safetensors")
    (model / "params.json").write_text("{}")
    assert main(["quantize", str(model), str(out), "--layout", "modelopt"]) == 0
    assert not (out / "consolidated.safetensors").exists()
    assert (out / "params.json").read_text() == "{}"
