"""Invariants of scales and codes, read one weight at a time, and the figures they give."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.describe.inventory import Inventory, suffixes
from nvfp4cli.describe.record import Figures, Violation, Weight
from nvfp4cli.formats import e4m3, mxfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale
from nvfp4cli.layouts.record import Layout

_FIRST_NORMAL = 8  # byte of 2^-6; 1 to 7 are subnormal
_NEGATIVE = 128  # the sign bit; 0x80 is -0
_MAGNITUDES = 0x77  # of both codes of a byte, without the signs


def measure(weight: Weight, inventory: Inventory) -> tuple[Figures, list[Violation]]:
    """Read an NVFP4 weight whose parts are all there with the right types and shapes."""
    layout, checkpoint = inventory.layout, inventory.checkpoint
    assert layout is not None and weight.shape is not None
    n, k = weight.shape
    codes_name, scale_name, global_name = (weight.module + s for s in suffixes(layout)[:3])

    def read(name: str) -> Tensor:
        # The global scale has no part in the bytes below, and a broken one must not stop them.
        return torch.ones(1) if name == global_name else checkpoint.read(name)

    stored = layout.load(weight.module, (n, k), read, False).weight
    scales = stored.block_scale.view(torch.uint8)  # [N, K/16]
    scale_counts = torch.bincount(scales.flatten(), minlength=256)

    found = list(_check_block_scales(scale_name, scale_counts))
    if scale_counts[0]:
        found += _check_zero_scales(codes_name, stored.packed, scales)
    if layout.SWIZZLED:
        found += _check_padding(scale_name, checkpoint, scales)
        found += _check_padding(codes_name, checkpoint, stored.packed)
    multiplier, broken = read_scale(global_name, checkpoint, layout)
    found += broken
    input_name, input_scale = inventory.input_scale(weight), None
    if input_name:
        input_scale, broken = read_scale(input_name, checkpoint, layout)
        found += broken
    positive = scale_counts[: e4m3.NAN_BYTE].nonzero()
    figures = Figures(
        global_scale=multiplier,
        max_block_scale=e4m3.decode(positive[-1].to(torch.uint8)).item() if len(positive) else 0.0,
        zero_scale_share=_share(scale_counts[0], scale_counts),
        subnormal_scale_share=_share(scale_counts[1:_FIRST_NORMAL].sum(), scale_counts),
        zero_code_share=_zero_codes(stored.packed),
        input_scale=input_scale,
        rank=inventory.rank(weight),
    )
    return figures, found


def read_scale(
    name: str, checkpoint: Checkpoint, layout: Layout | None
) -> tuple[float | None, list[Violation]]:
    """A stored scale of a tensor as the multiplier; None and a violation where it is no use.

    It must be positive, finite, and have a reciprocal. Of several (one for each attention head) it
    is the smallest, NaN if one is NaN.
    """
    value = checkpoint.read(name).to(torch.float32).min().item()
    divides = layout is not None and layout.NAME == "compressed-tensors"
    try:
        scale = GlobalScale.from_divisor(value) if divides else GlobalScale.from_multiplier(value)
    except ValueError:
        message = f"{name} is {value}, and what it scales is lost: quantise the source again."
        return None, [Violation(name, "scale-value", message)]
    return scale.multiplier, []


def check_weight_scale(weight: Weight, inventory: Inventory) -> Iterator[Violation]:
    """Scales of an FP8 weight are positive and finite, those of an MXFP4 weight no NaN."""
    name = inventory.weight_scale(weight)
    if name is None:
        return
    if weight.format == "fp8":
        yield from read_scale(name, inventory.checkpoint, None)[1]
    elif weight.format == "mxfp4":
        exponents = inventory.checkpoint.read(name).view(torch.uint8)
        if nan := int((exponents == mxfp4.NAN_BYTE).sum()):
            message = f"{name} holds {nan} NaN (byte 0xFF): download the checkpoint again."
            yield Violation(name, "scale-nan", message)


def check_groups(
    groups: Iterable[tuple[str, list[Weight]]], inventory: Inventory
) -> Iterator[Violation]:
    """Members of a fused layer must have one format, one global scale and one input scale.

    groups: name of the engines' merged module and its members. Scales are compared as stored.
    """
    tensors = inventory.checkpoint.tensors
    for fused, members in groups:
        if len({weight.format for weight in members}) > 1:
            formats = ", ".join(f"{w.module.rpartition('.')[2]} {w.format}" for w in members)
            message = (
                f"Engines merge the parts of {fused} into one layer, and they differ in format "
                f"({formats}): quantise all of them or none."
            )
            yield Violation(members[0].name, "fused-format", message)
        elif members[0].format == "nvfp4":
            assert inventory.layout is not None
            ending = suffixes(inventory.layout)[2]
            stored = [w.module + ending for w in members if w.module + ending in tensors]
            yield from _check_equal(fused, "fused-global-scale", stored, inventory.checkpoint)
            inputs = [name for w in members if (name := inventory.input_scale(w))]
            yield from _check_equal(fused, "fused-input-scale", inputs, inventory.checkpoint)


def _check_equal(
    fused: str, rule: str, names: list[str], checkpoint: Checkpoint
) -> Iterator[Violation]:
    values = [checkpoint.read(name).to(torch.float32).flatten().tolist() for name in names]
    if any(value != values[0] for value in values):
        shown = ", ".join(
            f"{name.removeprefix(fused.rpartition('.')[0] + '.')} = {value[0]:.6g}"
            for name, value in zip(names, values, strict=True)
            if value
        )
        message = (
            f"Engines merge the parts of {fused} under one scale, and theirs differ ({shown}), so "
            "that all but one are decoded wrongly: quantise the source again."
        )
        yield Violation(names[0], rule, message)


def _check_block_scales(name: str, counts: Tensor) -> Iterator[Violation]:
    nan = int(counts[e4m3.NAN_BYTE] + counts[e4m3.NAN_BYTE + _NEGATIVE])
    if nan:
        message = f"{name} holds {nan} NaN (byte 0x7F or 0xFF): quantise the source again."
        yield Violation(name, "scale-nan", message)
    negative = int(counts[_NEGATIVE : _NEGATIVE + e4m3.NAN_BYTE].sum())
    if negative:
        message = f"{name} holds {negative} negative scales: quantise the source again."
        yield Violation(name, "scale-negative", message)


def _check_zero_scales(name: str, packed: Tensor, scales: Tensor) -> Iterator[Violation]:
    blocks = packed.view(*scales.shape, BLOCK // 2)[scales == 0]  # [zero scales, 8]
    lost = int((blocks & _MAGNITUDES != 0).any(dim=-1).sum())
    if lost:
        message = (
            f"{name} has {lost} block{'s' if lost > 1 else ''} with values under a block scale of "
            "zero, which erases them: quantise the source again."
        )
        yield Violation(name, "zero-scale", message)


def _check_padding(name: str, checkpoint: Checkpoint, kept: Tensor) -> Iterator[Violation]:
    """kept: the bytes without the padding. What else on disk is not zero lies in the padding."""
    if checkpoint.tensors[name].numel == kept.numel():
        return
    stored = checkpoint.read(name).view(torch.uint8)
    dirty = int(torch.count_nonzero(stored) - torch.count_nonzero(kept))
    if dirty:
        message = (
            f"{name} has {dirty} bytes other than zero in the padding of its tiles, so that it is "
            "damaged or in another order: quantise the source again."
        )
        yield Violation(name, "padding", message)


def _share(part: Tensor, whole: Tensor) -> float:
    return int(part) / max(1, int(whole.sum()))


def _zero_codes(packed: Tensor) -> float:
    """Share of codes whose magnitude is zero; a byte holds two."""
    nonzero = torch.count_nonzero(packed & 0x07) + torch.count_nonzero(packed & 0x70)
    return 1 - int(nonzero) / max(1, 2 * packed.numel())
