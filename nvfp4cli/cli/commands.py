"""The commands and their options. A command parses, calls one function, prints one result.

Nothing here imports torch before a command runs: `nvfp4 --help` answers in under half a second.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from nvfp4cli import __version__
from nvfp4cli.cli.options import (
    ArchSpecFile,
    Bits,
    ChannelScales,
    Device,
    DryRun,
    Dtype,
    Ignore,
    Include,
    Json,
    KeepFirst,
    KeepLast,
    KeepWorst,
    KvCache,
    Layout,
    Method,
    Mtp,
    Out,
    Rank,
    RecipeFile,
    Resume,
    Revision,
    Rotate,
    RotationKind,
    Scales,
    Scheme,
    Seed,
    SequenceLength,
    Sequences,
    ShardSize,
    Stats,
    Strict,
    Text,
    one_of,
    path,
)
from nvfp4cli.errors import UsageError
from nvfp4cli.recipe import LAYOUT_NAMES, Recipe, load

app = typer.Typer(
    name="nvfp4",
    help="Quantise Hugging Face checkpoints to NVFP4, ready to serve.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"nvfp4 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantise Hugging Face checkpoints to NVFP4, ready to serve."""


def _of_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command that are entries of a recipe, by their names."""
    lists = {key: tuple(value) or None for key, value in given.items() if isinstance(value, list)}
    return {field.name: {**given, **lists}.get(field.name) for field in fields(Recipe)}


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")],
    out: Out,
    recipe: RecipeFile = None,
    scheme: Scheme = None,
    method: Method = None,
    scales: Scales = None,
    channel_scales: ChannelScales = None,
    rank: Rank = None,
    kv_cache: KvCache = None,
    text: Text = None,
    sequences: Sequences = None,
    sequence_length: SequenceLength = None,
    stats: Stats = None,
    layout: Layout = None,
    rotate: Rotate = None,
    rotation_kind: RotationKind = None,
    seed: Seed = None,
    ignore: Ignore = None,
    include: Include = None,
    bits: Bits = None,
    keep_worst: KeepWorst = None,
    keep_first: KeepFirst = None,
    keep_last: KeepLast = None,
    dtype: Dtype = None,
    mtp: Mtp = None,
    max_shard_size: ShardSize = None,
    arch_spec: ArchSpecFile = None,
    device: Device = "auto",
    revision: Revision = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Fold rotations, quantise the weights to NVFP4, write a checkpoint that engines load."""
    options = _of_recipe(locals())
    wish = (load(recipe) if recipe is not None else Recipe()).merged(**options)

    from nvfp4cli.cli import quantizing
    from nvfp4cli.cli.source import Source

    given = {key for key, value in options.items() if value is not None}
    source = Source(model, revision, arch_spec)
    manner = quantizing.Manner(device, resume, dry_run, as_json, stats)
    quantizing.quantize(source, out, wish, given=given, strict=strict, manner=manner)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")],
    out: Annotated[Path, typer.Argument(parser=path, help="File of statistics to create.")],
    recipe: RecipeFile = None,
    scheme: Scheme = None,
    method: Method = None,
    scales: Scales = None,
    rank: Rank = None,
    kv_cache: KvCache = None,
    text: Text = None,
    sequences: Sequences = None,
    sequence_length: SequenceLength = None,
    rotate: Rotate = None,
    rotation_kind: RotationKind = None,
    seed: Seed = None,
    ignore: Ignore = None,
    include: Include = None,
    arch_spec: ArchSpecFile = None,
    device: Device = "auto",
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Write what a text shows of a model's activations, for `nvfp4 quantize --stats`."""
    wish = (load(recipe) if recipe is not None else Recipe(layout="modelopt")).merged(
        **_of_recipe(locals())
    )

    from nvfp4cli.cli import calibrating
    from nvfp4cli.cli.source import Source

    source = Source(model, revision, arch_spec)
    calibrating.calibrate(source, out, wish, device, as_json=as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(parser=path, help="An NVFP4 checkpoint of any layout.")
    ],
    out: Out,
    layout: Annotated[
        str, typer.Option(metavar=one_of(LAYOUT_NAMES), help="On-disk convention to write.")
    ],
    max_shard_size: ShardSize = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Repack an NVFP4 checkpoint into another layout; codes and scales stay as they are."""
    Recipe().merged(layout=layout, max_shard_size=max_shard_size)  # refuses what no recipe takes

    from nvfp4cli.cli import quantizing

    manner = quantizing.Manner(resume=resume, dry_run=dry_run, as_json=as_json)
    quantizing.convert(checkpoint, out, layout, max_shard_size, manner)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder or hub id, any layout.")],
    against: Annotated[
        str | None, typer.Option(help="Unquantised source to measure errors against.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if an invariant is violated.")
    ] = False,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds and which invariants it violates."""
    from nvfp4cli.cli import inspecting

    if inspecting.inspect(checkpoint, against, revision, as_json=as_json) and strict:
        raise typer.Exit(1)


