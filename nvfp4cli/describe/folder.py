"""What stands beside the weights: the record of the run that wrote them, the index, leftovers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from nvfp4cli.checkpoint.files import CHANNELS, INDEX, RECORD
from nvfp4cli.checkpoint.output import JOURNAL
from nvfp4cli.checkpoint.reader import Checkpoint, read_json
from nvfp4cli.checkpoint.writer import PARTIAL
from nvfp4cli.describe.record import Violation
from nvfp4cli.errors import CheckpointError
from nvfp4cli.rotate.channels import from_bytes


@dataclass(frozen=True)
class Record:
    """How this tool made the checkpoint.

    rotation: kind, seed and sizes. names, kind and seed: of the rotations, as the recipe has them.
    """

    rotation: dict[str, Any]
    names: str
    kind: str
    seed: int


def read_record(folder: Path) -> Record | None:
    """The record of the run, None for checkpoints of other tools and of no tool.

    Raises CheckpointError where it is damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        rotation, recipe = document["rotation"], document["recipe"]
        return Record(
            {key: rotation[key] for key in ("kind", "seed", "sizes")},
            str(recipe["rotate"]),
            str(recipe["rotation_kind"]),
            int(recipe["seed"]),
        )
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} is damaged: restore it, or delete it if the checkpoint was never rotated."
        ) from None


def read_channels(folder: Path) -> dict[str, Tensor]:
    """The factors by which channels were scaled; see `rotate.channels`. Empty without a file.

    Raises CheckpointError where it is damaged.
    """
    path = folder / CHANNELS
    return from_bytes(path.read_bytes(), str(path)) if path.is_file() else {}


def check_folder(checkpoint: Checkpoint) -> Iterator[Violation]:
    """Leftovers of an unfinished run, and an index that gives another size."""
    names = sorted(path.name for path in checkpoint.folder.iterdir())
    for name in names:
        if name == JOURNAL or name.endswith(PARTIAL):
            message = (
                f"{name} is left of an unfinished run: finish it with --resume, or write the "
                "checkpoint again."
            )
            yield Violation(None, "unfinished-run", message)
    if INDEX not in names:
        return
    metadata = read_json(checkpoint.folder / INDEX).get("metadata") or {}
    size = metadata.get("total_size")
    if size is not None and size != checkpoint.nbytes:
        message = (
            f"{INDEX} gives a total_size of {size} and the tensors take {checkpoint.nbytes} "
            "bytes: correct it, or download the checkpoint again."
        )
        yield Violation(None, "index-total-size", message)
