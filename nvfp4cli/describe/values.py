"""The data of a checkpoint, one tensor at a time: decoded weights, and what is not finite."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.describe.inventory import Inventory
from nvfp4cli.describe.record import Violation, Weight
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats import e4m3, nvfp4
from nvfp4cli.layouts import branch

_PIECE_BYTES = 16 << 20  # of a plain tensor, so that an embedding is never whole in memory
_FP8_BLOCK = 128  # where config.json does not say
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def decode(weight: Weight, inventory: Inventory) -> Tensor:
    """A weight as fp32 (plain ones as stored). An NVFP4 weight must have all its parts.

    Raises UnsupportedError for what `check_measurable` refuses, and for unknown scales of FP8.
    """
    checkpoint = inventory.checkpoint
    if weight.format == "nvfp4":
        assert inventory.layout is not None and weight.shape is not None
        n, k = weight.shape
        stored = inventory.layout.load(weight.module, (n, k), checkpoint.read, False)
        if inventory.rank(weight) is not None:
            stored = replace(stored, branch=branch.load(weight.module, checkpoint.read))
        return stored.whole(nvfp4.dequantize(stored.weight))
    if weight.format == "fp8":
        return _decode_fp8(weight, inventory)
    check_measurable(weight)
    return checkpoint.read(weight.name)


def check_measurable(weight: Weight) -> None:
    """Raise UnsupportedError for MXFP4 and for experts in FP8, which `decode` does not decode."""
    experts = weight.format == "fp8" and weight.shape is not None and len(weight.shape) > 2
    if weight.format == "mxfp4" or experts:
        kind = "MXFP4" if weight.format == "mxfp4" else "FP8 with an axis of experts"
        raise UnsupportedError(
            f"{weight.name} is in {kind}, which cannot be measured yet: leave out --against."
        )


def _decode_fp8(weight: Weight, inventory: Inventory) -> Tensor:
    """FP8 values times one scale for the tensor, each row, or each block of rows and columns.

    Raises UnsupportedError where the scales have none of these shapes.
    """
    checkpoint, name = inventory.checkpoint, inventory.weight_scale(weight)
    codes = checkpoint.read(weight.parts[0]).to(torch.float32)  # [N, K]
    if name is None:
        return codes
    scale = checkpoint.read(name).to(torch.float32)
    if scale.numel() == 1:
        return codes * scale.reshape(())
    n, k = codes.shape
    if scale.shape in ((n,), (n, 1)):
        return codes * scale.reshape(n, 1)
    quantization = checkpoint.config.get("quantization_config") or {}
    rows, columns = quantization.get("weight_block_size") or (_FP8_BLOCK, _FP8_BLOCK)
    if scale.shape != (-(-n // rows), -(-k // columns)):
        raise UnsupportedError(
            f"{name} has shape {list(scale.shape)}, which fits neither the rows of "
            f"{weight.name} nor blocks of {rows} x {columns}: leave out --against."
        )
    return codes * scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def pieces(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Tensor]:
    """A tensor's values in order, flat, a bounded number at a time."""
    for start in range(0, info.nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, info.nbytes)
        yield checkpoint.read_bytes(info, start, stop).view(info.dtype)


def same_bytes(
    info: TensorInfo, checkpoint: Checkpoint, other: TensorInfo, other_checkpoint: Checkpoint
) -> bool:
    """True for equal dtype, shape and bytes."""
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(pieces(checkpoint, info), pieces(other_checkpoint, other), strict=True)
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs)


def check_finite(name: str, checkpoint: Checkpoint) -> Iterator[Violation]:
    """NaN and Inf in a tensor that is stored as plain or as E4M3 floats."""
    info = checkpoint.tensors[name]
    bad = sum(_not_finite(piece) for piece in pieces(checkpoint, info))
    if bad:
        yield Violation(
            name,
            "not-finite",
            f"{name} holds {bad} value{'s' if bad > 1 else ''} that "
            f"{'are' if bad > 1 else 'is'} NaN or Inf: repair the source and quantise it again.",
        )


def _not_finite(values: Tensor) -> int:
    if values.dtype == torch.float8_e4m3fn:  # it has no Inf
        return int((values.view(torch.uint8) & e4m3.NAN_BYTE == e4m3.NAN_BYTE).sum())
    # One pass that allocates nothing; most tensors need no second one.
    if values.dtype not in _FLOATS or math.isfinite(nvfp4.amax(values)):
        return 0
    return int((~torch.isfinite(values)).sum())
