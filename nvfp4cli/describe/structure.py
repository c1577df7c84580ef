"""Invariants of the headers: every part of an NVFP4 weight is there, with its type and shape."""

import json
from collections import Counter
from collections.abc import Iterator

from nvfp4cli.checkpoint.reader import DTYPE_NAMES, TensorInfo
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.describe.inventory import COMFY_HEADER, Inventory
from nvfp4cli.describe.record import Violation, Weight
from nvfp4cli.errors import CheckpointError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts import branch

_MARKER = ".comfy_quant"
_TENSOR_NAMES = "tensor_names"  # of torchao's header


def check_parts(weight: Weight, inventory: Inventory) -> list[Violation]:
    """Missing parts, wrong types and wrong shapes of one NVFP4 weight.

    A weight without any of them can be read by its layout.
    """
    layout, tensors = inventory.layout, inventory.checkpoint.tensors
    assert layout is not None
    shape = weight.shape if weight.shape and len(weight.shape) == 2 else None
    n, k = shape or (BLOCK, BLOCK)
    found = []
    activations = layout.INPUT_SCALES and inventory.input_scale(weight) is not None
    outputs = layout.outputs(weight.module, (n, k), activations)
    if (rank := inventory.rank(weight)) is not None:
        outputs += branch.outputs(weight.module, (n, k), rank)
    for output in outputs:
        info = tensors.get(output.name)
        if info is None:
            found += _missing(output.name, inventory)
        else:
            found += _check_part(output, info, known=shape is not None)
    if shape is not None and k % BLOCK:
        found.append(
            Violation(
                weight.name,
                "part-shape",
                f"{weight.name} has {k} columns, which is no multiple of {BLOCK}: keep this module "
                "in the source dtype.",
            )
        )
    return found


def _missing(name: str, inventory: Inventory) -> list[Violation]:
    if name.endswith(_MARKER) and any(
        COMFY_HEADER in metadata for metadata in inventory.checkpoint.metadata.values()
    ):
        return []
    lost = "one half of a low-rank branch is no use without the other"
    if not name.endswith(branch.HALVES):
        lost = "engines compute with uninitialised memory in its place"
    message = f"{name} is missing, and {lost}: quantise the source again."
    return [Violation(name, "part-missing", message)]


def _check_part(output: Output, info: TensorInfo, known: bool) -> list[Violation]:
    """known: the weight's shape is, so that those of its parts follow."""
    found = []
    if info.dtype != output.dtype:
        message = (
            f"{info.name} is stored as {DTYPE_NAMES[info.dtype]} instead of "
            f"{DTYPE_NAMES[output.dtype]}: quantise the source again."
        )
        found.append(Violation(info.name, "part-dtype", message))
    scalar = output.shape in ((), (1,))  # engines take either for the other
    fits = info.numel == 1 if scalar else info.shape == output.shape
    if output.name.endswith(_MARKER):
        fits = len(info.shape) == 1  # its text, and so its length, is its writer's choice
    elif not scalar and not known:
        fits = len(info.shape) == len(output.shape)
    if not fits:
        message = (
            f"{info.name} has shape {list(info.shape)} instead of {list(output.shape)}: quantise "
            "the source again."
        )
        found.append(Violation(info.name, "part-shape", message))
    return found


def check_names(inventory: Inventory) -> Iterator[Violation]:
    """A weight that is stored twice, quantised and not."""
    counts = Counter(weight.name for weight in inventory.weights)
    for name, count in counts.items():
        if count > 1:
            yield Violation(
                name,
                "stored-twice",
                f"{name} is stored both quantised and unquantised, and engines differ in which "
                "they take: remove one of them.",
            )


def check_torchao_header(inventory: Inventory) -> Iterator[Violation]:
    """torchao's loader finds tensors through the header's __metadata__ only."""
    checkpoint = inventory.checkpoint
    for weight in inventory.nvfp4:
        file = checkpoint.tensors[weight.parts[0]].file
        metadata = checkpoint.metadata[file]
        listed = _json(metadata.get(_TENSOR_NAMES, "[]"), file)
        description = _json(metadata.get(weight.name, "{}"), file)
        kind = description.get("_type") if isinstance(description, dict) else None
        if not isinstance(listed, list) or weight.name not in listed or kind != "NVFP4Tensor":
            yield Violation(
                weight.name,
                "header-metadata",
                f"The header of {file} does not describe {weight.name} as an NVFP4Tensor, so that "
                "loaders ignore it: quantise the source again.",
            )


def check_marker(weight: Weight, inventory: Inventory) -> Iterator[Violation]:
    """ComfyUI reads the format of a module from its marker."""
    name = weight.module + _MARKER
    if name not in inventory.checkpoint.tensors:
        return
    text = bytes(inventory.checkpoint.read(name).flatten().tolist())
    try:
        named = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        named = None
    if named != "nvfp4":
        yield Violation(
            name,
            "comfy-marker",
            f'{name} does not say {{"format": "nvfp4"}}, so that ComfyUI refuses or misreads the '
            "module: quantise the source again.",
        )


def _json(text: str, file: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise CheckpointError(
            f"The __metadata__ in the header of {file} is damaged: restore the file."
        ) from None