@app.command("check-model")
def check_model(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, hub id or config.json.")],
    arch_spec: Annotated[
        Path | None,
        typer.Option(parser=path, help="Architecture spec to prove instead of the tool's own."),
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Prove that rotations keep what a model computes, on a small random twin of it."""
    from nvfp4cli.cli import checking

    if checking.check_model(model, revision, arch_spec, as_json=as_json):
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder or hub id, any layout.")],
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity.")] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            parser=path, show_default="WikiText-2 test, or built in", help="UTF-8 text to score."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Unquantised source: adds KL divergence and agreement.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2, show_default="1024, or what the model takes", help="Tokens in a window."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, show_default="the context", help="New tokens scored in a window."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, show_default="all", help="Tokens of the text to use.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows computed at once.")] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="Of the arithmetic.")
    ] = "float32",
    activations: Annotated[
        str,
        typer.Option(
            metavar="declared|none|four-over-six",
            help="Round activations as the checkpoint declares, not at all, or better than engines "
            "do.",
        ),
    ] = "declared",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of a checkpoint and, with --baseline, its distance from the original."""
    if not ppl:
        raise UsageError("Nothing is asked for: say what to measure, with --ppl.")

    from nvfp4cli.cli import evaluating

    options = evaluating.Options(
        context, stride, max_tokens, batch_size, dtype, device, activations
    )
    evaluating.perplexity(checkpoint, baseline, text, options, as_json=as_json)


@app.command()
def study(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            show_default="synthetic draws", help="An unquantised checkpoint folder or hub id."
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            show_default="the linear weights",
            help="Weights to study: `*.down_proj`, `re:.*`; repeat.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="as many as hold 134 million values",
            help="Weights of each kind, spread over the layers.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.png", help="Draw a figure; needs matplotlib."),
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Does a rotation help? Errors of NVFP4 and MXFP4 with and without, on draws or on weights."""
    options = {"tensors": tensors, "limit": limit, "revision": revision}
    if checkpoint is None and (given := [k for k, value in options.items() if value is not None]):
        raise UsageError(f"--{given[0]} is of a checkpoint: name one, or leave the option out.")

    from nvfp4cli.cli import studying

    if checkpoint is None:
        studying.study_draws(plot, as_json=as_json)
    else:
        choice = studying.Choice(tuple(tensors or ()), limit, revision)
        studying.study_weights(checkpoint, choice, plot, as_json=as_json)


# What the command-line library returns for Ctrl-C; older versions raise Abort.
_INTERRUPTED = 130


def run(argv: list[str]) -> int:
    """Run one command and return the exit code that it asks for; without a command, show the help.

    Raises UsageError for what the command-line library refuses, in its words.
    """
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv or ["--help"], prog_name="nvfp4", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as failure:
        # Its usage errors have this method, whichever copy of the library is in use.
        if not hasattr(failure, "format_message"):
            raise
        context = getattr(failure, "ctx", None)
        path = context.command_path if context else "nvfp4"
        raise UsageError(
            f"{failure.format_message().strip().rstrip('.')}: see `{path} --help`."
        ) from None
    if result == _INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0
