"""NVFP4: value = e2m1(code) * e4m3(block scale) * fp32(global scale), blocks of 16 along a row.

The order of the floating-point operations below is part of the format: every kernel reproduces
these bits. NVIDIA Transformer Engine documentation, "NVFP4", for the two scale levels.
"""

import ctypes
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.errors import WeightError
from nvfp4cli.formats import e2m1, e4m3

BLOCK = 16
SPAN = e4m3.MAX * e2m1.MAX  # 2688: the largest |code * block scale|
BITS_PER_VALUE = 4 + 8 / BLOCK  # 4.5, the global scale not counted


@dataclass(frozen=True)
class GlobalScale:
    """The fp32 scale shared by a tensor group, in both directions that files store.

    multiplier: what a decoded block is multiplied by, amax / 2688 (decode_scale).
    divisor: what it is divided by, 2688 / amax (encode_scale).

    Both are rounded from amax separately: `1 / multiplier` misses `divisor` for 26 % of bf16
    amax values. Python floats that hold fp32 values exactly.
    """

    multiplier: float
    divisor: float

    @classmethod
    def from_amax(cls, amax: float) -> "GlobalScale":
        """Of a group whose largest magnitude is `amax` (a finite fp32 value).

        amax = 0, or so small that the multiplier is subnormal, gives 1: see `vanishes`.
        """
        if vanishes(amax):
            return cls(1.0, 1.0)
        return cls(_fp32(amax / SPAN), _fp32(SPAN / amax))

    @classmethod
    def from_multiplier(cls, multiplier: float) -> "GlobalScale":
        """Of a file that stores the multiplier, which is kept exactly.

        Raises ValueError where it or the divisor is not a positive finite fp32 value.
        """
        _check_positive(multiplier)
        fits = [a for a in _around(multiplier * SPAN) if _fp32(a / SPAN) == multiplier]
        amax = max(fits, key=_trailing_zeros, default=None)
        divisor = _fp32(SPAN / amax if amax else 1 / multiplier)
        _check_positive(divisor)
        return cls(multiplier, divisor)

    @classmethod
    def from_divisor(cls, divisor: float) -> "GlobalScale":
        """Of a file that stores the divisor, which is kept exactly.

        Raises ValueError where it or the multiplier is not a positive finite fp32 value.
        """
        _check_positive(divisor)
        fits = [a for a in _around(SPAN / divisor) if _fp32(SPAN / a) == divisor]
        amax = max(fits, key=_trailing_zeros, default=None)
        multiplier = _fp32(amax / SPAN if amax else 1 / divisor)
        _check_positive(multiplier)
        return cls(multiplier, divisor)


def vanishes(amax: float) -> bool:
    """True where a group is stored as zeros: amax / 2688 would be zero or subnormal in fp32."""
    return _fp32(amax / SPAN) < _FP32_TINY


_FP32_TINY = 2.0**-126


def _fp32(x: float) -> float:
    """Round to fp32. A quotient of two fp32 values taken in double precision and then rounded is
    the correctly rounded fp32 quotient, since 53 >= 2 * 24 + 2 (Figueroa 1995)."""
    return ctypes.c_float(x).value


def _check_positive(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"a global scale is {scale} where it must be positive and finite")


def _bits(a: float) -> int:
    return int.from_bytes(struct.pack("<f", a), "little")


def _around(guess: float) -> list[float]:
    """The positive finite fp32 values within two steps of `guess`.

    A file stores the global scale in one direction only. The amax it came from is among these
    values; up to two of them round to what is stored. The amax of bf16 or fp16 weights has at
    most 11 significant bits, so the candidate with the most trailing zero bits is the true one
    and going from multiplier to divisor and back loses nothing. An amax of 24 bits can be missed
    by one step, which moves the other direction by at most two units in the last place, once.
    """
    if not 0 < _fp32(guess) < math.inf:
        return []
    centre = _bits(_fp32(guess))
    near = (struct.unpack("<f", struct.pack("<I", centre + i))[0] for i in range(-2, 3))
    return [a for a in near if 0 < a < math.inf]


