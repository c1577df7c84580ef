"""The commands that write checkpoints: quantize and convert."""

import shlex
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nvfp4cli import pipeline
from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli import calibrating, console
from nvfp4cli.cli.device import pick
from nvfp4cli.cli.source import Source
from nvfp4cli.errors import RecipeError
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.pipeline.calibrated import memory_bytes
from nvfp4cli.plan.convert import plan_convert
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Budget, Plan
from nvfp4cli.recipe import CORRELATED, RANDOM_TEXT, SEARCHED, Recipe

# What works for this share of the time holds up everything else.
_BUSY = 0.8


@dataclass(frozen=True)
class Manner:
    """How to run, as opposed to what to make."""

    device: str = "cpu"
    resume: bool = False
    dry_run: bool = False
    as_json: bool = False
    stats: Path | None = None


def quantize(
    source: Source,
    out: Path,
    recipe: Recipe,
    *,
    given: Collection[str],
    strict: bool,
    manner: Manner,
) -> None:
    """Plan, then run or show the plan. given: the keys of the recipe that were options."""
    if manner.stats is not None and recipe.method in CORRELATED:
        raise RecipeError(
            f"--stats holds mean squares of inputs, and {recipe.method} needs the text itself: "
            "leave it out, or use --method mse."
        )
    if manner.stats is not None and (recipe.measures or recipe.scales_channels):
        raise RecipeError(
            "--bits, --keep-worst and channel scales are found by running the model, and --stats "
            "is there to save that: leave out one of them."
        )
    idle = _idle(recipe, given, manner)
    if strict and idle:
        raise RecipeError(idle[0])
    pick(manner.device)  # a device that is not there is said before anything is read
    checkpoint = source.open(headers_only=manner.dry_run)
    make = partial(
        plan_quantize,
        checkpoint,
        recipe,
        model=source.model,
        arch_spec=source.arch_spec,
        strict=strict,
    )
    plan = make()
    shown: Sequences | Statistics | None = None
    if manner.stats is not None:
        shown = calibrating.reuse(manner.stats, plan)
    elif recipe.needs_text and not manner.dry_run:  # then a hub id has no tokenizer here yet
        shown = calibrating.sequences(plan)
    if isinstance(shown, Sequences):
        plan = _measured(plan, make, shown, pick(manner.device))
    _show_or_run(_warned(plan, idle), out, manner, shown)


def _measured(plan: Plan, make: Callable[..., Plan], text: Sequences, device: str) -> Plan:
    """The plan with what running the model decides."""
    channels = None
    if plan.recipe.scales_channels:
        channels = calibrating.channel_scales(plan, text, device)
        plan = make(channels=channels)
    if plan.recipe.measures:
        plan = make(channels=channels, budget=calibrating.budget(plan, text, device))
    return plan


def convert(
    checkpoint: Path, out: Path, layout: str, max_shard_size: str | None, manner: Manner
) -> None:
    """Plan, then run or show the plan."""
    plan = plan_convert(open_checkpoint(checkpoint), layout, max_shard_size)
    given = () if max_shard_size is None else ("max_shard_size",)
    _show_or_run(_warned(plan, _idle(Recipe(layout=layout), given, manner)), out, manner)


def _idle(recipe: Recipe, given: Collection[str], manner: Manner) -> list[str]:
    """Sentences for options that do nothing beside the others.

    given: the keys that were options. The values of a recipe file are no such choice: a file may
    state them all, as the record of every run does. Patterns are the plan's to judge.
    """
    found = []
    if recipe.scheme == "none" and "layout" in given:
        found.append("--layout does nothing with --scheme none: leave it out.")
    idle = {"scales": recipe.method not in SEARCHED, "rank": recipe.method != "svd"}
    found += [
        f"--{key} does nothing with --method {recipe.method}: leave it out."
        for key, does_nothing in idle.items()
        if does_nothing and key in given
    ]
    if manner.stats is not None or not recipe.needs_text:
        why = "with --stats" if manner.stats is not None else "where nothing is calibrated"
        found += [
            f"--{key.replace('_', '-')} does nothing {why}: leave it out."
            for key in ("text", "sequences", "sequence_length")
            if key in given
        ]
    if recipe.rotate == "none":
        found += [
            f"--{key.replace('_', '-')} does nothing without a rotation: leave it out, or add "
            "--rotate."
            for key in ("rotation_kind", "seed")
            if key in given and not (key == "seed" and recipe.text == RANDOM_TEXT)
        ]
    single = recipe.scheme != "none" and LAYOUTS[recipe.layout].SINGLE_FILE
    if single and "max_shard_size" in given:
        found.append(
            f"--max-shard-size does nothing in the {recipe.layout} layout, which is one file: "
            "leave it out."
        )
    if manner.resume and manner.dry_run:
        found.append("--resume does nothing with --dry-run: leave out one of them.")
    return found


def _warned(plan: Plan, messages: list[str]) -> Plan:
    """The plan with further warnings before its own."""
    warnings = (*messages, *plan.facts.warnings)
    return replace(plan, facts=replace(plan.facts, warnings=warnings))


def _show_or_run(
    plan: Plan, out: Path, manner: Manner, shown: Sequences | Statistics | None = None
) -> None:
    if manner.dry_run:
        _show_plan(plan, manner.as_json)
    else:
        _run(plan, out, manner, shown)


def _tell(plan: Plan) -> None:
    """Warnings, and what the architecture keeps in the source dtype."""
    for message in plan.facts.warnings:
        console.warn(message)
    for because, patterns in plan.facts.presets.items():
        console.say(f"Kept in the source dtype ({because}): {', '.join(patterns)}")


