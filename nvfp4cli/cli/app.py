"""The command `nvfp4`. A command parses, calls one function, prints one result.

Nothing here imports torch before a command runs: `nvfp4 --help` answers in under half a second.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nvfp4cli import __version__
from nvfp4cli.cli import console
from nvfp4cli.errors import Nvfp4Error
from nvfp4cli.recipe import DTYPES, LAYOUT_NAMES, ROTATION_KINDS, ROTATIONS, SCHEMES, Recipe, load

app = typer.Typer(
    name="nvfp4",
    help="Quantise Hugging Face checkpoints to NVFP4, ready to serve.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print every decision, read headers only, write nothing.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse patterns that match nothing or split a fused layer."),
]


def _one_of(choices: tuple[str, ...]) -> str:
    return "|".join(choices)


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


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")],
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe file, or the name of a shipped one.")
    ] = None,
    scheme: Annotated[str | None, typer.Option(metavar=_one_of(SCHEMES))] = None,
    layout: Annotated[str | None, typer.Option(metavar=_one_of(LAYOUT_NAMES))] = None,
    rotate: Annotated[str | None, typer.Option(metavar=_one_of(ROTATIONS))] = None,
    rotation_kind: Annotated[str | None, typer.Option(metavar=_one_of(ROTATION_KINDS))] = None,
    seed: Annotated[int | None, typer.Option(help="Of the rotations.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Modules to keep in the source dtype: `*.down_proj`, `re:.*`; repeat."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Modules to quantise though kept by default: lm_head.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar=_one_of(DTYPES), help="Of what is not quantised.")
    ] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Of an output file. [5GB]")] = None,
    arch_spec: Annotated[
        Path | None, typer.Option(help="Architecture spec to use instead of the tool's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    revision: Revision = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Fold rotations, quantise the weights to NVFP4, write a checkpoint that engines load."""
    from nvfp4cli.cli import quantizing

    wish = (load(recipe) if recipe else Recipe()).merged(
        scheme=scheme,
        layout=layout,
        rotate=rotate,
        rotation_kind=rotation_kind,
        seed=seed,
        ignore=tuple(ignore) if ignore else None,
        include=tuple(include) if include else None,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    source = quantizing.Source(model, revision, arch_spec)
    manner = quantizing.Manner(device, resume, dry_run, as_json)
    quantizing.quantize(source, out, wish, strict=strict, manner=manner)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="An NVFP4 checkpoint of any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    layout: Annotated[str, typer.Option(metavar=_one_of(LAYOUT_NAMES))],
    max_shard_size: Annotated[str | None, typer.Option(help="Of an output file. [5GB]")] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Repack an NVFP4 checkpoint into another layout; codes and scales stay as they are."""
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


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder or hub id, any layout.")],
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity.")] = False,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to score. [WikiText-2 test, or built in]")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Unquantised source: adds KL divergence and agreement.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens in a window. [1024]")] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="New tokens scored in a window. [context]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the text to use.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of a checkpoint and, with --baseline, its distance from the original."""
    from nvfp4cli.cli import evaluating

    if not ppl:
        raise typer.BadParameter("say what to measure: --ppl", param_hint="--ppl")
    options = evaluating.Options(context, stride, max_tokens, batch_size, dtype, device)
    evaluating.perplexity(checkpoint, baseline, text, options, as_json=as_json)


# The shells' code for Ctrl-C, which the command-line library returns or, in older versions, turns
# into Abort.
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the only place where an error becomes a sentence and an exit code.

    1 for what a user can cause, 2 for wrong usage; a bug of ours keeps its traceback.
    """
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="nvfp4", standalone_mode=False)
    except Nvfp4Error as failure:
        console.error(str(failure))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except Exception as failure:
        # Usage errors of the command-line library, whichever copy of it is in use, show themselves.
        show, code = getattr(failure, "show", None), getattr(failure, "exit_code", None)
        if show is None or code is None:
            raise
        show()
        return int(code)
    if result == _INTERRUPTED:
        console.error("Interrupted: repeat the command, with --resume if it writes a checkpoint.")
    return result if isinstance(result, int) else 0


def entry() -> None:
    """The console script."""
    sys.exit(main())
