"""Calibration text for the commands that need one."""

from pathlib import Path

from torch import Tensor

from nvfp4cli import pipeline
from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.calibrate.text import Sequences, at_random, calibration_text, cut
from nvfp4cli.cli import console
from nvfp4cli.cli.device import pick
from nvfp4cli.cli.source import Source
from nvfp4cli.errors import CheckpointError
from nvfp4cli.pipeline import compute
from nvfp4cli.pipeline.budget import decide
from nvfp4cli.pipeline.calibrated import facts_of, stage_number
from nvfp4cli.pipeline.channels import channel_scales as find
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Budget, Plan
from nvfp4cli.recipe import RANDOM_TEXT, Recipe
from nvfp4cli.runtime.model import load_tokenizer
from nvfp4cli.runtime.text import leading_bos, tokenize


def sequences(plan: Plan) -> Sequences:
    """The text that a plan's recipe asks for, as tokens of its source's tokenizer."""
    recipe = plan.recipe
    if recipe.text == RANDOM_TEXT:
        assert plan.spec is not None
        sizes = plan.spec.sizes(plan.spec.language(plan.source.checkpoint.config))
        return at_random(sizes["vocab_size"], recipe.sequences, recipe.sequence_length, recipe.seed)
    text = calibration_text(recipe.text)
    tokenizer = load_tokenizer(plan.source.checkpoint.folder)
    return cut(
        tokenize(tokenizer, text.text),
        text,
        recipe.sequences,
        recipe.sequence_length,
        leading_bos(tokenizer),
    )


def calibrate(source: Source, out: Path, recipe: Recipe, device: str, *, as_json: bool) -> None:
    """Run the text through the model as the recipe quantises it, and write the statistics."""
    if out.exists():
        raise CheckpointError(f"{out} exists already: remove it, or name another file.")
    chosen = pick(device)
    checkpoint = source.open(headers_only=False)
    plan = plan_quantize(
        checkpoint, recipe, model=source.model, arch_spec=source.arch_spec, strict=False
    )
    text = sequences(plan)
    console.say(sentence(text))
    found: list[str] = []
    with console.progress_bar() as bar:
        task = bar.add_task("starting", total=plan.source_bytes)
        running = pipeline.measure(plan, text, chosen)
        while True:
            try:
                event = next(running)
            except StopIteration as end:
                statistics: Statistics = end.value
                break
            if event.kind == "warning":
                console.warn(event.message)
                found.append(event.message)
            else:
                bar.update(task, completed=event.done, total=event.total, description=event.stage)
    statistics.save(out)
    facts = {"out": str(out), "modules": len(statistics.inputs), **statistics.facts}
    if as_json:
        console.print_json({**facts, "warnings": found})
    else:
        console.line(f"{out}: inputs of {len(statistics.inputs)} modules")


def budget(plan: Plan, text: Sequences, device: str) -> Budget:
    """The formats that the weights of a plan get within the bits of its recipe."""
    layers = {job.stage for job in plan.jobs if stage_number(job.stage) is not None}
    console.say(f"Measuring what formats cost on {text.facts['text']}.")
    with console.counter() as bar:
        task = bar.add_task("forward", total=len(layers))
        running = decide(plan, text, device)
        while True:
            try:
                stage = next(running)
            except StopIteration as end:
                found: Budget = end.value
                return found
            bar.update(task, advance=1, description=stage)


def channel_scales(plan: Plan, text: Sequences, device: str) -> dict[str, Tensor]:
    """The factors that the channels of a plan's inputs are scaled by."""
    layers = {job.stage for job in plan.jobs if stage_number(job.stage) is not None}
    console.say(f"Looking for channel scales on {text.facts['text']}.")
    with console.counter() as bar:
        task = bar.add_task("forward", total=len(layers))
        running = find(plan, text, device)
        while True:
            try:
                stage = next(running)
            except StopIteration as end:
                found: dict[str, Tensor] = end.value
                break
            bar.update(task, advance=1, description=stage)
    console.say(f"Channels of {len(found)} of {len(plan.facts.scalings)} inputs are scaled.")
    return found


def reuse(path: Path, plan: Plan) -> Statistics:
    """The statistics of a file, for a plan.

    Raises CheckpointError where they are those of another model or rotation, or lack a module.
    """
    statistics = Statistics.load(path)
    for key, value in facts_of(plan).items():
        if statistics.facts.get(key) != value:
            raise CheckpointError(
                f"{path} was made with the {key.replace('_', ' ')} {statistics.facts.get(key)}, "
                f"and this run has {value}: calibrate again with the options of this run."
            )
    for job in plan.jobs:
        modules = [member.module for member in job.members]
        if job.members[0].action == "quantize":
            statistics.of(modules)
        elif job.members[0].action == "cache":
            compute.cache_scales(modules[0], statistics, plan.recipe.kv_cache)
    return statistics


def sentence(text: Sequences) -> str:
    """What is calibrated on, for people."""
    count, length = text.tokens.shape
    return f"Calibrating on {text.facts['text']}, {count} sequences of {length} tokens."
