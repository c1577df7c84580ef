"""How the error of a block depends on where its largest value falls between two powers of two.

MXFP4's scales are powers of two, so nothing but chance puts the largest value of a block on the
largest code: within an octave it moves from 4 to 8 code units, where what passes 6 saturates, and
then falls back. An E4M3 block scale follows it in eight steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, mxfp4, nvfp4

_SEED = 0
_VALUES = 1 << 13  # in blocks of 16 or 32
_OCTAVES = 2  # the second shows the period
_STEPS = 96  # an octave
_TENSOR_AMAX = 64.0  # of the tensor that the blocks lie in: their scales are then normal in E4M3


@dataclass(frozen=True)
class Curve:
    """Of one format, over `Sawtooth.maxima`.

    error: relative L2 error. usage: the block's largest value over what the largest code, 6, stands
    for; above 1 it saturates.
    """

    error: list[float]
    usage: list[float]


@dataclass(frozen=True)
class Sawtooth:
    """maxima: the largest value of every block, from 1 up by octaves. curves: by format."""

    maxima: list[float]
    curves: dict[str, Curve]


def sweep() -> Sawtooth:
    """Round Gaussian blocks, all scaled to one largest value that sweeps two octaves."""
    maxima = 2.0 ** (torch.arange(_OCTAVES * _STEPS + 1) / _STEPS)  # [M]
    x = _blocks(nvfp4.BLOCK, maxima)
    q = nvfp4.quantize(x, nvfp4.GlobalScale.from_amax(_TENSOR_AMAX))
    nvfp4_scale = e4m3.decode(q.block_scale) * q.global_scale.multiplier
    nvfp4_curve = _curve(x, nvfp4.dequantize(q), nvfp4_scale, maxima)
    x = _blocks(mxfp4.BLOCK, maxima)
    r = mxfp4.quantize(x)
    mxfp4_curve = _curve(x, mxfp4.dequantize(r), mxfp4.decode(r.block_scale), maxima)
    return Sawtooth(maxima.tolist(), {"NVFP4": nvfp4_curve, "MXFP4": mxfp4_curve})


def _blocks(size: int, maxima: Tensor) -> Tensor:
    """[M, _VALUES]: the same blocks in every row, each with the row's largest magnitude."""
    generator = torch.Generator().manual_seed(_SEED)
    blocks = torch.randn(_VALUES // size, size, generator=generator)
    blocks /= blocks.abs().amax(dim=1, keepdim=True)
    return maxima[:, None] * blocks.flatten()


def _curve(x: Tensor, decoded: Tensor, scale: Tensor, maxima: Tensor) -> Curve:
    """scale: decoded, [M, blocks], the same in a whole row since the largest values are."""
    error = (decoded - x).norm(dim=1) / x.norm(dim=1)
    return Curve(error.tolist(), (maxima / (scale[:, 0] * e2m1.MAX)).tolist())
