"""FP8 weights with their scales, read as float: weight = value * scale, in every convention.

Also where the scale is called `weight_scale_inv` it MULTIPLIES (DeepSeek-V3,
inference/fp8_cast_bf16.py; transformers/integrations/finegrained_fp8.py). One scale is for the
whole tensor, a row (compressed-tensors "channel", fbgemm), a column (fbgemm's fused experts, stored
in, out) or a block; blocks at the lower and right edge are cropped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.formats import mxfp4

BLOCK = (128, 128)
DTYPES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))

_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_POWERS = torch.float8_e8m0fnu  # `scale_fmt: ue8m0`
_SCALE_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, _POWERS))
_RANKS = (2, 3)  # a matrix, or one for each expert

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fp8:
    """A stored FP8 tensor and its scales.

    grid: the scale's shape brought to the rank of the values. steps: along each axis, how many
    values one scale is for; the last may be for fewer.
    """

    values: TensorInfo
    scale: TensorInfo
    grid: Shape
    steps: Shape
    label: str

    @property
    def shape(self) -> Shape:
        """As stored."""
        return self.values.shape

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return self.values.name, self.scale.name

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """fp32 rows [start, stop) along the first axis: value * scale, rounded once.

        A NaN among the values stays one. Raises WeightError for a scale that is no positive
        finite number.
        """
        values = checkpoint.read_rows(self.values.name, start, stop).to(torch.float32)
        first, last = start // self.steps[0], -(-stop // self.steps[0])
        scale = self._scales(checkpoint, first, last)
        for axis, step in enumerate(self.steps[:-1]):
            skipped = start - first * step if axis == 0 else 0
            scale = scale.repeat_interleave(step, dim=axis)
            scale = scale.narrow(axis, skipped, values.shape[axis])
        # Column block by column block: a scale for each value would double the memory.
        for column, part in enumerate(values.split(self.steps[-1], dim=-1)):
            part.mul_(scale[..., column : column + 1])
        return values

    def _scales(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """fp32 scales [first, last) along the first axis of the grid."""
        row = math.prod(self.grid[1:]) * self.scale.dtype.itemsize
        data = checkpoint.read_bytes(self.scale, first * row, last * row)
        if self.scale.dtype == _POWERS:
            scale = mxfp4.decode(data)
        else:
            scale = data.view(self.scale.dtype).to(torch.float32)
        bad = int((~((scale > 0) & (scale < math.inf))).sum())
        if bad:
            raise WeightError(
                f"{self.scale.name} in {self.scale.file} holds {bad} "
                f"scale{'s' if bad > 1 else ''} that {'are' if bad > 1 else 'is'} not positive "
                "and finite: download the checkpoint again, or start from the unquantised model."
            )
        return scale.view(-1, *self.grid[1:])


def scale_of(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The name of the scale that stands beside a tensor, if there is one.

    Raises CheckpointError where there are two.
    """
    found = [name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in tensors]
    if len(found) > 1:
        raise CheckpointError(
            f"{name} has two scales, {found[0]} and {found[1]}: remove the wrong one, or start "
            "from the unquantised model."
        )
    return found[0] if found else None


def encoding(values: TensorInfo, tensors: Mapping[str, TensorInfo], block: tuple[int, int]) -> Fp8:
    """How an FP8 tensor is read. block: rows and columns under one scale, where there are blocks.

    Raises CheckpointError where no scale of a known name stands beside it, or one whose dtype or
    shape does not fit.
    """
    name = scale_of(values.name, tensors)
    if name is None:
        names = " or ".join(values.name + suffix for suffix in _SCALE_SUFFIXES)
        raise CheckpointError(
            f"{values.name} in {values.file} is {_form(values)} without a scale, there is no "
            f"{names}, and FP8 without its scale is not the weight: restore the scale, or start "
            "from the unquantised model."
        )
    scale = tensors[name]
    fit = _fit(values.shape, scale.shape, block) if scale.dtype in _SCALE_DTYPES else None
    if fit is None:
        raise CheckpointError(
            f"{name} in {scale.file} is {_form(scale)}, which is no scale of {values.name}, "
            f"{_form(values)}, for the tensor, its rows or blocks of {block[0]}x{block[1]}: "
            "download the checkpoint again, or start from the unquantised model."
        )
    return Fp8(values, scale, *fit)


def _form(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _fit(values: Shape, scale: Shape, block: tuple[int, int]) -> tuple[Shape, Shape, str] | None:
    """Grid, steps and label of a scale, None where it does not fit the values."""
    if len(values) not in _RANKS:
        return None
    *experts, n, k = values
    blocks = (-(-n // block[0]), -(-k // block[1]))
    if len(values) == 2 and len(scale) == 4:  # ModelOpt's FP8_PB_WO: [rows, 1, columns, 1]
        scale = (scale[0], scale[2]) if scale[1::2] == (1, 1) else scale
    if scale == (*experts, *blocks):
        return scale, (*(1 for _ in experts), *block), f"FP8, {block[0]}x{block[1]} blocks"
    if math.prod(scale) == 1:
        return (1,) * len(values), values, "FP8, per tensor"
    if experts and scale in (values[:1], (*experts, 1), (*experts, 1, 1)):
        return (*experts, 1, 1), (1, n, k), "FP8, per tensor"
    if scale == (*experts, n, 1) or (not experts and scale == (n,)):
        return (*experts, n, 1), (*(1 for _ in experts), 1, k), "FP8, per channel"
    if experts and scale == (*experts, 1, k):
        return scale, (1, n, 1), "FP8, per channel"
    return None
