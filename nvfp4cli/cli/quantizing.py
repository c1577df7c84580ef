"""The commands that write checkpoints: quantize and convert."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4cli import pipeline
from nvfp4cli.checkpoint import hub, remote
from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint
from nvfp4cli.cli import console
from nvfp4cli.cli.device import pick
from nvfp4cli.plan.convert import plan_convert
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe


@dataclass(frozen=True)
class Source:
    """What the user names as the model."""

    model: str
    revision: str | None
    arch_spec: Path | None

    def open(self, headers_only: bool) -> Checkpoint:
        """Read and check the headers, after downloading what is missing.

        headers_only: of a hub id, nothing but the headers of the weights is fetched.
        """
        if headers_only and remote.reachable(self.model):
            return remote.open_remote(self.model, self.revision)
        return open_checkpoint(hub.resolve(self.model, self.revision))


@dataclass(frozen=True)
class Manner:
    """How to run, as opposed to what to make."""

    device: str = "cpu"
    resume: bool = False
    dry_run: bool = False
    as_json: bool = False


def quantize(source: Source, out: Path, recipe: Recipe, *, strict: bool, manner: Manner) -> None:
    """Plan, then run or show the plan."""
    pick(manner.device)  # a device that is not there is said before anything is read
    checkpoint = source.open(headers_only=manner.dry_run)
    plan = plan_quantize(
        checkpoint, recipe, model=source.model, arch_spec=source.arch_spec, strict=strict
    )
    _show_or_run(plan, out, manner)


def convert(
    checkpoint: Path, out: Path, layout: str, max_shard_size: str | None, manner: Manner
) -> None:
    """Plan, then run or show the plan."""
    Recipe(layout=layout)  # refuses an unknown layout in the recipe's own words
    plan = plan_convert(open_checkpoint(checkpoint), layout, max_shard_size)
    _show_or_run(plan, out, manner)


def _show_or_run(plan: Plan, out: Path, manner: Manner) -> None:
    if manner.dry_run:
        _show_plan(plan, manner.as_json)
    else:
        _run(plan, out, manner)


def _run(plan: Plan, out: Path, manner: Manner) -> None:
    for message in plan.facts.warnings:
        console.warn(message)
    device = pick(manner.device)
    began = time.perf_counter()
    found = list(plan.facts.warnings)
    with console.progress_bar() as bar:
        task = bar.add_task("starting", total=plan.source_bytes)
        for event in pipeline.run(plan, out, resume=manner.resume, device=device):
            if event.kind == "warning":
                console.warn(event.message)
                found.append(event.message)
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
    _print_summary(plan, out, seconds)


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout.NAME if plan.layout else "none",
        "scheme": _scheme(plan),
        "rotation": plan.facts.rotation,
        "source_bytes": plan.weights.checkpoint.nbytes,
        "totals": plan.totals(),
    }


def _scheme(plan: Plan) -> str:
    if plan.layout is None:
        return "none"
    return "w4a4" if plan.weights.layout and plan.weights.activations else "w4a16"


def _print_summary(plan: Plan, out: Path, seconds: float) -> None:
    totals = plan.totals()
    share = totals["quantized_parameters"] / max(1, totals["parameters"])
    console.line(
        f"{out}: {console.size(plan.weights.checkpoint.nbytes)} -> "
        f"{console.size(totals['bytes'])} in {seconds:.1f} s, "
        f"{totals['bits_per_parameter']:.2f} bits per parameter, "
        f"{share:.1%} of the parameters in NVFP4"
    )
    console.line(_next_step(plan, out))


def _next_step(plan: Plan, out: Path) -> str:
    return plan.facts.next_step.format(out=shlex.quote(str(out)), path=str(out))


def _show_plan(plan: Plan, as_json: bool) -> None:
    """Every tensor's decision and the needs of the run."""
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
        "shards": [shard.file for shard in plan.shards],
    }
    if as_json:
        console.print_json({**needs, "tensors": rows, "warnings": list(plan.facts.warnings)})
        return
    for message in plan.facts.warnings:
        console.warn(message)
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
