"""The options that commands share. Nothing here imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from nvfp4cli.recipe import (
    DTYPES,
    KV_CACHES,
    LAYOUT_NAMES,
    METHODS,
    MTP,
    ROTATION_KINDS,
    ROTATIONS,
    SCALES,
    SCHEMES,
    Recipe,
)


def path(text: str) -> Path:
    """Refuse the empty name that an unset shell variable leaves: a Path makes this folder of it."""
    if not text:
        raise typer.BadParameter("the name is empty")
    return Path(text)


def one_of(choices: tuple[str, ...]) -> str:
    return "|".join(choices)


Out = Annotated[Path, typer.Argument(parser=path, help="Folder to create.")]
Scheme = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(SCHEMES),
        show_default=Recipe.scheme,
        help="NVFP4 weights, activations too, or rotations only.",
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(LAYOUT_NAMES), show_default=Recipe.layout, help="On-disk convention."
    ),
]
Rotate = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(ROTATIONS), show_default=Recipe.rotate, help="Rotations to fold in."
    ),
]
RotationKind = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(ROTATION_KINDS), show_default=Recipe.rotation_kind, help="Of the rotations."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print every decision, read headers only, write nothing.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse options that do nothing and patterns that match nothing or split a layer.",
    ),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")]
Seed = Annotated[
    int | None, typer.Option(show_default=str(Recipe.seed), help="Of rotations and random tokens.")
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(METHODS),
        show_default=Recipe.method,
        help="How codes and scales are chosen.",
    ),
]
_CALIBRATION = "Calibration"
Scales = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(SCALES),
        show_default=Recipe.scales,
        help="How block scales are chosen under gptq, svd and awq.",
        rich_help_panel=_CALIBRATION,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        show_default=str(Recipe.rank),
        help="Of the branch that svd adds to every matrix.",
        rich_help_panel=_CALIBRATION,
    ),
]
ChannelScales = Annotated[
    bool | None,
    typer.Option(
        "--channel-scales/--no-channel-scales",
        show_default="no",
        help="Even out the channels of activations, at the cost of the weights' (exact).",
        rich_help_panel=_CALIBRATION,
    ),
]
KvCache = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(KV_CACHES),
        show_default=Recipe.kv_cache,
        help="Write scales for a KV cache.",
        rich_help_panel=_CALIBRATION,
    ),
]
Text = Annotated[
    str | None,
    typer.Option(
        show_default="Python's language reference",
        help="Text or .jsonl file, hf://datasets/OWNER/NAME/FILE, or random (tokens).",
        rich_help_panel=_CALIBRATION,
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        show_default=str(Recipe.sequences),
        help="How many pieces of the text are used.",
        rich_help_panel=_CALIBRATION,
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        show_default=str(Recipe.sequence_length),
        help="Tokens of each.",
        rich_help_panel=_CALIBRATION,
    ),
]
Mtp = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(MTP), show_default=Recipe.mtp, help="Layers that predict further tokens."
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(show_default=Recipe.max_shard_size, help="Largest size of an output file."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(help="Modules to keep in the source dtype: `*.down_proj`, `re:.*`; repeat."),
]
Include = Annotated[
    list[str] | None, typer.Option(help="Modules to quantise though kept by default: lm_head.")
]
Bits = Annotated[
    float | None,
    typer.Option(
        metavar="4.5..16",
        show_default="all NVFP4",
        help="Average bits of the weights: those that matter most become FP8 or stay.",
    ),
]
KeepWorst = Annotated[
    int | None,
    typer.Option(show_default="0", help="Groups of weights to keep: those that would cost most."),
]
KeepFirst = Annotated[
    int | None, typer.Option(show_default="0", help="Decoder layers to keep at the start.")
]
KeepLast = Annotated[
    int | None, typer.Option(show_default="0", help="Decoder layers to keep at the end.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar=one_of(DTYPES), show_default=Recipe.dtype, help="Of what is not quantised."
    ),
]
ArchSpecFile = Annotated[
    Path | None,
    typer.Option(parser=path, help="Architecture spec to use instead of the tool's own."),
]
RecipeFile = Annotated[str | None, typer.Option(help="Recipe file, or the name of a shipped one.")]
Stats = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        help="What `nvfp4 calibrate` wrote, instead of a text.",
        rich_help_panel=_CALIBRATION,
    ),
]