def _run(plan: Plan, out: Path, manner: Manner, shown: Sequences | Statistics | None) -> None:
    _tell(plan)
    if isinstance(shown, Sequences):
        console.say(calibrating.sentence(shown))
    device = pick(manner.device)
    began = time.perf_counter()
    found = list(plan.facts.warnings)
    occupation = ""
    with console.progress_bar() as bar:
        task = bar.add_task("starting", total=plan.source_bytes)
        running = pipeline.run(plan, out, resume=manner.resume, device=device, shown=shown)
        for event in running:
            if event.kind == "warning":
                console.warn(event.message)
                found.append(event.message)
            elif event.kind == "summary":
                occupation = _occupation(event)
            else:
                bar.update(task, completed=event.done, total=event.total, description=event.stage)
    seconds = time.perf_counter() - began
    summary = {
        "out": str(out),
        **_facts(plan),
        "seconds": round(seconds, 3),
        "next_step": _next_step(plan, out),
        "warnings": found,
    }
    if manner.as_json:
        console.print_json(summary)
        return
    if plan.facts.budget:
        _print_budget(plan.facts.budget)
    _print_summary(plan, out, seconds)
    if occupation:
        console.line(occupation)
    console.line(_next_step(plan, out))


def _occupation(event: pipeline.Event) -> str:
    """How busy the GPU was, and what held the run up."""
    if event.computing >= _BUSY:
        limit = "it is the limit"
    elif event.copying >= _BUSY:
        limit = "copying the weights to it is the limit"
    else:
        limit = "reading and writing the files is the limit"
    return f"The GPU was busy {100 * event.computing:.0f} % of the time: {limit}."


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout.NAME if plan.layout else "none",
        "scheme": _scheme(plan),
        "rotation": plan.facts.rotation,
        "source_bytes": plan.source.checkpoint.nbytes,
        "presets": plan.facts.presets,
        "totals": plan.totals(),
        **({"budget": plan.facts.budget.facts()} if plan.facts.budget else {}),
    }


def _scheme(plan: Plan) -> str:
    if plan.layout is None:
        return "none"
    return "w4a4" if plan.facts.activations else "w4a16"


def _print_summary(plan: Plan, out: Path, seconds: float) -> None:
    totals = plan.totals()
    share = totals["nvfp4_parameters"] / max(1, totals["parameters"])
    console.line(
        f"{out}: {console.size(plan.source.checkpoint.nbytes)} -> "
        f"{console.size(totals['bytes'])} in {seconds:.1f} s, "
        f"{totals['bits_per_parameter']:.2f} bits per parameter, "
        f"{share:.1%} of the parameters in NVFP4"
    )


def _print_budget(budget: Budget) -> None:
    """What each group of weights has become, and why."""
    console.table(
        "Formats by what they cost (KL divergence, nats for a token)",
        ("modules", "format", "in NVFP4", "in FP8"),
        (
            (one.name, one.format, f"{one.costs['nvfp4']:.2e}", f"{one.costs['fp8']:.2e}")
            for one in budget.decisions
        ),
    )
    console.line(
        f"{budget.bits:.3f} bits for a weight on average; rounding costs about "
        f"{budget.divergence:.3g} nats for a token with codes to nearest."
    )


def _next_step(plan: Plan, out: Path) -> str:
    return plan.facts.next_step.format(out=shlex.quote(str(out)), path=str(out))


def _show_plan(plan: Plan, as_json: bool) -> None:
    """Every tensor's decision and the needs of the run."""
    _tell(plan)
    if plan.recipe.measures:
        console.say("Formats are decided by running the model: this plan has all in NVFP4.")
    if plan.recipe.scales_channels:
        console.say("Channel scales are found by running the model: this plan has none.")
    rows = [
        {
            "name": member.name,
            "shape": list(member.shape),
            "dtype": str(member.source.dtype).removeprefix("torch."),
            "action": member.action,
            "reason": member.reason,
            "edits": [type(edit).__name__ for edit in member.edits],
            "bytes": member.output_bytes,
        }
        for member in plan.members
    ]
    needs = {
        **_facts(plan),
        "disk_bytes": plan.output_bytes,
        "memory_bytes": plan.memory_bytes,
        "calibration_memory_bytes": memory_bytes(plan) if plan.recipe.needs_text else 0,
        "shards": [shard.file for shard in plan.shards],
    }
    if as_json:
        console.print_json({**needs, "tensors": rows, "warnings": list(plan.facts.warnings)})
        return
    console.table(
        "Decisions",
        ("tensor", "shape", "dtype", "action", "reason", "edits", "bytes"),
        (
            (
                row["name"],
                "x".join(map(str, member.shape)),
                row["dtype"],
                row["action"],
                row["reason"],
                "+".join(type(edit).__name__ for edit in member.edits),
                member.output_bytes,
            )
            for row, member in zip(rows, plan.members, strict=True)
        ),
    )
    totals = plan.totals()
    console.line(
        f"Output {console.size(plan.output_bytes)} in {len(plan.shards)} file(s), "
        f"{totals['bits_per_parameter']:.2f} bits per parameter; memory up to "
        f"{console.size(plan.memory_bytes)} above the interpreter's own; nothing was written."
    )
    if plan.recipe.needs_text:
        count, length = plan.recipe.sequences, plan.recipe.sequence_length
        console.line(
            f"Calibration on {count} sequences of {length} tokens takes up to "
            f"{console.size(memory_bytes(plan))} more."
        )
