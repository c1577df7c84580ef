"""The ways to 4 bits that a study compares: a format, with or without a rotation before it.

A rotation R is orthonormal and acts on runs of a row. (x R)(w R)^T = x w^T, so an engine may rotate
both sides of a product; what the rotation changes is the error of rounding w R instead of w.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from nvfp4cli.formats import mxfp4, nvfp4
from nvfp4cli.formats.rotation import block_hadamard
from nvfp4cli.methods import scales
from nvfp4cli.rotate import hadamard

METRIC = "relative L2 error"

_QR_SIZE = 16
_QR_SEED = 0
_TILE = 1 << 18  # values rounded at a time: 1 MiB in fp32, so temporaries stay in the cache


@dataclass(frozen=True)
class Format:
    """Rounding to 4 bits and back.

    block: values that share a scale. round_trip: fp32 [N, K] and the largest magnitude of the
    tensor that these rows belong to -> the decoded fp32 [N, K].
    """

    name: str
    block: int
    round_trip: Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Rotation:
    """An orthonormal matrix along the diagonal, for every `size` values of a row.

    forward: [N, K] -> fp32 [N, K]. inverse: undoes it up to rounding.
    """

    size: int
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """One column of a table. name: for programs. label: the head of the column."""

    name: str
    label: str
    description: str
    format: Format
    rotation: Rotation | None = None

    @property
    def width(self) -> int:
        """What the length of a row must be a multiple of."""
        return math.lcm(self.format.block, self.rotation.size if self.rotation else 1)

    def fits(self, columns: int) -> bool:
        """True where rows of this length can be rotated and rounded."""
        return columns % self.width == 0

    def relative_error(self, x: Tensor, columns: Sequence[int] | None = None) -> float:
        """||x' - x|| / ||x|| with x' what the method makes of x, rotated back; 0 where x is 0.

        x: [N, K], any float dtype, finite, K fitting. columns: those that both norms are taken of,
        all by default. The scale of the tensor comes from the largest magnitude after the rotation.
        """
        tiles = [self._rotate(tile) for tile in x.split(max(1, _TILE // x.shape[1]))]
        amax = max(map(nvfp4.amax, tiles))
        noise = 0.0
        for tile in tiles:
            residual = self.format.round_trip(tile, amax) - tile
            # The way back keeps lengths, so it is needed only to tell the columns apart.
            if columns is not None:
                residual = self._rotate_back(residual)[:, columns]
            noise += _energy(residual)
        signal = _energy(x if columns is None else x[:, columns])
        return math.sqrt(noise / signal) if signal else 0.0

    def _rotate(self, x: Tensor) -> Tensor:
        return self.rotation.forward(x) if self.rotation else x.to(torch.float32)

    def _rotate_back(self, x: Tensor) -> Tensor:
        return self.rotation.inverse(x) if self.rotation else x


def _energy(x: Tensor) -> float:
    # In double precision, since squares of weights below 1e-19 vanish in fp32.
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


def _nvfp4(x: Tensor, amax: float) -> Tensor:
    return nvfp4.dequantize(nvfp4.quantize(x, nvfp4.GlobalScale.from_amax(amax)))


def _four_over_six(x: Tensor, amax: float) -> Tensor:
    rule = "four-over-six"
    return nvfp4.dequantize(scales.quantize(x, scales.global_scale(amax, rule), rule))


def _mxfp4(x: Tensor, _: float) -> Tensor:
    return mxfp4.dequantize(mxfp4.quantize(x))


NVFP4 = Format("NVFP4", nvfp4.BLOCK, _nvfp4)
FOUR_OVER_SIX = Format("NVFP4 four-over-six", nvfp4.BLOCK, _four_over_six)
MXFP4 = Format("MXFP4", mxfp4.BLOCK, _mxfp4)


def _hadamard(size: int) -> Rotation:
    """Without signs H is symmetric, and so its own inverse."""
    rotate = partial(block_hadamard, size=size)
    return Rotation(size, rotate, rotate)


@cache
def _random_orthogonal() -> hadamard.Rotation:
    return hadamard.make("qr", _QR_SIZE, _QR_SEED)


def _rotate_randomly(x: Tensor) -> Tensor:
    runs = x.to(torch.float32).unflatten(-1, (-1, _QR_SIZE))
    return _random_orthogonal().apply_right(runs).flatten(-2)


def _rotate_randomly_back(x: Tensor) -> Tensor:
    runs = x.unflatten(-1, (-1, _QR_SIZE))
    return _random_orthogonal().apply_right_transposed(runs).flatten(-2)


def _rotated(form: Format, prefix: str, size: int) -> Method:
    return Method(
        f"{form.name.lower()}-h{size}",
        f"{prefix}H{size}",
        f"{form.name} after a {size}-point Hadamard transform of each {size} values",
        form,
        _hadamard(size),
    )


PLAIN = Method("nvfp4", "NVFP4", "NVFP4, block scales from the block maxima", NVFP4)
PLAIN_MXFP4 = Method("mxfp4", "MXFP4", "MXFP4: blocks of 32, power-of-two scales", MXFP4)
METHODS = (
    PLAIN,
    *(_rotated(NVFP4, "", size) for size in (16, 32, 64, 128)),
    Method(
        "nvfp4-qr16",
        "QR16",
        "NVFP4 after a random orthogonal 16 x 16 matrix, the Q of a Gaussian one",
        NVFP4,
        Rotation(_QR_SIZE, _rotate_randomly, _rotate_randomly_back),
    ),
    Method(
        "nvfp4-four-over-six",
        "4/6",
        "NVFP4, each block's largest value mapped to 6 or to 4, whichever errs less",
        FOUR_OVER_SIX,
    ),
    PLAIN_MXFP4,
    *(_rotated(MXFP4, "MX ", size) for size in (16, 32)),
)


def rotations_of(plain: Method) -> list[Method]:
    """The methods that differ from `plain` by a rotation alone."""
    return [m for m in METHODS if m.rotation and m.format is plain.format]
