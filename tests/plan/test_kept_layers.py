"""Decoder layers at the ends that stay as they are, with the reason of every decision."""

from pathlib import Path

import pytest

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import RecipeError
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe


def planned(folder: Path, **wish: object) -> Plan:
    recipe = Recipe(layout="modelopt", **wish)
    return plan_quantize(open_checkpoint(folder), recipe, model="m", arch_spec=None, strict=True)


def reasons(plan: Plan, layer: int, part: str) -> set[tuple[str, str]]:
    """(action, reason) of the weights of a layer whose names hold a part."""
    return {
        (member.action, member.reason)
        for member in plan.members
        if member.name.startswith(f"model.layers.{layer}.") and f".{part}" in member.name
    }


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("llama", "mlp."), ("mixtral", "experts."), ("phi3", "self_attn.")],
)
@pytest.mark.parametrize(("end", "kept"), [("keep_first", 0), ("keep_last", 1)])
def test_an_end_is_kept_with_its_reason(end, kept, model_type, part, tiny_model):
    plan = planned(tiny_model(model_type), **{end: 1})
    assert {reason for _, reason in reasons(plan, kept, part)} == {f"--{end.replace('_', '-')}"}
    assert {action for action, _ in reasons(plan, 1 - kept, part)} == {"quantize"}
    assert not any(m.action == "quantize" for m in plan.members if f"layers.{kept}." in m.name)


def test_engines_are_told_of_kept_layers(tiny_model):
    plan = planned(tiny_model("llama", layers=3), keep_first=2)
    projections = {name for name in plan.facts.kept if name.startswith("model.layers.")}
    assert len(projections) == 2 * 7
    assert not any(name.startswith("model.layers.2.") for name in projections)


def test_a_layer_at_both_ends_is_kept_by_the_first(tiny_model):
    folder = tiny_model("llama", layers=3)
    plan = planned(folder, keep_first=2, keep_last=2, include=("lm_head",))
    assert reasons(plan, 1, "mlp.") == {("copy", "--keep-first")}
    assert {m.name for m in plan.members if m.action == "quantize"} == {"lm_head.weight"}


@pytest.mark.parametrize(
    "wish", [{"keep_first": 2}, {"keep_last": 9}, {"keep_first": 1, "keep_last": 1}]
)
def test_nothing_left_to_quantise_is_an_error(wish, tiny_model):
    with pytest.raises(RecipeError, match=r"layers that are kept leave nothing to quantise: keep "):
        planned(tiny_model("llama"), **wish)
