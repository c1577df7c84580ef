"""How the scale of a block is chosen: from its maximum, or by what it does to the block.

`rtn` takes the scale that maps the block's maximum to 6, the largest code. `four-over-six` also
tries the one that maps it to 4 ("Four Over Six", arXiv:2512.02010): E2M1 has nothing between 4 and
6, so a block whose values crowd just below its maximum is rounded more finely then. `mse` tries
every E4M3 code from 3 below to 7 above that of `rtn`, between which the best one lies
("ScaleSweep", arXiv:2606.07618). `mse-block` tries the same, and weighs the error e of a block by
how its inputs go together, e^T H e with the block's own 16 x 16 part H of the Hessian, where `mse`
knows H's diagonal alone. The files stay plain NVFP4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized

METHODS = ("rtn", "four-over-six", "mse", "mse-block")
WEIGHED = ("mse", "mse-block")  # by inputs, where these are known

# The largest block scale that the maximum of a tensor may give under a rule that goes above it:
# the 4 of four-over-six needs 1.5 times as much, 384, the best code at most 12/7. From 448 both
# would saturate.
_LARGEST = 256.0
_FOUR = 1.5  # 6 / 4
_OFFSETS = range(-3, 8)
_TILE = 1 << 17  # values at a time, so that what is computed from them stays in the cache
_LARGE_TILE = 1 << 24  # on a GPU, so that it is busy


def global_scale(amax: float, method: str) -> GlobalScale:
    """The scale of a group whose largest magnitude is `amax`: amax / 2688, or / 1536 for a search.

    1.75 amax / 2688 is amax / 1536, and the product is exact in double precision.
    """
    return GlobalScale.from_amax(amax if method == "rtn" else amax * (e4m3.MAX / _LARGEST))


def importance_of(hessian: Tensor, method: str) -> Tensor:
    """What errors count for `quantize` by the inputs of a layer, in the unit of their Hessian.

    hessian: [K, K], the sum of x x^T over inputs x. Returns fp32 [K/16, 16, 16], its blocks along
    the diagonal, under mse-block, and its diagonal, fp32 [K], under any other method.
    """
    if method != "mse-block":
        return hessian.diagonal().to(torch.float32)
    tiles = hessian.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1).to(torch.float32)


def quantize(
    weight: Tensor, scale: GlobalScale, method: str, importance: Tensor | None = None
) -> Quantized:
    """Round a matrix to NVFP4 with the block scales that a method chooses.

    weight: [N, K], any float dtype, finite, K a multiple of 16; computed in fp32. scale: of
    `global_scale`. importance: what errors count: fp32 [K], not negative, of the squared error of
    each column, or fp32 [K/16, 16, 16], symmetric, H of each block, whose error is then e^T H e
    with e = rounded - exact; every column the same by default. Of equally good scales that of the
    maximum wins, then the smaller.
    """
    if method == "rtn":
        return kernels.quantize(weight, scale)
    n, k = nvfp4.check_blocks(weight.shape)
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scale_byte = torch.empty(n, k // BLOCK, dtype=torch.uint8, device=weight.device)
    bands = [] if importance is None else _bands(importance)
    rows = max(1, (_TILE if weight.device.type == "cpu" else _LARGE_TILE) // max(1, k))
    for start in range(0, n, rows):
        tile = _Tile(weight[start : start + rows], scale.multiplier, bands)
        best = tile.best(method)
        scale_byte[start : start + rows] = best
        packed[start : start + rows] = tile.packed(best)
    return Quantized(packed, scale_byte.view(torch.float8_e4m3fn), scale)


def _planes(x: Tensor) -> Tensor:
    """[R, K] -> contiguous fp32 [16, R, K/16]: one plane for each position within a block."""
    blocks = x.to(torch.float32).unflatten(1, (-1, BLOCK))
    return blocks.permute(2, 0, 1).contiguous()


def _bands(importance: Tensor) -> list[Tensor]:
    """What products of errors d columns apart count: fp32 [16 - d, 1, K/16], from d = 0 on.

    Above the main diagonal an entry stands for the one below it too.
    """
    if importance.dim() == 1:
        return [_planes(importance[None])]
    diagonals = [importance.diagonal(d, dim1=1, dim2=2).T.contiguous() for d in range(BLOCK)]
    return [(d if apart == 0 else 2 * d)[:, None] for apart, d in enumerate(diagonals)]


@dataclass(frozen=True)
class _Tile:
    """Rows of a matrix. weight: [R, K]. bands: of `_bands`; none where all columns count alike."""

    weight: Tensor
    multiplier: float
    bands: list[Tensor]

    def best(self, method: str) -> Tensor:
        """The byte of each block's best scale: uint8 [R, K/16]."""
        values = _planes(self.weight)
        signs = values.sign() if len(self.bands) > 1 else None
        magnitudes = values.abs_()
        amax = magnitudes.amax(dim=0)
        six = amax.new_full((), e2m1.MAX)
        ratio = amax / six / amax.new_full((), self.multiplier)
        best, least = None, None
        for candidate in _candidates(ratio, method):
            # A small block beside a huge one is not lost: its scale is at least 2^-9.
            byte = torch.where(amax > 0, candidate.clamp(1, e4m3.MAX_BYTE), 0).to(torch.uint8)
            error = self._error(magnitudes, signs, byte)
            if best is None or least is None:
                best, least = byte, error
            else:
                better = error < least
                best, least = torch.where(better, byte, best), torch.where(better, error, least)
        assert best is not None
        return best

    def _error(self, magnitudes: Tensor, signs: Tensor | None, byte: Tensor) -> Tensor:
        """What the errors of each block under its scale count: fp32 [R, K/16].

        Products are summed plane by plane, in one order on every device and without the reduced
        precision that a GPU may take for matrix products.
        """
        stored = e4m3.decode(byte)
        scaled = magnitudes * nvfp4.block_reciprocal(stored, self.multiplier)
        error = e2m1.nearest_magnitude(scaled).mul_(stored * self.multiplier).sub_(magnitudes)
        squares = error.square()
        if self.bands:
            squares.mul_(self.bands[0])
        total = squares[0].clone()
        for plane in squares[1:]:
            total += plane
        if signs is not None:
            error.mul_(signs)
        for apart, band in enumerate(self.bands[1:], start=1):
            for plane in (error[:-apart] * error[apart:]).mul_(band):
                total += plane
        return total

    def packed(self, byte: Tensor) -> Tensor:
        """Codes under given scales: uint8 [R, K/2]."""
        blocks = self.weight.to(torch.float32).unflatten(1, (-1, BLOCK))
        reciprocal = nvfp4.block_reciprocal(e4m3.decode(byte), self.multiplier)
        return e2m1.pack(e2m1.encode(blocks * reciprocal[..., None]).flatten(1))


def _candidates(ratio: Tensor, method: str) -> Iterator[Tensor]:
    """Codes to try, that of the maximum first. ratio: fp32 block maxima / 6 / global scale."""
    base = e4m3.round_to_bytes(ratio).to(torch.int16)
    yield base
    if method == "four-over-six":
        yield e4m3.round_to_bytes(ratio * _FOUR).to(torch.int16)
    else:
        yield from (base + offset for offset in _OFFSETS if offset)
