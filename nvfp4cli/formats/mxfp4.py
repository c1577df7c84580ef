"""MXFP4: E2M1 codes under one power-of-two scale for each block of 32. The reference.

OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3: value = code * 2^e, the scale
byte of e8m0 is e + 127 and 0xFF means NaN. There is no scale of the tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1

BLOCK = 32
BIAS = 127
NAN_BYTE = 0xFF

_E2M1_EXPONENT = 2  # of 6 = 1.5 * 2^2


@dataclass(frozen=True)
class Quantized:
    """One quantised matrix.

    packed: uint8 [N, K/2], the even element in the low nibble. block_scale: e8m0 as uint8
    [N, K/32], linear.
    """

    packed: Tensor
    block_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the matrix."""
        return self.packed.shape[0], self.packed.shape[1] * 2


def check_blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """(N, K) of a matrix. Raises ValueError where K is no multiple of 32."""
    n, k = shape
    if k % BLOCK:
        raise ValueError(f"a matrix of {n} x {k} has no whole blocks of {BLOCK} in its rows")
    return n, k


def quantize(weight: Tensor) -> Quantized:
    """Round a matrix to MXFP4.

    weight: [N, K], any float dtype, finite, K a multiple of 32; computed in fp32. The exponent of
    a block is floor(log2(amax)) - 2, at least -127, so that its largest value lies in [4, 8) and
    what passes 6 saturates. A block of zeros gets the byte 0.
    """
    n, k = check_blocks(weight.shape)
    x = weight.to(torch.float32).reshape(n, k // BLOCK, BLOCK)
    byte = scale_bytes(x.abs().amax(dim=-1))  # [N, K/32]
    codes = e2m1.encode(x * reciprocal(byte)[..., None])
    return Quantized(e2m1.pack(codes.view(n, k)), byte)


def scale_bytes(block_amax: Tensor) -> Tensor:
    """fp32 block maxima of any shape -> e8m0 bytes.

    The exponent field of fp32 is floor(log2) + 127; of a subnormal maximum it is 0, and everything
    below 2^-125 takes the smallest scale, 2^-127.
    """
    exponent = block_amax.view(torch.int32) >> 23
    return (exponent - _E2M1_EXPONENT).clamp(min=0).to(torch.uint8)


def reciprocal(byte: Tensor) -> Tensor:
    """e8m0 bytes -> fp32 2^(127 - byte), exact: from 2^127 for byte 0 to 2^-127, a subnormal."""
    exponent = 2 * BIAS - byte.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << 23, 1 << 22)
    return bits.to(torch.int32).view(torch.float32)


def decode(byte: Tensor) -> Tensor:
    """e8m0 bytes of any shape -> fp32 2^(byte - 127), exact; NaN for 0xFF."""
    exponent = byte.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << 23, 1 << 22)
    value = bits.to(torch.int32).view(torch.float32)
    return torch.where(exponent == NAN_BYTE, torch.nan, value)


def dequantize(q: Quantized) -> Tensor:
    """fp32 [N, K]: code * 2^e, exact; infinite from 2^128 on (4 * 2^126, 2 * 2^127)."""
    n, k = q.shape
    codes = e2m1.decode(e2m1.unpack(q.packed)).view(n, k // BLOCK, BLOCK)
    return (codes * decode(q.block_scale)[..., None]).view(n, k)
