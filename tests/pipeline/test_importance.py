"""Second moments of inputs from weights alone, against the formula in double precision."""

import pytest
import torch
from command import quantize
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts import open_weights
from nvfp4cli.methods import scales
from nvfp4cli.pipeline import importance
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Member, Plan
from nvfp4cli.recipe import Recipe

LAYER = "model.layers.1"


def plan_of(model, **options) -> Plan:
    recipe = Recipe(layout="compressed-tensors", method="mse", **options)
    return plan_quantize(open_checkpoint(model), recipe, model="m", arch_spec=None, strict=False)


def member(plan: Plan, module: str) -> Member:
    return next(m for m in plan.members if m.name == f"{module}.weight")


def found(plan: Plan, module: str) -> Tensor | None:
    return importance.estimate(plan, member(plan, module))


def wide(source: Checkpoint, name: str) -> Tensor:
    return source.read(name).double()


def close(share: Tensor | None, moments: Tensor) -> bool:
    """fp32 sums of at most 128 terms, multiplied at most once: some 10 roundings of 2^-24."""
    assert share is not None
    return torch.allclose(share.double(), importance.counted(moments), rtol=1e-6, atol=0)


def rows(source: Checkpoint, module: str, inputs: Tensor) -> Tensor:
    total = (wide(source, f"{module}.weight").square() * inputs).sum(dim=1)
    bias = f"{module}.bias"
    return total + wide(source, bias).square() if bias in source.tensors else total


@pytest.mark.parametrize(("model_type", "offset"), [("llama", 0), ("qwen2", 0), ("gemma", 1)])
def test_every_input_of_a_layer(model_type, offset, tiny_model):
    model = tiny_model(model_type)
    plan, source = plan_of(model), open_checkpoint(model)
    behind, after = (
        (wide(source, f"{LAYER}.{name}_layernorm.weight") + offset).square()
        for name in ("input", "post_attention")
    )
    for name in ("q", "k", "v"):
        assert close(found(plan, f"{LAYER}.self_attn.{name}_proj"), behind)
    values = rows(source, f"{LAYER}.self_attn.v_proj", behind)
    heads = source.config["num_key_value_heads"]
    readers = source.config["num_attention_heads"] // heads
    read = values.view(heads, 1, -1).expand(-1, readers, -1).flatten()
    assert close(found(plan, f"{LAYER}.self_attn.o_proj"), read)
    gate, up = (rows(source, f"{LAYER}.mlp.{name}_proj", after) for name in ("gate", "up"))
    assert close(found(plan, f"{LAYER}.mlp.down_proj"), gate * up)


def test_the_bias_of_a_norm_counts_and_what_is_unknown_is_all_alike(tiny_model):
    model = tiny_model("gpt2")
    plan, source = plan_of(model), open_checkpoint(model)
    gain, bias = (wide(source, f"transformer.h.1.ln_1.{part}") for part in ("weight", "bias"))
    share = found(plan, "transformer.h.1.attn.c_attn")
    assert close(share, gain.square() + bias.square())
    assert found(plan, "transformer.h.1.mlp.c_proj") is None


def test_rotated_inputs(tiny_model):
    model = tiny_model("llama", vocab=264)
    plain, turned = plan_of(model), plan_of(model, rotate="r1r2")
    assert torch.equal(found(turned, f"{LAYER}.self_attn.q_proj"), torch.ones(64))
    # R1 keeps the lengths of rows; R2 mixes those of a head and keeps their sum of squares.
    down = f"{LAYER}.mlp.down_proj"
    assert torch.allclose(found(turned, down), found(plain, down), rtol=1e-4, atol=0)
    o_proj = f"{LAYER}.self_attn.o_proj"
    spread = [found(plan, o_proj).std() for plan in (turned, plain)]
    assert spread[0] > 0 and not torch.allclose(*spread)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_each_expert_has_its_own(model_type, tiny_model):
    plan = plan_of(tiny_model(model_type))
    experts = [m for m in plan.members if ".experts." in m.name and m.action == "quantize"]
    last = [m for m in experts if m.module.endswith(("down_proj", "w2"))]
    shares = [importance.estimate(plan, m) for m in last]
    assert len(shares) > 2 and all(share is not None for share in shares)
    assert not any(torch.equal(shares[0], share) for share in shares[1:])


def test_the_tiling_changes_nothing(tiny_model, monkeypatch):
    plan = plan_of(tiny_model("llama", vocab=264), rotate="r1")
    whole = found(plan, f"{LAYER}.mlp.down_proj")
    monkeypatch.setattr(importance, "_TILE", 1000)
    assert torch.equal(found(plan, f"{LAYER}.mlp.down_proj"), whole)


def test_a_run_weighs_by_it(tiny_model, tmp_path):
    model = tiny_model("llama", vocab=264)
    options = ("--layout", "compressed-tensors", "--method", "mse")
    assert quantize(model, tmp_path / "out", *options) == 0
    plan, source = plan_of(model), open_checkpoint(model)
    stored = open_weights(open_checkpoint(tmp_path / "out"))
    changed = 0
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module = f"{LAYER}.{name}"
        weight = source.read(f"{module}.weight")
        scale = scales.global_scale(nvfp4.amax(weight), "mse")
        bytes_of = stored.stored(module).weight.block_scale.view(torch.uint8)
        weighed = scales.quantize(weight, scale, "mse", found(plan, module))
        assert torch.equal(bytes_of, weighed.block_scale.view(torch.uint8))
        plain = scales.quantize(weight, scale, "mse")
        changed += int((bytes_of != plain.block_scale.view(torch.uint8)).sum())
    assert changed > 0


def test_a_text_takes_its_place(tiny_model):
    model = tiny_model("llama", vocab=264)
    assert not plan_of(model, text="random").feeds
    recipe = Recipe(layout="compressed-tensors")
    checkpoint = open_checkpoint(model)
    assert not plan_quantize(checkpoint, recipe, model="m", arch_spec=None, strict=False).feeds