def _trailing_zeros(a: float) -> int:
    mantissa = _bits(a) & 0x7FFFFF | 0x800000
    return (mantissa & -mantissa).bit_length()


@dataclass(frozen=True)
class Quantized:
    """One quantised matrix, the canonical record that every layout repacks.

    packed: uint8 [N, K/2], the even element in the low nibble.
    block_scale: float8_e4m3fn [N, K/16], linear (row-major, not swizzled).
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: GlobalScale

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the matrix."""
        return self.packed.shape[0], self.packed.shape[1] * 2


def check_blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """(N, K) of a matrix. Raises ValueError where K is no multiple of 16."""
    n, k = shape
    if k % BLOCK:
        raise ValueError(f"a matrix of {n} x {k} has no whole blocks of {BLOCK} in its rows")
    return n, k


def amax(weight: Tensor) -> float:
    """Largest magnitude of a tensor, exact. NaN where the tensor holds a NaN, inf where an Inf."""
    if weight.numel() == 0:
        return 0.0
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high).item()


def check_finite(weight: Tensor, name: str) -> None:
    """Raise WeightError naming tensor, first index and count if any value is NaN or Inf."""
    bad = ~torch.isfinite(weight)
    count = int(bad.sum())
    if count:
        index = bad.nonzero()[0].tolist()
        value = weight[tuple(index)].item()
        raise WeightError(
            f"{name} holds {count} value{'s' if count > 1 else ''} that "
            f"{'are' if count > 1 else 'is'} NaN or Inf, the first ({value}) at index {index}: "
            "repair the checkpoint, or keep a linear weight as it is with --ignore."
        )


def quantize(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4 with block scales from the block maxima. The reference.

    weight: [N, K], any float dtype, finite, K a multiple of 16; computed in fp32.

    Codes come from the STORED block scale through one reciprocal per block. From the unrounded
    scale they would be wrong: randn(64, 512) has a mean squared error of 0.009088 this way and
    0.009590 that way.
    """
    n, k = check_blocks(weight.shape)
    x = weight.to(torch.float32).reshape(n, k // BLOCK, BLOCK)
    block_amax = x.abs().amax(dim=-1)  # [N, K/16]
    # Of a Python number a GPU would take the reciprocal, and multiply by that.
    six, multiplier = block_amax.new_full((), e2m1.MAX), block_amax.new_full((), scale.multiplier)
    scale_byte = e4m3.round_to_bytes(block_amax / six / multiplier)
    # A small block beside a huge one is not lost: its scale is at least 2^-9.
    scale_byte = torch.where(block_amax > 0, scale_byte.clamp(min=1), 0).to(torch.uint8)
    reciprocal = block_reciprocal(e4m3.decode(scale_byte), scale.multiplier)
    codes = e2m1.encode(x * reciprocal[..., None])
    return Quantized(e2m1.pack(codes.view(n, k)), scale_byte.view(torch.float8_e4m3fn), scale)


def block_reciprocal(block_scale: Tensor, multiplier: float) -> Tensor:
    """fp32 factor from weight to code units, 1 / (block scale * global scale); 0 for scale 0.

    One IEEE division per block; the product is clamped to fp32's largest value so that a tensor
    of amax below 1e-32 cannot give inf * 0.
    """
    decoded = block_scale * multiplier
    reciprocal = (1.0 / decoded).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(block_scale > 0, reciprocal, torch.zeros_like(reciprocal))


def zeros(rows: int, columns: int) -> Quantized:
    """A matrix of zeros: codes and block scales 0, global scale 1."""
    return Quantized(
        torch.zeros(rows, columns // 2, dtype=torch.uint8),
        torch.zeros(rows, columns // BLOCK, dtype=torch.uint8).view(torch.float8_e4m3fn),
        GlobalScale(1.0, 1.0),
    )


def dequantize(q: Quantized) -> Tensor:
    """fp32 [N, K]: (code * block scale), exact in fp32, times the global scale, rounded once."""
    n, k = q.shape
    codes = e2m1.decode(e2m1.unpack(q.packed)).view(n, k // BLOCK, BLOCK)
    scaled = codes * e4m3.decode(q.block_scale)[..., None]
    return (scaled * q.global_scale.multiplier).view(n, k)
