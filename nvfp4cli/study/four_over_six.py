"""Four-over-six: NVFP4 block scales that map the largest value of a block to 6 or to 4.

The rule of "Four Over Six", arXiv:2512.02010, with squared errors. E2M1 has nothing between 4 and
6, so a block whose values crowd just below its maximum is rounded more finely when the maximum
becomes 4. The files stay plain NVFP4.
"""

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized

# The largest block scale of a tensor. Its block mapped to 4 needs 1.5 times as much, 384, which
# E4M3 holds exactly; from 448 it would saturate.
LARGEST = 256.0
_FOUR = 1.5  # 6 / 4


def global_scale(amax: float) -> GlobalScale:
    """amax / (6 * 256) and its inverse direction, each rounded once; amax as in `from_amax`.

    1.75 amax / 2688 is amax / 1536, and the product is exact in double precision.
    """
    return GlobalScale.from_amax(amax * (e4m3.MAX / LARGEST))


def quantize(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4, each block by the better of two scales.

    weight: [N, K], any float dtype, finite, K a multiple of 16; computed in fp32. scale: of
    `global_scale`. A block maps to 4 where that gives the smaller sum of squared errors, else to 6.
    """
    n, k = weight.shape
    x = weight.to(torch.float32).reshape(n, k // BLOCK, BLOCK)
    block_amax = x.abs().amax(dim=-1)  # [N, K/16]
    to_six = block_amax / e2m1.MAX / scale.multiplier
    byte, codes, error = _rounded(x, to_six, scale.multiplier)
    byte_of_four, codes_of_four, error_of_four = _rounded(x, to_six * _FOUR, scale.multiplier)
    four = error_of_four < error
    codes = torch.where(four[..., None], codes_of_four, codes)
    byte = torch.where(four, byte_of_four, byte)
    return Quantized(e2m1.pack(codes.view(n, k)), byte.view(torch.float8_e4m3fn), scale)


def _rounded(x: Tensor, scale: Tensor, multiplier: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scale bytes [N, K/16], codes [N, K/16, 16] and squared errors [N, K/16] under one scale."""
    byte = e4m3.round_to_bytes(scale)
    # As in `nvfp4.quantize`, a small block beside a huge one is not lost.
    byte = torch.where(scale > 0, byte.clamp(min=1), 0).to(torch.uint8)
    stored = e4m3.decode(byte)
    codes = e2m1.encode(x * nvfp4.block_reciprocal(stored, multiplier)[..., None])
    residual = e2m1.decode(codes) * stored[..., None] * multiplier - x
    return byte, codes, residual.square().sum(dim=-1)
