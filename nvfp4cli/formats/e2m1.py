"""E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3).

A code is bit 3 = sign, bits 0-2 = index into MAGNITUDES. There is no NaN and no infinity.
"""

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0

_MAGIC = 1.5 * 2**23  # n + _MAGIC is rounded to an integer, ties to even

_VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)


def encode(y: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code, saturating at +-6.

    y: any shape, fp32 and finite. Returns uint8 codes of the same shape. The sign bit is `y < 0`,
    so -0.0 becomes code 0 while -0.1, which rounds to zero, becomes code 8.

    On [0, 2) the grid has step 1/2, on [2, 4) step 1, on [4, 6] step 2. The three straight lines
    2y, y + 2 and y/2 + 4 meet at 2 and 4 and their minimum is the code before rounding; rounding
    each to nearest-even commutes with the minimum because the added constants are even. Doubling
    and halving are exact, so unlike rounding `min(2y, y + 2, y/2 + 4)` nothing is rounded twice.
    """
    a = y.abs()
    code = torch.minimum((a * 2).round(), a.round() + 2)
    code = torch.minimum(code, (a * 0.5).round() + 4).clamp(max=7)
    return code.to(torch.uint8) | (y < 0).to(torch.uint8) << 3


def decode(codes: Tensor) -> Tensor:
    """uint8 codes in [0, 15], any shape -> fp32 values of the same shape."""
    return _VALUES.to(codes.device)[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """[..., K] codes -> [..., K/2] bytes, the even element in the low nibble. K is even."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes; inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def swap_nibbles(packed: Tensor) -> Tensor:
    """Exchange the two codes of every byte: low-nibble-first <-> high-nibble-first."""
    return packed << 4 | packed >> 4


def nearest(y: Tensor) -> Tensor:
    """The value nearest to each, ties to even, beyond 6 to 6: what `encode` and `decode` give.

    y: fp32, finite. The sign of a zero is kept.
    """
    return torch.copysign(nearest_magnitude(y.abs()), y)


def nearest_magnitude(y: Tensor) -> Tensor:
    """The same of magnitudes, which are overwritten: fp32.

    The code is the least of three lines, each rounded by the addition that shifts it; its value is
    the largest of three, 0 0.5 1 1.5 2 3 4 6.
    """
    code = torch.minimum(y * 2 + _MAGIC, y + (_MAGIC + 2))
    code = torch.minimum(code, y.mul_(0.5).add_(_MAGIC + 4)).clamp_(max=_MAGIC + 7).sub_(_MAGIC)
    value = torch.maximum(code * 0.5, code - 2)
    return torch.maximum(value, code.mul_(2).sub_(8))
