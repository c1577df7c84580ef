"""Which format each group of a plan's weights gets, so that a budget of bits costs least."""

import json
import math
import re
from collections.abc import Generator, Iterator
from typing import get_args

import torch

from nvfp4cli.calibrate import sensitivity
from nvfp4cli.calibrate.sensitivity import Unit
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.errors import RecipeError
from nvfp4cli.methods.allocate import Choice, Group, allocate
from nvfp4cli.pipeline.calibrated import folded, stage_number
from nvfp4cli.plan.record import Budget, Decision, Format, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.runtime.parts import Parts

# They rank the groups of a model as its true divergences do; more of them change little.
_TOKENS = 4096
_FORMATS: dict[str, Format] = {form: form for form in get_args(Format)}
_EXPERT = re.compile(r"\.experts\.\d+\..*")


def decide(plan: Plan, text: Sequences, device: str) -> Generator[str, None, Budget]:
    """Measure what each group costs in each format, and choose.

    Yields the stages of the plan as they are done. Raises what `Parts` raises.
    """
    assert plan.spec is not None
    units = _units(plan)
    config = json.loads(plan.files["config.json"])
    parts = Parts(config, folded(plan), dtype=torch.float32, device=device)
    count = max(1, _TOKENS // text.tokens.shape[1])
    activations = plan.recipe.scheme == "w4a4"
    measuring = sensitivity.divergences(
        parts,
        plan.spec,
        text.tokens[:count].split(1),
        {number: list(own) for number, own in units.items()},
        {
            "nvfp4": sensitivity.in_nvfp4(plan.recipe.block_scales, inputs=activations),
            "fp8": sensitivity.in_fp8(inputs=activations),
        },
        plan.recipe.seed,
    )
    while True:
        try:
            yield f"layer {next(measuring)}"
        except StopIteration as end:
            found: dict[Unit, dict[str, float]] = end.value
            break
    jobs = {unit: own for of_layer in units.values() for unit, own in of_layer.items()}
    return Budget(tuple(_decisions(jobs, found, plan.recipe)))


def _units(plan: Plan) -> dict[int | None, dict[Unit, list[Job]]]:
    """By the number of the layer, the jobs that get one format: all experts of a layer do."""
    together: dict[tuple[int | None, str], list[Job]] = {}
    for job in plan.jobs:
        if job.members[0].quantized:
            name = _EXPERT.sub(".experts", job.members[0].module)
            together.setdefault((stage_number(job.stage), name), []).append(job)
    found: dict[int | None, dict[Unit, list[Job]]] = {}
    for (number, _), jobs in together.items():
        unit = tuple(tuple(member.module for member in job.members) for job in jobs)
        found.setdefault(number, {})[unit] = jobs
    return found


def _decisions(
    jobs: dict[Unit, list[Job]], costs: dict[Unit, dict[str, float]], recipe: Recipe
) -> Iterator[Decision]:
    members = {unit: [m for job in own for m in job.members] for unit, own in jobs.items()}
    parameters = {u: sum(math.prod(m.shape) for m in own) for u, own in members.items()}
    bits = {unit: _bits(own, recipe) for unit, own in members.items()}
    costs = {unit: {**costs[unit], "source": 0.0} for unit in jobs}
    ranked = sorted(jobs, key=lambda unit: costs[unit]["nvfp4"], reverse=True)
    worst, others = ranked[: recipe.keep_worst], ranked[recipe.keep_worst :]
    if not others:
        raise RecipeError(
            f"--keep-worst {recipe.keep_worst} leaves nothing to quantise, since the model has "
            f"{len(ranked)} groups of weights: keep fewer."
        )
    formats: dict[Unit, Format] = dict.fromkeys(worst, "source")
    if recipe.bits is not None:
        names = {str(number): unit for number, unit in enumerate(jobs) if unit in others}
        groups = [
            Group(name, parameters[unit], tuple(
                Choice(form, int(size * parameters[unit]), costs[unit][form])
                for form, size in bits[unit].items()
            ))
            for name, unit in names.items()
        ]  # fmt: skip
        for name, choice in allocate(groups, recipe.bits).items():
            formats[names[name]] = _FORMATS[choice.format]
    for unit, own in members.items():
        form = formats.get(unit, "nvfp4")
        weights = tuple(dict.fromkeys(member.weight for member in own))
        size = bits[unit][form]
        yield Decision(_name(unit), weights, parameters[unit], costs[unit], form, size)


def _bits(members: list[Member], recipe: Recipe) -> dict[Format, float]:
    """Of a value in each format; with its share of the block scales."""
    kept = max(_kept_dtype(member, recipe).itemsize for member in members)
    return {"nvfp4": 4.5, "fp8": 8.0, "source": 8.0 * kept}


def _kept_dtype(member: Member, recipe: Recipe) -> torch.dtype:
    dtype = member.source.dtype if recipe.dtype == "source" else getattr(torch, recipe.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _name(unit: Unit) -> str:
    """Of the modules: `model.layers.3.self_attn.q_proj+k_proj+v_proj`."""
    first = unit[0][0]
    if len(unit) > 1:
        return _EXPERT.sub(".experts", first)
    parent = first.rpartition(".")[0]
    return f"{parent}.{'+'.join(module.rpartition('.')[2] for module in unit[0])}".removeprefix(".")
