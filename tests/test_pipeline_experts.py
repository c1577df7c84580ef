"""Experts from one tensor each or from one for all, and sources that are quantised already."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from late import stage
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.formats import nvfp4
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts import open_weights
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

EXPERTS, HIDDEN, WIDTH = 3, 64, 32
SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
    "intermediate_size": WIDTH, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MOE = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "granitemoe": {"num_local_experts": EXPERTS},
}


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of one of MOE whose every parameter is random."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            sizes = dict(SIZES)
            if model_type == "granitemoe":
                del sizes["head_dim"]
            config = AutoConfig.for_model(model_type, **sizes, **MOE[model_type])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            generator = torch.Generator().manual_seed(0)
            for _, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.data = noise + (parameter.ndim == 1)
            made[model_type] = tmp_path_factory.mktemp(model_type)
            model.to(torch.bfloat16).save_pretrained(made[model_type])
        return made[model_type]

    return make


def plan_for(model: Path, **recipe: object) -> Plan:
    recipe = {"layout": "modelopt", **recipe}
    return plan_quantize(
        open_checkpoint(model), Recipe(**recipe), model="m", arch_spec=None, strict=False
    )


def source_matrices(model_type: str, model: Path, expert: int) -> dict[str, Tensor]:
    """gate, up and down of an expert of layer 0, [out, in], cut out by hand."""
    t, layer = load_file(model / "model.safetensors"), "model.layers.0"
    if model_type == "qwen3_moe":
        place = f"{layer}.mlp.experts.{expert}"
        return {n: t[f"{place}.{n}_proj.weight"] for n in ("gate", "up", "down")}
    if model_type == "mixtral":
        place = f"{layer}.block_sparse_moe.experts.{expert}"
        return {
            n: t[f"{place}.{w}.weight"] for n, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        }
    if model_type == "gpt_oss":
        gate_up = t[f"{layer}.mlp.experts.gate_up_proj"][expert].T
        down = t[f"{layer}.mlp.experts.down_proj"][expert].T
        return {"gate": gate_up[0::2], "up": gate_up[1::2], "down": down}
    gate, up = t[f"{layer}.block_sparse_moe.input_linear.weight"][expert].chunk(2)
    down = t[f"{layer}.block_sparse_moe.output_linear.weight"][expert]
    return {"gate": gate, "up": up, "down": down}


def written(model_type: str, expert: int) -> dict[str, str]:
    """The modules as which they are written."""
    block = "mlp" if model_type in ("qwen3_moe", "gpt_oss") else "block_sparse_moe"
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if model_type == "mixtral":
        names = {"gate": "w1", "up": "w3", "down": "w2"}
    return {n: f"model.layers.0.{block}.experts.{expert}.{leaf}" for n, leaf in names.items()}


@pytest.mark.parametrize("model_type", MOE)
def test_each_expert_is_encoded_with_a_scale_shared_by_gate_and_up(model_type, moe, tmp_path):
    model, out = moe(model_type), tmp_path / "out"
    assert quantize(model, out, "--layout", "modelopt") == 0
    stored = open_weights(open_checkpoint(out))
    for expert in range(EXPERTS):
        matrices, modules = source_matrices(model_type, model, expert), written(model_type, expert)
        for group in (("gate", "up"), ("down",)):
            scale = GlobalScale.from_amax(max(nvfp4.amax(matrices[n]) for n in group))
            for n in group:
                expected, found = (
                    nvfp4.quantize(matrices[n], scale),
                    stored.stored(modules[n]).weight,
                )
                assert torch.equal(found.packed, expected.packed)
                assert torch.equal(
                    found.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8)
                )
                assert found.global_scale == expected.global_scale
    assert main(["inspect", str(out), "--strict", "--against", str(model)]) == 0


def test_biases_and_routers_are_cut_and_kept(moe, tmp_path):
    model = moe("gpt_oss")
    assert quantize(model, tmp_path / "out", "--layout", "modelopt") == 0
    before, after = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    place = "model.layers.0.mlp"
    whole = before[f"{place}.experts.gate_up_proj_bias"]
    for expert in range(EXPERTS):
        assert torch.equal(after[f"{place}.experts.{expert}.gate_proj.bias"], whole[expert, 0::2])
        assert torch.equal(after[f"{place}.experts.{expert}.up_proj.bias"], whole[expert, 1::2])
        down = before[f"{place}.experts.down_proj_bias"][expert]
        assert torch.equal(after[f"{place}.experts.{expert}.down_proj.bias"], down)
    for name in ("router.weight", "router.bias"):
        assert torch.equal(after[f"{place}.{name}"], before[f"{place}.{name}"])
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert f"{place}.router" in ignored


@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize(
    "options", [(), ("--rotate", "r1r2"), ("--scheme", "none", "--rotate", "r1")]
)
def test_staged_experts_are_those_of_the_host(model_type, options, moe, tmp_path, monkeypatch):
    options = ("--layout", "modelopt", *options)
    assert quantize(moe(model_type), tmp_path / "host", *options) == 0
    stage(monkeypatch)
    assert quantize(moe(model_type), tmp_path / "staged", *options) == 0
    assert contents(tmp_path / "staged") == contents(tmp_path / "host")


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MOE)
def test_experts_on_a_gpu(model_type, moe, tmp_path):
    options = ("--layout", "modelopt")
    assert quantize(moe(model_type), tmp_path / "host", *options, "--device", "cpu") == 0
    assert quantize(moe(model_type), tmp_path / "gpu", *options, "--device", "cuda") == 0
    assert contents(tmp_path / "gpu") == contents(tmp_path / "host")


def fp8(model: Path, folder: Path) -> Path:
    """The same model with q_proj in FP8 blocks of 128 x 128."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = (tensors[name].float() * 64).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def test_a_quantised_source_gives_what_its_values_give(moe, tmp_path, monkeypatch):
    source, plain = fp8(moe("qwen3_moe"), tmp_path / "fp8"), tmp_path / "plain"
    plain.mkdir()
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale_inv")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text((moe("qwen3_moe") / "config.json").read_text())
    options = ("--layout", "modelopt", "--rotate", "r1r2", "--dtype", "bfloat16")
    assert quantize(plain, tmp_path / "a", *options) == 0
    assert quantize(source, tmp_path / "b", *options) == 0
    weights = [contents(tmp_path / out)["model.safetensors"] for out in ("a", "b")]
    assert weights[0] == weights[1]
    stage(monkeypatch)
    assert quantize(source, tmp_path / "staged", *options) == 0
    assert contents(tmp_path / "staged")["model.safetensors"] == weights[0]


def test_an_expert_of_zeros_is_named_and_finite(moe, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    tensors = load_file(moe("gpt_oss") / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj"][1] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text((moe("gpt_oss") / "config.json").read_text())
    assert quantize(model, tmp_path / "out", "--layout", "compressed-tensors") == 0
    assert "experts.1.gate_proj.weight holds only zeros" in capsys.readouterr().err
    stored = open_weights(open_checkpoint(tmp_path / "out"))
    weight = stored.stored("model.layers.0.mlp.experts.1.up_proj").weight
    assert not nvfp4.dequantize(weight).any()


def test_layouts_without_experts_refuse_them(moe):
    with pytest.raises(UnsupportedError, match=r"No engine reads experts .* --layout compressed"):
        plan_for(moe("mixtral"), layout="torchao")
    assert plan_for(moe("mixtral"), layout="torchao", ignore=("*.experts.*",)).members


def test_experts_in_one_tensor_are_ignored_together(moe):
    plan = plan_for(moe("gpt_oss"), ignore=("*.experts.*",))
    kept = {m.name: m.action for m in plan.members if "experts" in m.name}
    assert kept == dict.fromkeys(kept, "copy")
    assert len(kept) == 4
    with pytest.raises(RecipeError, match=r"experts\.1\.gate_proj and 5 other matrices"):
        plan_for(moe("gpt_oss"), ignore=("*.experts.1.gate_proj",))
    with pytest.raises(
        RecipeError, match=r"a part of the experts of model\.layers\.0\.mlp\.experts,"
    ):
        plan_for(moe("gpt_oss"), ignore=("*.experts.down_proj",))
    # Apart in the source, each is a module of its own, which engines do not like.
    plan = plan_for(moe("qwen3_moe"), ignore=("*.experts.1.*",))
    assert {m.action for m in plan.members if "experts.1." in m.name} == {"copy"}
    assert "--ignore 'model.layers.*.mlp.experts.*'" in plan.facts.warnings[0]


def test_ignored_experts_are_named_as_engines_look_for_them(moe, tmp_path):
    options = ("--layout", "modelopt", "--ignore", "*.experts.*")
    assert quantize(moe("gpt_oss"), tmp_path / "a", *options) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--layout", "modelopt"]) == 0
    for out in ("a", "b"):
        config = json.loads((tmp_path / out / "config.json").read_text())
        ignored = config["quantization_config"]["ignore"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.0.mlp.experts.2.{name}" in ignored


def test_experts_are_not_converted_to_layouts_without_them(moe, tmp_path, capsys):
    assert quantize(moe("mixtral"), tmp_path / "a", "--layout", "modelopt") == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--layout", "torchao"]) == 1
    assert "No engine reads experts" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_routers_are_quantised_with_a_warning(moe):
    plan = plan_for(moe("qwen3_moe"), include=("*.mlp.gate",))
    (warning,) = [w for w in plan.facts.warnings if "--include quantises" in w]
    assert "model.layers.*.mlp.gate, which the architecture keeps (router)" in warning


def test_experts_of_a_width_that_has_a_rest_are_ignored_together(moe, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    tensors = load_file(moe("qwen3_moe") / "model.safetensors")
    for name, tensor in tensors.items():
        if "experts" in name:
            tensors[name] = (tensor[:, :24] if "down" in name else tensor[:24]).contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((moe("qwen3_moe") / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 24}))
    with pytest.raises(
        UnsupportedError, match=r"--ignore 'model\.layers\.\*\.mlp\.experts\.\*'\.$"
    ):
        plan_for(model)
    assert plan_for(model, ignore=("model.layers.*.mlp.experts.*",)).members


def test_parameters_of_no_module_keep_their_dtype(moe):
    plan = plan_for(moe("gpt_oss"), dtype="float32")
    dtypes = {m.name: m.outputs[0].dtype for m in plan.members}
    assert dtypes["model.layers.0.self_attn.sinks"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == torch.float32


def test_mtp_drop_without_such_layers_is_said(moe):
    assert (
        plan_for(moe("mixtral"), mtp="drop").facts.warnings[0].startswith("--mtp drop does nothing")
    )


def test_an_adapter_is_left_out_with_a_warning(moe, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for path in moe("mixtral").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "adapter_config.json").write_text("{}")
    (model / "adapter_model.safetensors").write_bytes(b"")
    assert quantize(model, tmp_path / "out", "--layout", "modelopt") == 0
    assert "The adapter beside the model is left out" in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_converting_experts_changes_nothing(moe, tmp_path):
    first, second, third = (tmp_path / n for n in ("a", "b", "c"))
    assert quantize(moe("gpt_oss"), first, "--layout", "modelopt") == 0
    assert main(["convert", str(first), str(second), "--layout", "compressed-tensors"]) == 0
    assert main(["convert", str(second), str(third), "--layout", "modelopt"]) == 0
    a, c = (load_file(folder / "model.safetensors") for folder in (first, third))
    assert a.keys() == c.keys()
    assert all(torch.equal(a[n].float(), c[n].float()) for n in a)
